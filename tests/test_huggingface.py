"""`attn_implementation="transformer_kernels"`: models of transformers have the results of eager attention."""

import copy
import math
from types import SimpleNamespace

import pytest
import torch

import transformer_kernels as tk
from tests.support import transformers_models as models
from tests.support.transformers_models import one_thread  # noqa: F401  # a fixture of every test here
from transformer_kernels.backends.dispatch import unavailable

huggingface = pytest.importorskip("transformer_kernels.huggingface", reason="transformers is not installed")
masking = pytest.importorskip("transformers.masking_utils")


def with_our_attention(model, name=huggingface.NAME):
    ours = copy.deepcopy(model)
    if not ours._can_set_attn_implementation():
        pytest.skip("this release of transformers does not let the attention of this model be chosen")  # T5 before 5.18
    ours.set_attn_implementation(name)
    assert ours.config._attn_implementation == name
    return ours


@pytest.mark.parametrize("name", [huggingface.NAME, huggingface.FLASH_NAME])
@pytest.mark.parametrize("padding", ["right", "left"])
@pytest.mark.parametrize("family", models.FAMILIES)
def test_models_match_eager(family, padding, name):
    eager, batch = models.make(family), models.inputs(family, padding)
    exact = models.run(family, models.exact(eager), batch)
    ours = models.run(family, with_our_attention(eager, name), batch)
    models.assert_within_budget(ours, models.run(family, eager, batch), exact)


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("family", models.CAUSAL)
def test_generation_matches_eager(family, cache):
    eager = models.make(family).eval()
    batch = models.inputs(family, "left", labels=False)
    options = {"max_new_tokens": 6, "do_sample": False} | ({} if cache is None else {"cache_implementation": cache})
    assert torch.equal(with_our_attention(eager).generate(**batch, **options), eager.generate(**batch, **options))


def test_packed_rows_do_not_see_each_other():
    eager = models.make("llama")
    ours, tokens = with_our_attention(eager), torch.arange(3, 13).unsqueeze(0)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5]])
    packed = ours(input_ids=tokens, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(packed, eager(input_ids=tokens, position_ids=positions, use_cache=False).logits)
    torch.testing.assert_close(packed[:, 4:], ours(input_ids=tokens[:, 4:], use_cache=False).logits)


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_bounds_of_packed_sequences(family):
    """As DataCollatorWithFlattening gives them, for models whose masks are not made of positions too."""
    ours, tokens = with_our_attention(models.make(family)).eval(), torch.arange(3, 13).unsqueeze(0)
    bounds, positions = torch.tensor([0, 4, 10], dtype=torch.int32), torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5]])
    given = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds.clone(), "max_length_q": 6, "max_length_k": 6}
    packed = ours(input_ids=tokens, position_ids=positions, **given).logits
    for part in (slice(0, 4), slice(4, 10)):
        alone = ours(input_ids=tokens[:, part], attention_mask=torch.ones(1, part.stop - part.start)).logits
        torch.testing.assert_close(packed[:, part], alone)


def test_packed_keys_may_have_bounds_of_their_own():
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)
    module, of_queries, of_keys = SimpleNamespace(is_causal=False), [0, 2, 5], [0, 6, 9]
    bounds = {"cu_seq_lens_q": torch.tensor(of_queries).int(), "cu_seq_lens_k": torch.tensor(of_keys).int()}
    out, _ = huggingface.attention_forward(module, q, k, v, is_causal=False, **bounds)
    for i in range(2):
        queries, keys = (slice(each[i], each[i + 1]) for each in (of_queries, of_keys))
        alone = torch.nn.functional.scaled_dot_product_attention(q[:, :, queries], k[:, :, keys], v[:, :, keys])
        torch.testing.assert_close(out[:, queries], alone.transpose(1, 2))


