"""`load_pretrained(folder).generate(prompt)`: text and tokens, against transformers on the same folder."""

import copy
import pickle

import pytest
import torch

import transformer_kernels as tk
from transformer_kernels.pretrained.generation import Sampling, generate_many

transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra `test`)")
tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed (extra `train`)")

WORDS = ["<s>", "</s>", "once", "upon", "a", "time", "there", "was", "model", ",", "."]
SIZES = {"vocab_size": len(WORDS), "bos_token_id": 0, "eos_token_id": 1}
CONFIGS = {
    "gpt2": ("GPT2LMHeadModel", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    "llama": ("LlamaForCausalLM", {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}),
}


def save(family, folder, seed=0):
    """A random model of transformers and a tokenizer of words, which begins a Llama's texts with <s>; both saved."""
    kind, sizes = CONFIGS[family]
    kind = getattr(transformers, kind)
    torch.manual_seed(seed)
    model = kind(kind.config_class(**sizes, **SIZES)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    model.save_pretrained(folder)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: n for n, word in enumerate(WORDS)}, "."))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.add_special_tokens(WORDS[:2])
    if family == "llama":
        words.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>")
    tokenizer.save_pretrained(folder)
    return model, tokenizer


def greedy(model, tokens, count):
    """The tokens of transformers."""
    mask = torch.ones_like(tokens)
    return model.generate(tokens, attention_mask=mask, max_new_tokens=count, do_sample=False, pad_token_id=1)


@pytest.mark.parametrize("family", CONFIGS)
def test_text_in_text_out(family, tmp_path):
    theirs, tokenizer = save(family, tmp_path)
    model = tk.load_pretrained(tmp_path)
    prompts = ["once upon a time", "a model"]
    for prompt in prompts:
        expected = greedy(theirs, tokenizer(prompt, return_tensors="pt").input_ids, 12)[0]
        assert model.generate(prompt, max_new_tokens=12) == tokenizer.decode(expected, skip_special_tokens=True)
    assert model.generate(prompts, max_new_tokens=12) == [model.generate(each, max_new_tokens=12) for each in prompts]
    assert model.generate("once  upon", max_new_tokens=0) == "once  upon"
    assert model.generate("once  upon", max_new_tokens=5).startswith("once  upon ")


@pytest.mark.parametrize("family", CONFIGS)
def test_tokens_in_tokens_out(family, tmp_path):
    theirs, _ = save(family, tmp_path)
    model = tk.load_pretrained(tmp_path)
    tokens = torch.tensor([[2, 3, 4], [4, 8, 9]])
    expected = greedy(theirs, tokens, 12)
    assert torch.equal(model.generate(tokens, max_new_tokens=12), expected)
    assert torch.equal(model.generate(tokens[:1].int(), max_new_tokens=3), expected[:1, :6])
    assert torch.equal(model.generate(tokens[0], max_new_tokens=3), expected[0, :6])
    assert model.generate([4, 8, 9], max_new_tokens=3) == expected[1, :6].tolist()


def test_a_sequence_ends_with_its_end_token(tmp_path):
    """As in transformers, the other sequences of the batch go on, and the rest of its row is filled."""
    tokens = torch.arange(2, 10).view(8, 1)
    for seed in range(8):
        theirs, tokenizer = save("gpt2", tmp_path, seed)
        expected = greedy(theirs, tokens, 12)
        ends = (expected[:, 1:] == 1).int().argmax(1)
        if 0 < (expected[:, 1:] == 1).any(1).sum() < 8 and ends.max() < 11:
            break
    else:
        pytest.fail("no seed gives a batch in which some sequences end")
    model = tk.load_pretrained(tmp_path)
    assert torch.equal(model.generate(tokens, max_new_tokens=12), expected)
    ended = int((expected[:, 1:] == 1).any(1).int().argmax())
    text = model.generate(WORDS[2 + ended], max_new_tokens=12)
    assert text == tokenizer.decode(expected[ended], skip_special_tokens=True)


def test_sampling_parameters(tmp_path):
    save("llama", tmp_path)
    model = tk.load_pretrained(tmp_path)
    options = {"temperature": 2.0, "top_k": 7, "top_p": 0.9, "repetition_penalty": 1.3, "seed": 5}
    prompts = [[2, 3], [4, 8]]
    steps = generate_many(model, prompts, 6, Sampling(**options), context=64, device=torch.device("cpu"), ends={1})
    expected = [list(row) for row in zip(*([each.token for each in step] for step in steps), strict=True)]
    written = model.generate(torch.tensor(prompts), max_new_tokens=6, **options)[:, 2:].tolist()
    for row, other in zip(written, expected, strict=True):
        end = other.index(1) + 1 if 1 in other else len(other)
        assert row[:end] == other[:end]
    assert written != model.generate(torch.tensor(prompts), max_new_tokens=6)[:, 2:].tolist()
    with pytest.raises(ValueError, match="top_p must be in"):
        model.generate([1], top_p=0.0)


def test_copies_keep_the_tokenizer_and_the_mode(tmp_path):
    save("gpt2", tmp_path)
    model = tk.load_pretrained(tmp_path).train()
    text = model.generate("a model", max_new_tokens=5)
    assert model.training
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert again.generate("a model", max_new_tokens=5) == text


def test_what_generate_refuses(tmp_path):
    save("gpt2", tmp_path)
    model = tk.load_pretrained(tmp_path)
    for prompt in (None, [0.5], torch.zeros(1, 2), torch.zeros(1, 1, 2, dtype=torch.int64), ["a", 3]):
        with pytest.raises(TypeError, match=r"generate: prompt must be text, tokens \(L\) or \(B, L\)"):
            model.generate(prompt)
    with pytest.raises(ValueError, match="the prompt must have at least one token"):
        model.generate("")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).unlink()
    alone = tk.load_pretrained(tmp_path)
    assert len(alone.generate([2, 3], max_new_tokens=2)) == 4
    with pytest.raises(FileNotFoundError, match=r"no tokenizer\.json, vocab\.txt"):
        alone.generate("a model")
