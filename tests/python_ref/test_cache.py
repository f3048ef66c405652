"""A model that remembers keys and values gives what it gives when it reads everything again."""

import pytest
import torch

import python_ref
from python_ref import GPT, GPTConfig

SMALL = {"vocab_size": 13, "context": 24, "width": 24, "layers": 3, "heads": 6, "dropout": 0.0}
FAMILY = {
    "gpt2": {},
    "post-norm": {"norm": "post", "final_norm": False, "positions": "sinusoidal"},
    "grouped": {"kv_heads": 2, "positions": "rotary", "norm": "rms", "activation": "swiglu"},
    "one-key-head": {"kv_heads": 1, "value_dim": 7, "qk_norm": True},
    "window": {"window": 5, "positions": "rotary"},
    "window-of-one": {"window": 1},
    "alternating": {"window": 3, "window_pattern": "LG", "kv_heads": 3},
    "interleaved": {"positions": "rotary", "rotary_width": 2, "rotary_interleaved": True},
}


def make(**fields):
    torch.manual_seed(0)
    model = GPT(GPTConfig(**{**SMALL, **fields}))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def read(model, tokens, cache, chunks):
    return torch.cat([model(part, cache=cache) for part in tokens.split(chunks, dim=1)], dim=1)


@pytest.mark.parametrize("fields", FAMILY.values(), ids=FAMILY)
@pytest.mark.parametrize(
    "chunks", [[1] * 24, [7, 1, 1, 9, 1, 5], [24]], ids=["one by one", "in chunks of any length", "all at once"]
)
def test_logits_are_those_of_the_whole_sequence(fields, chunks):
    model = make(**fields)
    tokens = torch.randint(13, (2, 24))
    cache = model.new_cache(2, 24)
    for _ in range(2):  # and again, in the same memory
        torch.testing.assert_close(read(model, tokens, cache, chunks), model(tokens), rtol=1e-5, atol=1e-5)
        cache.reset()