def one_by_one(model, sequences, shift):
    """Logits, loss and gradients of sequences that are run alone; the first token is no label."""
    model.zero_grad()
    outs = [model(input_ids=torch.tensor([tokens])).logits[0] for tokens in sequences]
    rows = torch.cat([logits[: len(logits) - 1] if shift else logits[1:] for logits in outs])
    loss = torch.nn.functional.cross_entropy(
        rows, torch.tensor([label for tokens in sequences for label in tokens[1:]])
    )
    loss.backward()
    gradients = {f"d{name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"logits": torch.cat(outs).detach()[None], "loss": loss.detach(), **gradients}


@pytest.mark.parametrize("bounds", [True, False], ids=["bounds", "positions"])
@pytest.mark.parametrize("family", ["bert", "modernbert", "gpt2", "llama", "mistral", "gemma2"])
def test_flattened_batches_match_sequences_alone(family, bounds):
    """The batches of DataCollatorWithFlattening, by the name that contains "flash"."""
    if family == "modernbert" and not bounds:
        pytest.skip("its layers are not given positions")
    attention = "eager" if family in NOT_BY_SDPA else "sdpa"
    eager = windowed(family, attention) if family in WINDOWED else models.make(family, attention)
    generator = torch.Generator().manual_seed(4)
    sequences = [torch.randint(3, models.VOCABULARY, (length,), generator=generator).tolist() for length in (4, 11, 9)]
    collator = models.transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=bounds)
    batch = collator([{"input_ids": tokens, "labels": tokens} for tokens in sequences])
    batch |= {} if family in ("bert", "modernbert") else {"use_cache": False}
    causal = family not in ("bert", "modernbert")
    expected = one_by_one(copy.deepcopy(eager).double(), sequences, causal)
    alone = one_by_one(copy.deepcopy(eager), sequences, causal)
    ours = with_our_attention(eager, huggingface.FLASH_NAME)
    out = ours(**batch)
    out.loss.backward()
    found = {f"d{name}": p.grad for name, p in ours.named_parameters() if p.grad is not None}
    found |= {"logits": out.logits.detach(), "loss": out.loss.detach()}
    models.assert_within_budget(found, alone, expected)


FLASH = {
    "padding": {"attention_mask": torch.tensor([[True] * 9, [True] * 6 + [False] * 3])},
    "left padding": {"attention_mask": torch.tensor([[True] * 9, [False] * 3 + [True] * 6])},
    "causal": {"is_causal": True},
    "window": {"sliding_window": 3},
    "causal window": {"is_causal": True, "sliding_window": 3},
    "softcap": {"softcap": 0.7},
    "sinks": {"s_aux": torch.randn(H := 4, generator=torch.Generator().manual_seed(3))},
    "bounds": {"cu_seq_lens_q": (bounds := torch.tensor([0, 5, 9]).int()), "cu_seq_lens_k": bounds, "max_length_q": 5,
               "max_length_k": 5, "sliding_window": 3},
    "positions": {"position_ids": torch.tensor([[2, 3, 4, 5, 2, 3, 2, 3, 4]]), "is_causal": True},
    "one sequence": {"position_ids": torch.arange(3, 12)[None]},
}  # fmt: skip


@pytest.mark.parametrize("name", FLASH)
def test_the_contract_is_that_of_flash_attention(name):
    """transformers' own code for FlashAttention calls `flash_attn`; both have the same results at real tokens."""
    torch.manual_seed(0)
    given = {"is_causal": False, **FLASH[name]}
    batch = 2 if "padding" in name else 1
    shapes = ((batch, heads, 9, 8) for heads in (4, 2, 2))
    leaves = [torch.randn(shape, requires_grad=True) for shape in shapes]
    module = torch.nn.Linear(1, 1)
    module.config = SimpleNamespace(_attn_implementation=huggingface.FLASH_NAME)
    real = given.get("attention_mask", torch.ones(batch, 9))[:, :, None, None]
    theirs = pytest.importorskip("transformers.integrations.flash_attention").flash_attention_forward
    results = []
    for function in (huggingface.flash_attention_forward, theirs):
        out = function(module, *leaves, **{"attention_mask": None, **given})[0] * real
        weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
        results.append([out, *torch.autograd.grad((out * weight).sum(), leaves)])
    for mine, expected in zip(*results, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-5, atol=2e-6)
    everything = dict.fromkeys(given, None) | {"is_causal": False, "attention_mask": None}
    plain = huggingface.flash_attention_forward(module, *leaves, **everything)[0]
    assert torch.allclose(plain, results[0][0], atol=1e-4) == (name == "one sequence")


