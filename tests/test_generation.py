import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import transformer_kernels
from python_ref import GPT, GPTConfig
from tests.support.host_graphs import CountedHostGraphs
from transformer_kernels.backends import cpu
from transformer_kernels.graphs import WARM_UP_CALLS
from transformer_kernels.graphs._host import HostGraphs
from transformer_kernels.pretrained import generation
from transformer_kernels.pretrained.generation import (
    Sampling,
    generate,
    generate_many,
    penalised,
    sampling_distribution,
)
from transformer_kernels.training.data.tokenizers import ByteTokenizer
from transformer_kernels.training.report import decoded, text_until

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
    assert sampling_distribution(torch.zeros(4), Sampling(top_p=0.5)).tolist() == [0.5, 0.5, 0, 0]  # half is reached
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
    with torch.device("meta"):
        on_other_device = tokens(1)
    assert tokens(1) == on_other_device != tokens(2)
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
def test_bad_sampling_is_reported(values):
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


@pytest.mark.parametrize(
    ("prompt", "count", "message"), [([], 1, "prompt must have"), ([0], -1, "must not be negative")]
)
def test_an_empty_prompt_and_a_negative_length_are_reported(prompt, count, message):
    with pytest.raises(ValueError, match=message):
        next(generate(Successor(), prompt, count, Sampling(), context=3, device=CPU))


def test_a_penalty_makes_what_was_seen_less_likely():
    result = penalised(torch.tensor([2.0, -1.0, 3.0, -1.0]), torch.tensor([0, 1, 1, 0]), 2.0)
    assert result.tolist() == [1.0, -2.0, 3.0, -1.0]
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
    prompts, sampling = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10]], Sampling(temperature=temperature, repetition_penalty=4.0)
    many = list(generate_many(model, prompts, 100, sampling, context=16, device=CPU))
    for row, prompt in enumerate(prompts):
        alone = Sampling(temperature=temperature, repetition_penalty=4.0, seed=row)
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


class Recorder(TorchDispatchMode):
    """Keeps each operator with its arguments and results, as a CUDA graph keeps kernels and addresses."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.calls.append((function, args, kwargs or {}, result))
        return result

    def replay(self):
        for function, args, kwargs, recorded in self.calls:
            if function.is_view:
                continue  # what it looks at is where it was
            fresh = function(*args, **kwargs)
            for old, new in zip(pytree.tree_leaves(recorded), pytree.tree_leaves(fresh), strict=True):
                if isinstance(new, torch.Tensor) and new.data_ptr() != old.data_ptr():
                    old.copy_(new)


class OperatorGraphs:
    """Graphs on the CPU. What a captured step reads from Python is the same in every replay; its memory is not."""

    def __init__(self):
        self.captures = self.replays = 0

    def run(self, work):
        return work()

    def capture(self, work, inputs=()):
        self.captures += 1
        cache = work.__self__.cache
        kept = [cache.position, *cache.keys, *cache.values]
        before = [tensor.clone() for tensor in kept]
        with Recorder() as recorder:
            result = work()
        for tensor, value in zip(kept, before, strict=True):  # a capture computes nothing
            tensor.copy_(value)

        def replay():
            self.replays += 1
            recorder.replay()
            return result

        return replay


@pytest.mark.parametrize(
    "fields",
    [
        {"positions": "learned"},
        {"positions": "rotary", "kv_heads": 1, "norm": "rms", "activation": "swiglu"},
        {"positions": "rotary", "window": 5},
        {"positions": "sinusoidal", "window": 6, "window_pattern": "LG"},
    ],
    ids=["learned", "llama", "window", "alternating"],
)
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_step_that_is_one_graph_gives_the_same_texts(fields, backend, monkeypatch):
    """Two prompts, one padded, and one alone; ring buffers of windows wrap around; texts may exceed the context."""
    if backend == "cpu" and (reason := cpu.unavailable(CPU)) is not None:
        pytest.skip(reason)
    torch.manual_seed(0)
    config = GPTConfig(vocab_size=13, width=24, layers=2, heads=2, context=24, dropout=0.1, **fields)
    model = GPT(config, ops=transformer_kernels.bind(backend))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    sampling = Sampling(temperature=0.8, seed=3)
    monkeypatch.setattr(generation, "_graphs_for", lambda model, device: None)

    def texts(prompts, graphs):
        steps = generate_many(model, prompts, 24, sampling, context=24, device=CPU, graphs=graphs)
        return [[choice.token for choice in step] for step in steps]

    endless = "window" in fields and "window_pattern" not in fields
    for prompts in ([[1, 2, 3, 4, 5, 6, 7], [3, 1]], [[5, 3]]):
        graphs = OperatorGraphs() if backend == "reference" else CountedHostGraphs()
        assert texts(prompts, graphs) == texts(prompts, None)
        steps_with_the_cache = 23 if endless else 24 - len(prompts[0])
        assert (graphs.captures, graphs.replays) == (1, steps_with_the_cache - WARM_UP_CALLS)


def test_recorded_steps_are_what_a_model_of_the_cpu_kernels_gets():
    reason = cpu.unavailable(CPU)
    for backend, expected in (("reference", None), ("torch", None), ("cpu", HostGraphs), ("auto", HostGraphs)):
        model = transformer_kernels.build("char_gpt", backend)
        found = generation._graphs_for(model, CPU)
        assert found is None if expected is None or reason is not None else isinstance(found, expected)
    assert generation._graphs_for(Successor(), CPU) is None


class RefusingGraphs(OperatorGraphs):
    def capture(self, work, inputs=()):
        work()
        raise RuntimeError("operation not permitted when stream is capturing\nmore")


def test_a_step_that_cannot_be_captured_is_reported_once_and_run():
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=13, width=24, layers=1, heads=2, context=24))
    options = {"sampling": Sampling(seed=1), "context": 24, "device": CPU}
    with pytest.warns(
        UserWarning, match="steps are not captured, .*: operation not permitted when stream is capturing$"
    ) as warned:
        steps = list(generate_many(model, [[1, 2]], 9, **options, graphs=RefusingGraphs()))
    alone = generate(model, [1, 2], 9, **options)
    assert len(warned) == 1
    for (mine,), theirs in zip(steps, alone, strict=True):
        torch.testing.assert_close(mine.probabilities, theirs.probabilities)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["torch", "triton", "cuda"])
@pytest.mark.filterwarnings("ignore:generate. no graph")
def test_a_captured_step_gives_the_same_texts_on_a_gpu(backend):
    device = torch.device("cuda")
    model = transformer_kernels.build("llama", backend, width=64, heads=4, kv_heads=2, layers=2, vocab_size=99).to(
        device
    )
    options = {"sampling": Sampling(seed=1), "context": 128, "device": device}
    captured, launched = (
        [
            [choice.token for choice in step]
            for step in generate_many(model, [[1, 2], [7]], 60, **options, graphs=graphs)
        ]
        for graphs in (None, RefusingGraphs())
    )
    assert captured == launched