@pytest.mark.parametrize("fields", FAMILY.values(), ids=FAMILY)
def test_padding_on_the_left_changes_nothing(fields):
    model = make(**fields)
    tokens = torch.randint(13, (3, 20))
    padding = torch.tensor([0, 3, 7])
    cache = model.new_cache(3, 20)
    real = torch.arange(8) >= padding[:, None]
    logits = torch.cat((model(tokens[:, :8], real, cache=cache), read(model, tokens[:, 8:], cache, 1)), dim=1)
    whole = model(tokens, torch.arange(20) >= padding[:, None])
    for row, count in enumerate(padding):
        alone = model(tokens[row : row + 1, count:])[0]
        torch.testing.assert_close(logits[row, count:], alone, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(whole[row, count:], alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("steady", [False, True])
@pytest.mark.parametrize("fields", FAMILY.values(), ids=FAMILY)
def test_sequences_continue_from_the_state_of_others(fields, steady):
    """`take`, as in a beam search: keys, values and padding follow the rows."""
    model = make(**fields)
    tokens = torch.randint(13, (3, 12), generator=torch.Generator().manual_seed(1))
    rows, real = torch.tensor([2, 0, 2]), torch.arange(8) >= torch.tensor([[0], [3], [6]])
    cache = model.new_cache(3, 12, steady=steady)
    model(tokens[:, :8], real, cache=cache)
    cache.take(rows)
    found = read(model, tokens[:, 8:], cache, [1, 1, 2])
    whole = torch.cat((tokens[rows, :8], tokens[:, 8:]), 1)
    expected = model(whole, torch.cat((real[rows], torch.ones(3, 4, dtype=torch.bool)), 1))[:, 8:]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("steady", [False, True])
@pytest.mark.parametrize("fields", FAMILY.values(), ids=FAMILY)
def test_a_cache_that_was_reset_is_as_new(fields, steady):
    """The first token after `reset` is a step of its own, at position 0 and without the padding of before."""
    model = make(**fields)
    tokens = torch.randint(13, (2, 12), generator=torch.Generator().manual_seed(1))
    cache = model.new_cache(2, 12, steady=steady)
    model(tokens[:, :6], torch.arange(6) >= torch.tensor([[0], [4]]), cache=cache)
    read(model, tokens[:, 6:8], cache, 1)
    cache.reset()
    torch.testing.assert_close(read(model, tokens, cache, 1), model(tokens), rtol=1e-5, atol=1e-5)


def test_a_model_of_windows_reads_on_for_ever():
    fields = {"window": 5, "positions": "rotary", "kv_heads": 2}
    model, longer = make(**fields), make(**fields, context=120)
    tokens = torch.randint(13, (2, 120))
    cache = model.new_cache(2, 8)
    memory = cache.nbytes
    torch.testing.assert_close(read(model, tokens, cache, [3, 60, 1, 1, 55]), longer(tokens), rtol=1e-5, atol=1e-5)
    assert cache.nbytes == memory
    with pytest.raises(ValueError, match="a sequence of 120 tokens is longer than the model's 24 positions"):
        model(tokens)


def test_last_only_is_the_last_of_all():
    model = make()
    tokens = torch.randint(13, (2, 6))
    last = model(tokens, last_only=True)
    assert last.shape == (2, 1, 13)
    torch.testing.assert_close(last, model(tokens)[:, -1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_are_those_of_all_keys_and_values(dtype):
    model = make(kv_heads=2).to(dtype)
    assert model.new_cache(3, 20).nbytes == 2 * 3 * 2 * 4 * (3 * 20) * dtype.itemsize  # layers, kv_heads, D, tokens
    windows = make(kv_heads=2, window=5, window_pattern="LLG").to(dtype)
    assert windows.new_cache(3, 20).nbytes == 2 * 2 * 4 * 3 * (5 + 5 + 20) * dtype.itemsize
    cache = python_ref.build("llama", layers=2, vocab_size=16).new_cache(1, 100)
    assert cache.nbytes == 2 * 2 * 3 * 64 * 100 * 4


def test_no_gradient_goes_through_a_cache():
    model = make()
    cache = model.new_cache(1, 8)
    assert not model(torch.zeros(1, 4, dtype=torch.int64), cache=cache).requires_grad


def test_cache_under_autocast_holds_its_dtype():
    model, tokens = make(), torch.randint(13, (1, 6))
    with torch.autocast("cpu", torch.bfloat16):
        cache = model.new_cache(1, 6)
        cached = read(model, tokens, cache, 2)
        torch.testing.assert_close(cached, model(tokens).detach(), rtol=0.1, atol=0.5)
    assert cache.dtype == torch.bfloat16
    cache.reset()
    with pytest.raises(TypeError, match=r"cache: its dtype is torch\.bfloat16; the model computes in torch\.float32"):
        model(tokens, cache=cache)


def refused(model, cache, tokens, *mask):
    """The message of the error, with the cache and the operations untouched."""
    model.ops, before = None, (cache.tokens, [keys.clone() for keys in cache.keys])
    for module in model.modules():
        if hasattr(module, "ops"):
            module.ops = None  # to compute anything would be an AttributeError
    with pytest.raises((ValueError, TypeError)) as error:
        model(tokens, *mask, cache=cache)
    assert cache.tokens == before[0] and all(map(torch.equal, cache.keys, before[1]))
    return str(error.value)


def test_a_cache_that_does_not_fit_is_refused_before_anything_is_computed():
    model, tokens = make(), torch.zeros(2, 5, dtype=torch.int64)
    filled = model.new_cache(2, 12)
    model(tokens, cache=filled)
    model(tokens, cache=filled)
    assert refused(model, filled, tokens) == "cache: 10 of its 12 tokens are used; there is no room for 5"
    assert refused(model, make().new_cache(2, 12), tokens).startswith("cache: it belongs to another model")
    message = refused(model, model.new_cache(3, 12), tokens)
    assert message == "cache: tokens must have shape (3, length); got (2, 5)"
    assert refused(model, model.new_cache(2, 12, torch.float16), tokens[:, :1]) == (
        "cache: its dtype is torch.float16; the model computes in torch.float32"
    )
    right = torch.arange(5) < torch.tensor([[3], [5]])
    assert "padding must be on the left" in refused(model, model.new_cache(2, 12), tokens, right)
    assert "only be given with a cache's first tokens" in refused(model, filled, tokens[:, :2], right[:, :2])
    filled.reset()
    assert refused(model, filled, torch.zeros(2, 13, dtype=torch.int64)).startswith("cache: 0 of its 12 tokens")


@pytest.mark.parametrize(
    ("batch", "length", "message"),
    [
        (0, 4, "batch and length must be at least 1; got 0 and 4"),
        (1, 0, "batch and length must be at least 1; got 1 and 0"),
        (1, 25, "length must be at most the model's context 24; got 25"),
    ],
)
def test_a_cache_of_no_size_is_refused(batch, length, message):
    with pytest.raises(ValueError, match=message):
        make().new_cache(batch, length)