def test_a_window_of_packed_bidirectional_sequences():
    """By the name without "flash" too: sentence-transformers packs the texts of a patched ModernBERT."""
    model = windowed("modernbert", "sdpa").model.eval()
    ours, tokens = with_our_attention(model), torch.arange(3, 33).unsqueeze(0)
    bounds, positions = torch.tensor([0, 12, 30]).int(), torch.cat([torch.arange(12), torch.arange(18)]).unsqueeze(0)
    out = ours(input_ids=tokens, position_ids=positions, cu_seq_lens_q=bounds, cu_seq_lens_k=bounds)
    for part in (slice(0, 12), slice(12, 30)):
        alone = model(input_ids=tokens[:, part]).last_hidden_state
        torch.testing.assert_close(out.last_hidden_state[:, part], alone, rtol=1e-4, atol=1e-5)


def test_tensors_that_no_kernel_reads_are_packed_too():
    torch.manual_seed(0)
    model, tokens = models.make("bert", "sdpa").eval(), torch.arange(3, 13).unsqueeze(0)
    ours, bounds = with_our_attention(model), torch.tensor([0, 4, 10]).int()
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5]])
    run = lambda x: ours(  # noqa: E731
        inputs_embeds=x, position_ids=positions, cu_seq_lens_q=bounds, cu_seq_lens_k=bounds
    ).logits
    embedded = model.bert.embeddings.word_embeddings(tokens).detach()
    mapped = torch.func.vmap(run, randomness="error")(embedded[None])[0]
    torch.testing.assert_close(mapped, run(embedded), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_continuous_batching(family):
    pytest.importorskip("transformers", "5.24", reason="continuous batching is tested with transformers 5.24")
    eager = models.make(family).eval()
    options = models.transformers.GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=-1, pad_token_id=1)
    prompts = [[5, 6, 7, 8], [9, 10, 11, 12, 13, 14, 15]]
    ours = with_our_attention(eager, huggingface.FLASH_NAME)
    small = models.transformers.ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64, block_size=8)
    found = ours.generate_batch(
        prompts, generation_config=options, continuous_batching_config=small, progress_bar=False
    )
    alone = [eager.generate(torch.tensor([prompt]), generation_config=options)[0, len(prompt) :] for prompt in prompts]
    assert [result.generated_tokens for result in found.values()] == [tokens.tolist() for tokens in alone]


def test_positions_that_restart_elsewhere_are_refused():
    q, k, v = (torch.randn(1, 2, 6, 8) for _ in range(3))
    with pytest.raises(ValueError, match="must restart at the smallest"):
        huggingface.flash_attention_forward(
            SimpleNamespace(is_causal=True), q, k, v, position_ids=torch.tensor([[3, 4, 0, 1, 2, 3]])
        )


B, H, HK, LQ, LK, D = 2, 4, 2, 5, 7, 8


