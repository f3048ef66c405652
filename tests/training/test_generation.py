import pytest
import torch

import transformer_kernels
from python_ref import GPT, GPTConfig
from transformer_kernels.training import Sampling, generate, generate_many
from transformer_kernels.training.generation import decoded, penalised, sampling_distribution, text_until
from transformer_kernels.training.tokenizers import ByteTokenizer

LOGITS = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
CPU = torch.device("cpu")


class Successor(torch.nn.Module):
    """Finds the token after the last one the most likely, and remembers how much it saw."""

    def forward(self, tokens):
        self.seen = tokens.shape[1]
        return torch.nn.functional.one_hot((tokens + 1) % 5, 5).float()


def distribution(**sampling):
    return [round(value, 4) for value in sampling_distribution(LOGITS, Sampling(**sampling)).tolist()]


def test_distributions():
    assert distribution() == [0.5, 0.3, 0.15, 0.05]
    assert distribution(temperature=0.0) == [1, 0, 0, 0]
    assert distribution(top_k=2) == [0.625, 0.375, 0, 0]
    assert distribution(top_k=99) == [0.5, 0.3, 0.15, 0.05]
    assert distribution(top_p=0.8) == [0.625, 0.375, 0, 0]
    assert distribution(top_p=0.81) == [0.5263, 0.3158, 0.1579, 0]
    assert distribution(top_p=0.01) == [1, 0, 0, 0]
    squares = torch.tensor([0.25, 0.09, 0.0225, 0.0025])
    assert distribution(temperature=0.5) == pytest.approx((squares / squares.sum()).tolist(), abs=1e-4)


def test_greedy_counts_on_and_sees_no_more_than_its_context():
    model = Successor()
    choices = list(generate(model, [0], 7, Sampling(temperature=0.0), context=3, device=CPU))
    assert [choice.token for choice in choices] == [1, 2, 3, 4, 0, 1, 2]
    assert model.seen == 3
    assert choices[0].probabilities.argmax() == 1
    assert choices[0].probabilities.sum().item() == pytest.approx(1.0)


def test_a_seed_repeats_its_draws_and_leaves_torch_alone():
    def tokens(seed):
        return [choice.token for choice in generate(Successor(), [0], 30, Sampling(seed=seed), context=3, device=CPU)]

    before = torch.get_rng_state()
    assert tokens(1) == tokens(1) != tokens(2)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    "pieces, stop, expected",
    [
        (["ab", "cd", "ef"], "", ["ab", "cd", "ef"]),
        (["ab", "cd", "ef"], "cd", ["ab"]),
        (["a", "b", "c", "d"], "bcx", ["a", "bcd"]),
        (["a", "e", "n", "d", "z"], "end", ["a"]),
        (["eee", "end"], "end", ["ee", "e"]),
    ],
)
def test_text_streams_up_to_the_stop(pieces, stop, expected):
    assert list(text_until(pieces, stop)) == expected


@pytest.mark.parametrize(
    "values",
    [{"temperature": -1}, {"temperature": float("nan")}, {"top_k": -1}, {"top_p": 0}, {"repetition_penalty": 0.0}],
)
def test_bad_sampling_is_told(values):
    with pytest.raises(ValueError, match=f"{next(iter(values))} must"):
        Sampling(**values)


def test_generation_ends_when_every_text_has_ended():
    steps = generate_many(Successor(), [[0], [2]], 9, Sampling(temperature=0.0), context=3, device=CPU, ends={4})
    assert [[choice.token for choice in choices] for choices in steps] == [[1, 3], [2, 4], [3, 0], [4, 1]]


def test_a_character_of_several_tokens_is_written_whole():
    tokenizer = ByteTokenizer()
    text = "aé漢😀z"
    assert list(decoded(tokenizer.encode(text), tokenizer)) == list(text)
    assert "".join(decoded([0xE6, 0xBC], tokenizer)) == "\ufffd"
    assert "".join(decoded([0xFF] * 5 + [ord("b")], tokenizer)).endswith("b"), "no character waits for ever"


def test_a_model_with_dropout_generates_without_it():
    torch.manual_seed(0)
    embedding = torch.nn.Embedding(5, 5)
    model = torch.nn.Sequential(embedding, torch.nn.Dropout(0.5)).train()
    choices = list(generate(model, [0], 8, Sampling(temperature=0.0), context=3, device=CPU))
    for before, choice in zip([0, *(choice.token for choice in choices)], choices, strict=False):
        assert torch.equal(choice.probabilities, embedding.weight[before].detach().softmax(-1))


def test_an_empty_prompt_is_told():
    with pytest.raises(ValueError, match="the prompt must have at least one token"):
        next(generate(Successor(), [], 1, Sampling(), context=3, device=CPU))


def test_a_penalty_makes_what_was_seen_less_likely():
    told = penalised(torch.tensor([2.0, -1.0, 3.0, -1.0]), torch.tensor([0, 1, 1, 0]), 2.0)
    assert told.tolist() == [1.0, -2.0, 3.0, -1.0]
    texts = []
    for penalty in (1.0, 3.0):
        sampling = Sampling(temperature=0.0, repetition_penalty=penalty)
        texts.append([choice.token for choice in generate(language_model(), [1], 12, sampling, context=16, device=CPU)])
    assert len(set(texts[1])) > len(set(texts[0]))


SMALL = {"vocab_size": 13, "context": 16, "width": 24, "layers": 2, "heads": 6, "dropout": 0.0}
WINDOW = {"window": 4, "positions": "rotary", "kv_heads": 2}


def language_model(**fields):
    torch.manual_seed(0)
    model = GPT(GPTConfig(**{**SMALL, **fields}), transformer_kernels.bind("reference"))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    return model


class Forgetful(torch.nn.Module):
    """A model without its cache."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens, *mask):
        return self.model(tokens, *mask)


@pytest.mark.parametrize("fields", [{}, {"kv_heads": 1}, WINDOW], ids=["full", "one-key-head", "window"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_cache_changes_no_token_also_past_the_context(fields, temperature):
    """Past it, a model with a window in each layer is that of a longer context; another reads its last tokens again."""
    model = language_model(**fields)
    whole = Forgetful(language_model(**{**fields, "context": 110 if "window" in fields else 16}))
    reach = 110 if "window" in fields else 16
    prompts, sampling = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10]], Sampling(temperature=temperature, repetition_penalty=1.1)
    many = list(generate_many(model, prompts, 100, sampling, context=16, device=CPU))
    for row, prompt in enumerate(prompts):
        alone = Sampling(temperature=temperature, repetition_penalty=1.1, seed=row)
        expected = [choice.token for choice in generate(whole, prompt, 100, alone, context=reach, device=CPU)]
        assert [choices[row].token for choices in many] == expected
    assert len({choice.token for choices in many for choice in choices}) > 1


def test_a_cached_step_reads_one_token():
    model, lengths = language_model(), []
    model.embedding.register_forward_hook(lambda module, inputs, output: lengths.append(output.shape[1]))
    list(generate(model, [1, 2, 3], 16, Sampling(), context=16, device=CPU))
    assert lengths == [3] + [1] * 13 + [16, 16]


def test_a_prompt_longer_than_the_context_is_read_from_its_end():
    model = language_model()
    prompt = torch.randint(13, (30,)).tolist()
    ends = (generate(model, prompt[start:], 5, Sampling(), context=16, device=CPU) for start in (0, 14))
    first, second = ([choice.token for choice in choices] for choices in ends)
    assert first == second