def reference(q, k, v, visible, scale, bias=0.0, softcap=None):
    """(B, L, H, D) from dense scores in float64; a row without keys is 0."""
    k, v = (x.repeat_interleave(H // HK, 1).double() for x in (k, v))
    scores = q.double() @ k.transpose(2, 3) * scale
    scores = scores if softcap is None else softcap * (scores / softcap).tanh()
    scores = (scores + bias).masked_fill(~visible, -math.inf)
    return (scores.softmax(-1).nan_to_num(0.0) @ v).transpose(1, 2).float()


def qkv():
    torch.manual_seed(0)
    return torch.randn(B, H, LQ, D), torch.randn(B, HK, LK, D), torch.randn(B, HK, LK, D)


ROWS, COLUMNS = torch.arange(LQ)[:, None] + LK - LQ, torch.arange(LK)
CAUSAL = (COLUMNS <= ROWS).expand(B, 1, LQ, LK)
KEYS = torch.tensor([[True] * 7, [False] * 2 + [True] * 4 + [False]])
BIAS = torch.randn(B, 1, LQ, LK, generator=torch.Generator().manual_seed(2))
EVERYTHING = torch.ones(B, 1, LQ, LK, dtype=torch.bool)


@pytest.mark.parametrize(
    ("mask", "options", "visible", "bias"),
    [
        (None, {"is_causal": False}, EVERYTHING, 0.0),
        (None, {"is_causal": True}, CAUSAL, 0.0),
        (None, {}, CAUSAL, 0.0),
        (KEYS, {"is_causal": False}, KEYS[:, None, None, :] & EVERYTHING, 0.0),
        (KEYS.long(), {"is_causal": True}, KEYS[:, None, None, :] & CAUSAL, 0.0),
        (None, {"is_causal": True, "sliding_window": 3}, CAUSAL & (ROWS - COLUMNS < 3), 0.0),
        (CAUSAL & KEYS[:, None, None, :], {}, CAUSAL & KEYS[:, None, None, :], 0.0),
        (KEYS[:, None, None, :], {"sliding_window": 3}, KEYS[:, None, None, :] & EVERYTHING, 0.0),
        (BIAS, {}, EVERYTHING, BIAS),
        (BIAS.double(), {"position_bias": BIAS}, EVERYTHING, 2 * BIAS),
        (KEYS, {"is_causal": True, "position_bias": BIAS[:1]}, KEYS[:, None, None, :] & CAUSAL, BIAS[:1]),
    ],
    ids=lambda value: None if value is None or isinstance(value, float) else type(value).__name__,
)
@pytest.mark.parametrize("softcap", [None, 0.7])
def test_masks(mask, options, visible, bias, softcap):
    q, k, v = qkv()
    module = SimpleNamespace(is_causal=True)
    out, weights = huggingface.attention_forward(module, q, k, v, mask, scaling=0.3, softcap=softcap, **options)
    assert weights is None and out.shape == (B, LQ, H, D) and out.is_contiguous()
    torch.testing.assert_close(out, reference(q, k, v, visible, 0.3, bias, softcap), rtol=1e-5, atol=1e-5)


def test_position_bias_has_a_gradient():
    q, k, v = qkv()
    bias = torch.randn(1, H, LQ, LK, requires_grad=True)
    module = SimpleNamespace(is_causal=False)
    cotangent = torch.randn(B, LQ, H, D)
    out, _ = huggingface.attention_forward(module, q, k, v, KEYS, scaling=1.0, position_bias=bias)
    (ours,) = torch.autograd.grad(out, bias, cotangent)
    dense = reference(q, k, v, KEYS[:, None, None, :] & EVERYTHING, 1.0, bias)
    (expected,) = torch.autograd.grad(dense, bias, cotangent)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


def test_dropout_drops_and_repeats_with_the_seed():
    q, k, v = qkv()
    module = SimpleNamespace(is_causal=False)
    runs = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        runs.append(huggingface.attention_forward(module, q, k, v, dropout=0.5)[0])
    assert torch.equal(runs[0], runs[1]) and not torch.equal(runs[0], runs[2])


def test_a_module_names_its_backend():
    q, k, v = qkv()
    with pytest.raises(ValueError, match="backend must be one of"):
        huggingface.attention_forward(SimpleNamespace(is_causal=False, backend="nonsense"), q, k, v)


@pytest.mark.parametrize("option", ["sinks", "indices", "block_indices", "read_index", "block_table", "head_mask"])
def test_what_would_change_the_result_is_refused(option):
    with pytest.raises(ValueError, match=option):
        huggingface.attention_forward(SimpleNamespace(), *qkv(), **{option: 1.0})


def test_reordered_attention_is_refused():
    ours = with_our_attention(models.make("gpt2", reorder_and_upcast_attn=True))
    with pytest.raises(ValueError, match="reorder_and_upcast_attn"):
        ours(**models.inputs("gpt2"))


def test_a_mask_of_three_axes_is_refused():
    with pytest.raises(ValueError, match="2 or 4 dimensions"):
        huggingface.attention_forward(SimpleNamespace(is_causal=False), *qkv(), torch.ones(B, LQ, LK))


@pytest.mark.parametrize(
    ("arguments", "shape"),
    [
        ({"mask_function": masking.causal_mask_function}, None),
        ({"mask_function": masking.causal_mask_function, "attention_mask": KEYS}, (B, LK)),
        ({"mask_function": masking.causal_mask_function, "attention_mask": torch.ones_like(KEYS)}, None),
        ({"mask_function": masking.causal_mask_function, "allow_is_causal_skip": False}, (B, 1, LQ, LK)),
        ({"mask_function": masking.causal_mask_function, "q_offset": 0}, (B, 1, LQ, LK)),
        ({"mask_function": masking.causal_mask_function, "q_offset": torch.tensor(2)}, (B, 1, LQ, LK)),
        ({"mask_function": masking.causal_mask_function, "attention_mask": KEYS[:, :5]}, (B, 1, LQ, LK)),
        ({"mask_function": masking.bidirectional_mask_function, "allow_is_bidirectional_skip": True}, None),
        ({"mask_function": masking.bidirectional_mask_function}, (B, 1, LQ, LK)),
        ({"mask_function": masking.sliding_window_causal_mask_function(LK - 1)}, (B, 1, LQ, LK)),
        ({"mask_function": masking.sliding_window_causal_mask_function(LK)}, None),
        ({"mask_function": masking.sliding_window_causal_mask_function(LK), "q_offset": 0}, (B, 1, LQ, LK)),
        ({"mask_function": masking.sliding_window_causal_mask_function(LK), "attention_mask": KEYS}, (B, 1, LQ, LK)),
    ],
)
def test_masks_stay_short_where_that_is_exact(arguments, shape):
    mask = huggingface.attention_mask(B, LQ, LK, **{"q_offset": LK - LQ, **arguments})
    assert (mask if mask is None else tuple(mask.shape)) == shape


POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 2, 3], [0, 0, 1, 2, 3, 0, 1]])
SEQUENCES = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 2, 2]])


REMAP = getattr(masking, "remap_positions_for_packed_sequence", None)  # since 5.23


def packed(function, sequences=SEQUENCES, positions=POSITIONS):
    remapped = function if REMAP is None or positions is None else REMAP(function, positions)
    return masking.and_masks(remapped, masking.packed_sequence_mask_function(sequences))


KNOWN = {
    "causal": masking.causal_mask_function,
    "bidirectional": masking.bidirectional_mask_function,
    "window 1": masking.sliding_window_causal_mask_function(1),
    "window 3": masking.sliding_window_causal_mask_function(3),
    "window 99": masking.sliding_window_causal_mask_function(99),
    "bidirectional window": masking.sliding_window_bidirectional_mask_function(2),
    "two windows": masking.and_masks(
        masking.sliding_window_causal_mask_function(4), masking.sliding_window_bidirectional_overlay(2)
    ),
}
PACKED = ("causal", "bidirectional", "window 1", "window 3", "bidirectional window")
OFFSETS = {  # queries, keys, first query, first key
    "no cache": (7, 7, 0, 0),
    "dynamic": (3, 7, 4, 0),
    "one token": (1, 7, 6, 0),
    "sliding": (2, 7, 9, 4),
    "static": (3, 9, 2, 0),
    "static, first": (4, 9, 0, 0),
    "static, a tensor": (1, 9, torch.tensor(5), 0),
    "beyond the keys": (2, 5, 7, 0),
}
PADDINGS = {"none": None, "all real": [0, 0], "left": [0, 2], "right": [0, -2], "both": [1, -1]}


def attended(mask, queries, keys, position_bias=None):
    """The output and the gradients of q, k and v (and the bias)."""
    generator = torch.Generator().manual_seed(queries * keys)
    shapes = (B, H, queries, D), (B, HK, keys, D), (B, HK, keys, D)
    leaves = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    out, _ = huggingface.attention_forward(
        SimpleNamespace(is_causal=True), *leaves, mask, sliding_window=1, position_bias=position_bias
    )
    weights = torch.randn(out.shape, generator=generator)
    leaves += [] if position_bias is None else [position_bias]
    return [out, *torch.autograd.grad((out * weights).sum(), leaves)]


def assert_like_dense(mask, queries, keys, position_bias=None):
    """The mask of a pattern equals transformers', and attention by pattern equals attention by mask."""
    assert type(mask) is huggingface.MaskPattern and mask.shape == (B, 1, queries, keys) and mask.dtype is torch.bool
    found, expected = (attended(each, queries, keys, position_bias) for each in (mask, mask.dense()))
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("offsets", OFFSETS)
@pytest.mark.parametrize("name", KNOWN)
def test_known_masks_are_those_of_sdpa(name, offsets, padding):
    queries, keys, first, first_key = OFFSETS[offsets]
    real = None
    if PADDINGS[padding] is not None:
        real = torch.ones(B, int(first) + queries, dtype=torch.bool)
        for row, count in enumerate(PADDINGS[padding]):
            real[row, : max(count, 0)] = False
            real[row, real.shape[1] + min(count, 0) :] = False
    arguments = (B, queries, keys, first, first_key, KNOWN[name], real)
    made = huggingface.attention_mask(*arguments, allow_is_causal_skip=False)
    dense = masking.sdpa_mask(*arguments, allow_is_causal_skip=False)
    if type(made) is huggingface.MaskPattern:
        assert torch.equal(made.dense(), dense)
        assert_like_dense(made, queries, keys)
    else:
        assert torch.equal(made, dense)
        beyond = offsets == "beyond the keys" and "window" in name
        assert beyond or (name in ("bidirectional window", "two windows") and "static" in offsets), "it is known"


@pytest.mark.parametrize("positions", [POSITIONS, None], ids=["positions", "indices"])
@pytest.mark.parametrize("name", PACKED)
def test_packed_rows_become_sequences(name, positions):
    function = packed(KNOWN[name], positions=positions)
    made = huggingface.attention_mask(B, 7, 7, mask_function=function, allow_is_causal_skip=False)
    assert made.cu_seqlens.tolist() == [0, 3, 7, 8, 12, 14]
    assert torch.equal(made.dense(), masking.sdpa_mask(B, 7, 7, mask_function=function, allow_is_causal_skip=False))
    assert_like_dense(made, 7, 7)
    assert_like_dense(made, 7, 7, torch.randn(1, H, 7, 7, requires_grad=True))


@pytest.mark.parametrize("offsets", ["dynamic", "static"])
def test_a_bias_beside_a_window(offsets):
    queries, keys, first, first_key = OFFSETS[offsets]
    made = huggingface.attention_mask(B, queries, keys, first, first_key, KNOWN["window 3"])
    for shape in ((1, H, queries, keys), (1, H, queries, 1), (1, H, 1, keys)):
        assert_like_dense(made, queries, keys, torch.randn(shape, requires_grad=True))


UNKNOWN = {
    "or": masking.or_masks(masking.causal_mask_function, masking.sliding_window_overlay(2)),
    "own": lambda batch, head, q, k: k >= q,
    "and own": masking.and_masks(masking.causal_mask_function, lambda batch, head, q, k: k != 1),
    "chunks": masking.chunked_causal_mask_function(3, torch.zeros(B, dtype=torch.int64)),
    "sequences that come back": packed(KNOWN["causal"], sequences=SEQUENCES % 2),
    "packed twice": packed(packed(KNOWN["causal"])),
    "packed in packed": masking.and_masks(packed(KNOWN["causal"]), packed(KNOWN["window 3"])),
}

if REMAP is not None:
    UNKNOWN["positions that jump"] = packed(KNOWN["causal"], positions=POSITIONS * 2)


@pytest.mark.parametrize("name", UNKNOWN)
def test_every_other_mask_is_dense(name):
    made = huggingface.attention_mask(B, 7, 7, mask_function=UNKNOWN[name], allow_is_causal_skip=False)
    assert type(made) is torch.Tensor
    assert torch.equal(made, masking.sdpa_mask(B, 7, 7, mask_function=UNKNOWN[name], allow_is_causal_skip=False))


def test_packed_rows_with_padding_or_a_cache_are_dense():
    real = torch.ones(B, 7, dtype=torch.bool)
    for given in ({"attention_mask": real}, {"q_offset": 1}):
        options = {"mask_function": packed(KNOWN["causal"]), "allow_is_causal_skip": False, **given}
        if "q_offset" not in given:
            assert torch.equal(huggingface.attention_mask(B, 7, 7, **options), masking.sdpa_mask(B, 7, 7, **options))
        assert huggingface.pattern_of({"batch_size": B, "q_length": 7, "kv_length": 7, "q_offset": 0, "kv_offset": 0,
                                     "attention_mask": None, **options}, None, "cpu") is None  # fmt: skip


def test_a_pattern_is_a_mask_to_everyone_else():
    made = huggingface.attention_mask(B, LQ, LK, 2, mask_function=KNOWN["window 3"], attention_mask=KEYS)
    dense = made.dense()
    assert type(made) is huggingface.MaskPattern and made.ndim == 4 and made.device.type == "cpu"
    assert torch.equal(made[:, :, 1:, :3], dense[:, :, 1:, :3]) and type(made[:, :, 1:]) is torch.Tensor
    assert torch.equal(~made, ~dense) and torch.equal(torch.where(made, 1.0, 2.0), torch.where(dense, 1.0, 2.0))
    assert torch.equal(made.to(torch.float32), dense.float()) and torch.equal(made.clone(), dense)
    assert "left=2, right=0" in repr(made) and made.padding.shape == (B, LK)
    q, k, v = qkv()
    k, v = (x.repeat_interleave(H // HK, 1) for x in (k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, dense)
    torch.testing.assert_close(torch.nn.functional.scaled_dot_product_attention(q, k, v, made), expected)


WINDOWED = {
    "mistral": ("MistralForCausalLM", {"sliding_window": 5, "num_key_value_heads": 2}),
    "gemma2": ("Gemma2ForCausalLM", {"sliding_window": 5, "num_key_value_heads": 2, "head_dim": 8}),
    "gemma3": ("Gemma3ForCausalLM", {"sliding_window": 5, "num_key_value_heads": 2, "head_dim": 8}),
    "qwen2": ("Qwen2ForCausalLM", {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 1,
                                   "num_key_value_heads": 2}),
    "gpt_oss": ("GptOssForCausalLM", {"sliding_window": 5, "num_key_value_heads": 2, "head_dim": 8,
                                      "num_local_experts": 4, "num_experts_per_tok": 2}),
    "modernbert": ("ModernBertForMaskedLM", {"local_attention": 6}),
}  # fmt: skip
NOT_BY_SDPA = ("gemma2", "gpt_oss")


def windowed(name, attention="eager"):
    """A model whose layers have windows, with random weights, in training mode."""
    kind, sizes = WINDOWED[name]
    model = getattr(models.transformers, kind)
    torch.manual_seed(0)
    config = model.config_class(**models.ENCODER | sizes, **models.TOKENS)
    return model._from_config(config, attn_implementation=attention).train()


@pytest.mark.parametrize("padding", ["left", "right", None, "packed"])
@pytest.mark.parametrize("name", WINDOWED)
def test_windowed_models_match_eager_without_dense_masks(name, padding, monkeypatch):
    if name == "modernbert" and padding == "packed":
        pytest.skip("its masks are not packed by positions")
    eager = windowed(name)
    ours = with_our_attention(eager)
    batch = models.inputs("llama" if name != "modernbert" else "bert", None if padding == "packed" else padding)
    if padding == "packed":
        del batch["attention_mask"]
        batch["position_ids"] = torch.tensor([[*range(7), *range(5)]] * 2 + [[*range(2), *range(10)]])
    batch |= {} if name == "modernbert" else {"use_cache": torch.tensor(False)}
    results = [models.run("llama", eager, batch)]
    results.append(results[0] if name in NOT_BY_SDPA else models.run("llama", models.exact(eager), batch))
    monkeypatch.setattr(huggingface, "sdpa_mask", lambda **_: pytest.fail("a dense mask is made"))
    found = models.run("llama", ours, batch)
    if name not in NOT_BY_SDPA:
        models.assert_within_budget(found, *results)
        return
    for key, value in results[0].items():  # SDPA has neither soft cap nor sinks, and eager none in float64
        torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("backend", ["torch", "cpu", None])
def test_patched_gpt_oss_trains_its_sinks_like_eager(backend):
    if backend == "cpu" and (reason := unavailable("cpu", torch.device("cpu"))) is not None:
        pytest.skip(reason)
    eager = windowed("gpt_oss")
    ours = copy.deepcopy(eager)
    report = tk.patch(ours, backend=backend)
    assert {"attention", "cross_entropy"} <= {row.operation for row in report.patched}
    batch = models.inputs("llama", "right")
    results = [models.run("llama", each, batch) for each in (eager, ours)]
    assert any("sinks" in key for key in results[0])
    for key, value in results[0].items():
        torch.testing.assert_close(results[1][key], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("name", [name for name in WINDOWED if name != "modernbert"])
def test_windowed_models_generate_like_eager(name, cache):
    eager = windowed(name).eval()
    batch = models.inputs("llama", "left", labels=False)
    options = {"max_new_tokens": 8, "do_sample": False} | ({} if cache is None else {"cache_implementation": cache})
    assert torch.equal(with_our_attention(eager).generate(**batch, **options), eager.generate(**batch, **options))
