"""FlexAttention: masks and scores that are written as functions, against what they mean, written densely in float64."""

from __future__ import annotations

import functools
import gc
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import transformer_kernels as tk
from tests.support.parity import GRADIENT_FACTOR, OUTPUT_FACTOR, RandomRounding, assert_within_budget, run
from transformer_kernels import BackendUnavailable, UnsupportedByBackend
from transformer_kernels.backends import cpu
from transformer_kernels.ops.attention import _mods, flex

try:
    cpu.load()
except BackendUnavailable as error:
    pytest.skip(str(error), allow_module_level=True)
theirs = pytest.importorskip("torch.nn.attention.flex_attention", reason="this torch has no FlexAttention")

B, H, L, D = 2, 4, 81, 16
SIDE = 9
LENGTHS = torch.tensor([81, 50])
DOCUMENT = torch.arange(L) // 20
MEDIA = torch.tensor([[0, 30, 60], [10, 40, 81]])
OFFSET = torch.randint(L, (L,), generator=torch.Generator().manual_seed(3))


def seeded(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(autouse=True)
def nothing_remembered_and_several_blocks(monkeypatch):
    _mods._remembered.clear()
    monkeypatch.setattr(flex, "SCORES_AT_ONCE", H * L * 30)


# Masks, each as a mask_mod and as the tensor that it means, from positions i (L, 1) and j (L,)

I, J = torch.arange(L)[:, None], torch.arange(L)


def below(i, j):
    return i >= j


def natten(b, h, i, j, reach=2):
    row, column = (i // SIDE).clamp(reach, SIDE - 1 - reach), (i % SIDE).clamp(reach, SIDE - 1 - reach)
    return ((row - j // SIDE).abs() <= reach) & ((column - j % SIDE).abs() <= reach)


def natten_written_out():
    mask = torch.zeros(L, L, dtype=torch.bool)
    for i in range(L):
        row, column = (min(max(x, 2), SIDE - 3) for x in divmod(i, SIDE))
        square = mask[i].view(SIDE, SIDE)
        square[row - 2 : row + 3, column - 2 : column + 3] = True
    return mask


def square_window(b, h, i, j):
    return ((i // SIDE - j // SIDE).abs() <= 3) & ((i % SIDE - j % SIDE).abs() <= 3)


def tiles(b, h, i, j):
    return ((i // SIDE // 3 - j // SIDE // 3).abs() <= 1) & ((i % SIDE // 3 - j % SIDE // 3).abs() <= 1)


def by_squares(near):
    """The mask of near(row, other row) and near(column, other column)."""
    at = torch.arange(L)
    rows, columns = near(at[:, None] // SIDE, at // SIDE), near(at[:, None] % SIDE, at % SIDE)
    return rows & columns


def media(b, h, i, j):
    return j == (MEDIA[b] <= i).sum() - 1


def media_written_out():
    images = (MEDIA[:, None, :] <= I).sum(-1) - 1
    return images[:, None, :, None] == J


MASKS: dict[str, tuple[Callable[..., Any], torch.Tensor]] = {
    "causal": (lambda b, h, i, j: i >= j, below(I, J)),
    "sliding window": (lambda b, h, i, j: (i >= j) & (i - j <= 7), below(I, J) & (I - J <= 7)),
    "prefix": (theirs.or_masks(lambda b, h, i, j: j < 20, lambda b, h, i, j: i >= j), (J < 20) | below(I, J)),
    "documents": (
        theirs.and_masks(lambda b, h, i, j: DOCUMENT[i] == DOCUMENT[j], lambda b, h, i, j: i >= j),
        (DOCUMENT[:, None] == DOCUMENT) & below(I, J),
    ),
    "lengths": (lambda b, h, i, j: j < LENGTHS[b], LENGTHS[:, None, None, None] > J),
    "offset": (lambda b, h, i, j: i + LENGTHS[b] - 60 >= j, I + LENGTHS[:, None, None, None] - 60 >= J),
    "dilated window": (
        lambda b, h, i, j: ((i - j).abs() <= 9) & ((i - j) % 3 == 0),
        ((I - J).abs() <= 9) & ((I - J) % 3 == 0),
    ),
    "sinks of tokens": (lambda b, h, i, j: (i >= j) & ((i - j <= 9) | (j < 4)), below(I, J) & ((I - J <= 9) | (J < 4))),
    "stand-alone self-attention": (square_window, by_squares(lambda x, y: (x - y).abs() <= 3)),
    "natten": (natten, natten_written_out()),
    "sliding tiles": (tiles, by_squares(lambda x, y: (x // 3 - y // 3).abs() <= 1)),
    "of heads": (lambda b, h, i, j: (i - j).abs() <= 2 * h, (I - J).abs() <= 2 * torch.arange(H)[:, None, None]),
    "media": (media, media_written_out()),
    "frames": (
        lambda b, h, i, j: (j < 9) | (i < 9) | ((i % 9 - j % 9).abs() < 2),
        (J < 9) | (I < 9) | ((I % 9 - J % 9).abs() < 2),
    ),
    "nothing hidden": (theirs.noop_mask, torch.ones(L, L, dtype=torch.bool)),
    "nothing shown": (lambda b, h, i, j: i < 0 * j, torch.zeros(L, L, dtype=torch.bool)),
}


class Mod(NamedTuple):
    """A score_mod of captured tensors, and what it makes of dense scores; `unknown` is why no kernel has its form."""

    captured: dict[str, tuple[int, ...]]
    made: Callable[..., Callable[..., Any]]
    dense: Callable[..., Any]
    unknown: str | None = None


def toeplitz(table):
    return table[..., I - J + L]


def in_place(bias):
    def score_mod(score, b, h, i, j):
        score *= 2
        score -= bias[h] * (i == j)
        return score

    return score_mod


MODS = {
    "alibi": Mod({"slopes": (H,)}, lambda slopes: lambda s, b, h, i, j: s + slopes[h] * (j - i),
                 lambda s, slopes: s + slopes[:, None, None] * (J - I)),
    "softcap": Mod({}, lambda: lambda s, b, h, i, j: 2 * torch.tanh(s / 2), lambda s: 2 * (s / 2).tanh()),
    "softcap and alibi": Mod({"slopes": (H,)},
                             lambda slopes: lambda s, b, h, i, j: 3 * (s / 3).tanh() - slopes[h] * (i - j).abs(),
                             lambda s, slopes: 3 * (s / 3).tanh() - slopes[:, None, None] * (I - J).abs()),
    "relative": Mod({"table": (2 * L,)}, lambda table: lambda s, b, h, i, j: s + table[i - j + L],
                    lambda s, table: s + toeplitz(table)),
    "relative of heads": Mod({"table": (H, 2 * L)}, lambda table: lambda s, b, h, i, j: s + table[h][i - j + L],
                             lambda s, table: s + toeplitz(table)),
    "transformer-xl": Mod({"query": (B, H, L, D), "table": (H, 2 * L, D)},
                          lambda query, table: lambda s, b, h, i, j: (
                              s + 0.3 * torch.dot(query[b, h, i], table[h, i - j + L])
                          ),
                          lambda s, query, table: s + 0.3 * (query[..., None, :] * table[:, I - J + L]).sum(-1)),
    "latent attention": Mod({"q": (B, H, L, 8), "k": (B, 1, L, 8)},
                            lambda q, k: lambda s, b, h, i, j: s + 0.5 * torch.dot(q[b, h, i], k[b, h // H, j]),
                            lambda s, q, k: s + 0.5 * q @ k.mT),
    "absolute": Mod({"bias": (L + 3, L)}, lambda bias: lambda s, b, h, i, j: s + bias[i, j],
                    lambda s, bias: s + bias[:L]),
    "of batches and heads": Mod({"bias": (B, H, L, L)}, lambda bias: lambda s, b, h, i, j: s + bias[b, h, i, j],
                                lambda s, bias: s + bias),
    "transposed": Mod({"bias": (L, L)}, lambda bias: lambda s, b, h, i, j: s + bias[j, i], lambda s, bias: s + bias.T),
    "of heads, chained": Mod({"bias": (L, H)}, lambda bias: lambda s, b, h, i, j: s + bias[i][h] * bias[j][0],
                             lambda s, bias: s + bias.T[..., None] * bias[:, 0]),
    "temperatures": Mod({"factor": (H,)}, lambda factor: lambda s, b, h, i, j: s * factor[h],
                        lambda s, factor: s * factor[:, None, None]),
    "of queries": Mod({"factor": (L,)}, lambda factor: lambda s, b, h, i, j: s / factor[i].exp(),
                      lambda s, factor: s / factor[:, None].exp()),
    "local": Mod({"bias": (9,)}, lambda bias: lambda s, b, h, i, j: s + bias[torch.clamp(i - j + 4, 0, 8)],
                 lambda s, bias: s + bias[(I - J + 4).clamp(0, 8)]),
    "of keys": Mod({"bias": (L,)}, lambda bias: lambda s, b, h, i, j: s + bias[j], lambda s, bias: s + bias),
    "constant in a row": Mod({"bias": (B, H, 4, L)}, lambda bias: lambda s, b, h, i, j: s + bias[b, h, 1, i],
                             lambda s, bias: s + bias[:, :, 1, :, None]),
    "looked up": Mod({"bias": (L,)}, lambda bias: lambda s, b, h, i, j: s + bias[OFFSET[i]],
                     lambda s, bias: s + bias[OFFSET][:, None]),
    "hidden": Mod({}, lambda: lambda s, b, h, i, j: torch.where(i >= j, s, -float("inf")),
                  lambda s: s.masked_fill(I < J, -math.inf)),
    "hidden before": Mod({}, lambda: lambda s, b, h, i, j: torch.where(i < j, -float("inf"), s) + 1,
                         lambda s: s.masked_fill(I < J, -math.inf) + 1),
    "of sums": Mod({"bias": (L,)}, lambda bias: lambda s, b, h, i, j: (s + bias[j]) * 3 / 2 - 1,
                   lambda s, bias: (s + bias) * 1.5 - 1),
    "filled": Mod({}, lambda: lambda s, b, h, i, j: 2 * s.masked_fill(i - j > 9, -float("inf")),
                  lambda s: 2 * s.masked_fill(I - J > 9, -math.inf)),
    "in place": Mod({"bias": (H,)}, in_place, lambda s, bias: 2 * s - bias[:, None, None] * (I == J)),
    "branches": Mod({"bias": (H,)}, lambda bias: lambda s, b, h, i, j: torch.where(i - j < 5, s + bias[h], -(1 - s)),
                    lambda s, bias: torch.where(I - J < 5, s + bias[:, None, None], s - 1)),
    "flags": Mod({}, lambda: lambda s, b, h, i, j: s + (i == j) + (i >= j), lambda s: s + (I == J) + (I >= J).int()),
    "bounded bias": Mod({"bias": (H,)}, lambda bias: lambda s, b, h, i, j: 3 * torch.tanh((s + bias[h] * (i - j)) / 3),
                        lambda s, bias: 3 * ((s + bias[:, None, None] * (I - J)) / 3).tanh(), "tanh of more than"),
    "of scores": Mod({"factor": (H,)}, lambda factor: lambda s, b, h, i, j: s.sigmoid() * factor[h],
                     lambda s, factor: s.sigmoid() * factor[:, None, None], "calls sigmoid"),
    "of pairs": Mod({"factor": (L, L)}, lambda factor: lambda s, b, h, i, j: s * factor[i, j],
                    lambda s, factor: s * factor, "function of the key"),
}  # fmt: skip


def block_mask(mask_mod, queries=L, keys=L, **options):
    return theirs.create_block_mask(mask_mod, B, H, queries, keys, device="cpu", BLOCK_SIZE=16, **options)


def dense(query, key, value, mask, mod=lambda scores: scores, lse=False):
    """Dense attention: `mod` of the scores, then the mask; rows without a key are 0."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    scores = mod(query @ key.mT * query.shape[-1] ** -0.5)
    scores = scores.masked_fill(~mask, -math.inf)
    hidden = (scores == -math.inf).all(-1, keepdim=True)
    scores = scores.masked_fill(hidden, 0.0)
    out = scores.softmax(-1).masked_fill(hidden, 0.0) @ value
    return (out, scores.logsumexp(-1).masked_fill(hidden[..., 0], -math.inf)) if lse else out


def check(ours, exactly, tensors):
    """Outputs and every gradient within the budget of tests/support/parity.py."""
    dtype = tensors["query"].dtype
    cotangents = [seeded(*output.shape, seed=9).to(dtype) for output in run(exactly, tensors, {}).outputs]
    exact, eager = (run(exactly, tensors, {}, cotangents, dtype=each) for each in (torch.float64, None))

    @functools.cache
    def rounded():
        with RandomRounding(dtype):
            return run(exactly, tensors, {}, cotangents, dtype=torch.float64)

    got = run(ours, tensors, {}, cotangents)
    for i, (output, wanted, plain) in enumerate(zip(got.outputs, exact.outputs, eager.outputs, strict=True)):
        bound = None if dtype is not torch.float32 else lambda i=i: rounded().outputs[i]
        assert_within_budget("output", output, wanted, plain, OUTPUT_FACTOR, dtype, rounded=bound)
    largest = max(x.abs().max().item() for x in exact.gradients.values())
    for name, wanted in exact.gradients.items():
        assert got.gradients[name] is not None, name
        given = (
            got.gradients[name],
            wanted,
            eager.gradients[name],
            GRADIENT_FACTOR,
            dtype,
            largest,
        )
        bound = None if dtype is not torch.float32 else lambda name=name: rounded().gradients[name]
        assert_within_budget(name, *given, rounded=bound)


def operands(kv_heads=H, queries=L, dtype=torch.float32, width=D):
    shapes = {"query": (B, H, queries, D), "key": (B, kv_heads, L, D), "value": (B, kv_heads, L, width)}
    return {name: seeded(*shape, seed=len(name)).to(dtype).requires_grad_() for name, shape in shapes.items()}


@pytest.mark.parametrize("name", MASKS)
def test_masks(name):
    mask_mod, mask = MASKS[name]
    made = block_mask(mask_mod)
    check(lambda **x: tk.flex_attention(**x, block_mask=made), lambda **x: dense(**x, mask=mask), operands())


@pytest.mark.parametrize("name", MODS)
def test_positions_are_never_on_the_default_device(name):
    captured = [seeded(*shape, seed=1) for shape in MODS[name].captured.values()]
    given, made = operands(), block_mask(MASKS["dilated window"][0])

    def result(default):
        with torch.device(default):
            return tk.flex_attention(**given, score_mod=MODS[name].made(*captured), block_mask=made)

    expected = result("cpu")
    _mods._remembered.clear()
    assert torch.equal(result("meta"), expected)


@pytest.mark.parametrize("masked", [False, True], ids=["alone", "dilated and causal"])
@pytest.mark.parametrize("name", MODS)
def test_score_mods(name, masked):
    """With the gradients of what they capture; beside a mask that is an interval of keys and one that is not."""
    mod = MODS[name]
    mask_mod, mask = MASKS["dilated window"] if masked else MASKS["nothing hidden"]
    made = block_mask(mask_mod) if masked else None
    captured = {f"_{k}": (0.2 * seeded(*shape, seed=len(k))).requires_grad_() for k, shape in mod.captured.items()}

    def ours(query, key, value, **captured):
        return tk.flex_attention(query, key, value, mod.made(*captured.values()), made)

    def exactly(query, key, value, **captured):
        return dense(query, key, value, mask, lambda scores: mod.dense(scores, *captured.values()))

    check(ours, exactly, operands() | captured)
    score_mod = mod.made(*captured.values())
    if mod.unknown is None:
        flex._effect(score_mod, None, (B, H, L, L), torch.float32)
    else:
        with pytest.raises(_mods.Unknown, match=mod.unknown):
            flex._effect(score_mod, None, (B, H, L, L), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["temperatures", "relative", "of scores"])
def test_16_bits(name, dtype):
    mod, (mask_mod, mask) = MODS[name], MASKS["causal"]
    captured = {f"_{k}": (0.2 * seeded(*shape)).requires_grad_() for k, shape in mod.captured.items()}
    tensors = operands(dtype=dtype)

    def ours(query, key, value, **captured):
        return tk.flex_attention(query, key, value, mod.made(*captured.values()), block_mask(mask_mod))

    def exactly(query, key, value, **captured):
        return dense(query, key, value, mask, lambda scores: mod.dense(scores, *captured.values()).to(scores.dtype))

    check(ours, exactly, tensors | captured)
    assert ours(**tensors, **captured).dtype is dtype


def test_a_temperature_does_not_round_queries():
    q, k, v = (x.detach() for x in operands(dtype=torch.bfloat16).values())
    factor = 1.0 + seeded(H).abs()
    _, lse = tk.flex_attention(q, k, v, lambda s, b, h, i, j: s * factor[h], return_lse=True)
    scores = q.double() @ k.double().mT / D**0.5 * factor[:, None, None]
    torch.testing.assert_close(lse.double(), scores.logsumexp(-1), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("queries", [L, 30, 1])
@pytest.mark.parametrize("name", ["alibi", "of scores"])
def test_grouped_heads_other_lengths_and_widths(name, queries):
    """Positions are aligned top-left, also where there are fewer queries."""
    mod, slopes = MODS[name], 0.2 * seeded(H)
    made = block_mask(lambda b, h, i, j: i + 5 >= j, queries)
    mask = I[:queries] + 5 >= J
    dense_mod = {"alibi": lambda s: s + slopes[:, None, None] * (J - I[:queries])}.get(
        name, lambda s: mod.dense(s, slopes)
    )
    tensors = operands(kv_heads=2, queries=queries, width=24)
    check(
        lambda **x: tk.flex_attention(**x, score_mod=mod.made(slopes), block_mask=made, enable_gqa=True),
        lambda **x: dense(**x, mask=mask, mod=dense_mod),
        tensors,
    )


@pytest.mark.parametrize("name", ["softcap", "of scores"])
def test_log_sum_exp(name):
    mod, (mask_mod, mask) = MODS[name], MASKS["media"]
    score_mod, captured = mod.made(*[seeded(H)] * len(mod.captured)), [seeded(H).double()] * len(mod.captured)
    made, tensors = block_mask(mask_mod), {k: x.detach() for k, x in operands().items()}
    out, lse = tk.flex_attention(**tensors, score_mod=score_mod, block_mask=made, return_lse=True)
    exact = dense(*(x.double() for x in tensors.values()), mask, lambda s: mod.dense(s, *captured), lse=True)
    torch.testing.assert_close((out.double(), lse.double()), exact, atol=1e-5, rtol=1e-5)
    assert (lse == -math.inf).any()
    request = theirs.AuxRequest(lse=True)
    again, aux = tk.flex_attention(**tensors, score_mod=score_mod, block_mask=made, return_aux=request)
    assert torch.equal(again, out)
    assert torch.equal(aux.lse, lse)
    assert tk.flex_attention(**tensors, return_aux=theirs.AuxRequest())[1].lse is None


def test_blocks_without_a_mask_mod_hide_what_they_lack_and_show_what_is_full():
    partial, full = torch.eye(6, dtype=torch.int32), torch.zeros(6, 6, dtype=torch.int32)
    full[1, 3] = 1
    blocks = [
        (x.sum(-1, dtype=torch.int32)[None, None], x.argsort(-1, descending=True).int()[None, None])
        for x in (partial, full)
    ]
    made = theirs.BlockMask.from_kv_blocks(*blocks[0], *blocks[1], 16, lambda b, h, i, j: i >= j, (L, L))
    at, other = I // 16, J // 16
    mask = ((at == other) & below(I, J)) | ((at == 1) & (other == 3))
    check(lambda **x: tk.flex_attention(**x, block_mask=made), lambda **x: dense(**x, mask=mask), operands())


# What is remembered


@pytest.fixture
def evaluations(monkeypatch):
    """The functions that are evaluated, one entry for each time."""
    found = []

    def counted(original):
        return lambda function, *rest: (found.append(function), original(function, *rest))[1]

    for name in ("at_positions", "form_of"):
        monkeypatch.setattr(flex, name, counted(getattr(flex, name)))
    return found


SHOWN = 40


def masked_by(width, limits):
    return lambda b, h, i, j: (j < limits[b]) & (i - j < width) & (j < SHOWN)


def test_a_mask_is_evaluated_once_and_again_after_a_change(evaluations, monkeypatch):
    limits, tensors = torch.tensor([40, 50]), {k: x.detach() for k, x in operands().items()}
    made = block_mask(lambda b, h, i, j: i >= 0, separate_full_blocks=False)

    def agrees(width):
        made.mask_mod = masked_by(width, limits)
        out = tk.flex_attention(**tensors, block_mask=made)
        mask = (limits[:, None, None, None] > J) & (width > I - J) & (SHOWN > J)
        torch.testing.assert_close(out, dense(**tensors, mask=mask))

    for width in (7, 7, 9, 7):  # of equal functions
        agrees(width)
    assert len(evaluations) == 2
    limits[0] = 20
    agrees(7)
    monkeypatch.setitem(globals(), "SHOWN", 30)
    agrees(7)
    limits = limits.clone()  # at another address, while the other one exists
    agrees(7)
    assert len(evaluations) == 5


def test_what_has_gradients_or_state_is_evaluated_each_time(evaluations):
    tensors = {k: x.detach() for k, x in operands().items()}
    table, module = torch.zeros(2 * L, requires_grad=True), torch.nn.Module()
    module.width = 3
    for score_mod in (lambda s, b, h, i, j: s + table[i - j + L], lambda s, b, h, i, j: s + (i - j < module.width)):
        for width in (3, 8):
            module.width = width
            out = tk.flex_attention(**tensors, score_mod=score_mod)
        assert len(evaluations) == 2
        evaluations.clear()
    wanted = dense(**tensors, mask=MASKS["nothing hidden"][1], mod=lambda s: s + (I - J < 8))
    torch.testing.assert_close(out, wanted)


def test_remembered_values_do_not_outlive_their_tensors_or_the_limit(monkeypatch):
    tensors = {k: x.detach() for k, x in operands().items()}
    for _ in range(5):
        limits = torch.tensor([40, 50])
        tk.flex_attention(**tensors, block_mask=block_mask(masked_by(9, limits)))
    del limits
    tk.flex_attention(**tensors, block_mask=block_mask(MASKS["causal"][0]))
    assert len(_mods._remembered) == 1
    monkeypatch.setattr(_mods, "MAX_BYTES", L * L)
    tk.flex_attention(**tensors, block_mask=block_mask(MASKS["sinks of tokens"][0]))
    assert len(_mods._remembered) == 1
    tk.flex_attention(**tensors, block_mask=block_mask(MASKS["of heads"][0]))  # too large to keep
    assert not _mods._remembered


def test_what_is_remembered_keeps_no_argument_alive():
    tensors = {k: x.detach() for k, x in operands().items()}
    references = []
    for _ in range(3):
        table, shown = torch.rand(L, L), torch.rand(L, L) < 0.5
        made = block_mask(lambda b, h, i, j, shown=shown: shown[i, j])
        tk.flex_attention(**tensors, score_mod=lambda s, b, h, i, j, table=table: s + table[i, j], block_mask=made)
        references += [StorageWeakRef(x.untyped_storage()) for x in (table, shown)]
    del table, shown, made
    gc.collect()
    assert all(reference.expired() for reference in references)


def test_a_mask_made_in_inference_mode_serves_training():
    made = block_mask(MASKS["dilated window"][0])
    with torch.inference_mode():
        tk.flex_attention(*operands().values(), block_mask=made)
    assert _mods._remembered
    check(
        lambda **x: tk.flex_attention(**x, block_mask=made),
        lambda **x: dense(**x, mask=MASKS["dilated window"][1]),
        operands(),
    )


def test_alibi_is_computed_from_slopes():
    """Where the mask hides the keys after a query, the sign of their distance does not matter."""
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0])
    causal, dilated = MASKS["causal"][1], MASKS["dilated window"][1]
    for score_mod, mask, known in (
        (lambda s, b, h, i, j: s + slopes[h] * (j - i), causal, True),
        (lambda s, b, h, i, j: s + slopes[h] * (j - i), None, False),
        (lambda s, b, h, i, j: s + slopes[h] * (j - i), dilated, False),
        (lambda s, b, h, i, j: s - slopes[h] * (j - i).abs(), None, True),
        (lambda s, b, h, i, j: s - slopes[h] * (j - i).abs() * (j > 0), None, False),
        (lambda s, b, h, i, j: torch.where(i >= j, s + slopes[h] * (j - i), -math.inf), None, True),
    ):
        mask = None if mask is None else mask.view(1, 1, L, L)
        effect = flex._effect(score_mod, mask, (B, H, L, L), torch.float32)
        assert (effect.slopes is not None) is known
        assert (effect.bias is None) is known
        assert effect.slopes is None or torch.equal(effect.slopes, slopes)


def test_blocks_have_their_positions():
    """And rows that see no key."""
    factor, (mask_mod, mask) = 0.2 * seeded(B, H, L, L), MASKS["offset"]
    made = block_mask(mask_mod)
    tensors = operands() | {"factor": factor.requires_grad_()}

    hidden = torch.tensor([-math.inf] * 3 + [0.0] * (L - 3))

    def ours(query, key, value, factor):
        return tk.flex_attention(query, key, value, lambda s, b, h, i, j: s * factor[b, h, i, j] + hidden[i], made)

    def exactly(query, key, value, factor):
        return dense(query, key, value, mask, lambda s: s * factor + hidden[:, None])

    check(ours, exactly, tensors)


def test_blocks_keep_no_scores():
    """Of another score_mod, whose blocks are computed anew in backward."""
    shapes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (shapes.append(x.shape), x)[1], lambda x: x):
        out = tk.flex_attention(*operands().values(), MODS["of scores"].made(seeded(H).requires_grad_()))
    assert all(shape[-1] < L for shape in shapes if shape)
    out.sum().backward()


# What is refused


def test_invalid_arguments():
    q, k, v = (x.detach() for x in operands().values())
    causal = block_mask(MASKS["causal"][0])
    for arguments, options, error, message in (
        ((q, k[:, :2], v[:, :2]), {}, ValueError, "enable_gqa=True"),
        ((q, k[..., :8], v), {}, ValueError, "attention: k must have the head dimension of q"),
        ((q[0], k, v), {}, ValueError, "must have 4 dimensions"),
        ((q, k.half(), v), {}, TypeError, "one dtype"),
        ((q, k, v, "alibi"), {}, TypeError, "score_mod must be a function; got str"),
        ((q, k, v, None, torch.ones(L, L)), {}, TypeError, "block_mask must be a BlockMask of PyTorch; got Tensor"),
        ((q[:, :, :9], k, v, None, causal), {}, ValueError, r"made for the scores \(2, 4, 9, 81\)"),
        ((q, k, v), {"return_lse": True, "return_aux": theirs.AuxRequest(lse=True)}, ValueError, "exclude each other"),
        ((q, k, v), {"return_aux": theirs.AuxRequest(max_scores=True)}, NotImplementedError, "max_scores"),
        ((q, k, v), {"scale": math.inf}, ValueError, "scale"),
        ((q, k, v), {"backend": "best"}, ValueError, "backend must be one of"),
        ((q, k, v, None, causal[:, :, [0, 1]]), {}, RuntimeError, "sliced BlockMask"),
    ):
        with pytest.raises(error, match=message):
            tk.flex_attention(*arguments, **options)


def test_a_named_backend_does_not_fall_back():
    tensors = [x.detach() for x in operands().values()]
    with pytest.raises(UnsupportedByBackend, match="'cpu' does not compute this score_mod: it calls sigmoid"):
        tk.flex_attention(*tensors, MODS["of scores"].made(seeded(H)), backend="cpu")
    wanted = tk.flex_attention(*tensors, MODS["of scores"].made(seeded(H)))
    assert torch.equal(tk.flex_attention(*tensors, MODS["of scores"].made(seeded(H)), backend="torch"), wanted)


def test_other_backends_compute_the_same():
    tensors = [x.detach() for x in operands().values()]
    made, table = block_mask(MASKS["of heads"][0]), 0.2 * seeded(H, 2 * L)
    score_mod = MODS["relative of heads"].made(table)
    outs = [tk.flex_attention(*tensors, score_mod, made, backend=backend) for backend in ("cpu", "torch")]
    torch.testing.assert_close(*outs, atol=2e-6, rtol=1e-5)
    double = [x.double() for x in tensors]
    exact = dense(*double, MASKS["of heads"][1], lambda s: s + toeplitz(table.double()))
    torch.testing.assert_close(tk.flex_attention(*double, MODS["relative of heads"].made(table.double()), made), exact)


def test_errors_of_the_functions_are_their_own():
    tensors = [x.detach() for x in operands().values()]
    for score_mod in (lambda s, b, h, i, j: s + undefined, lambda s, b, h, i, j: s if i > j else -s):  # noqa: F821
        with pytest.raises((NameError, RuntimeError), match=r"undefined|data-dependent"):
            tk.flex_attention(*tensors, score_mod)
    with pytest.raises(IndexError):
        tk.flex_attention(*tensors, lambda s, b, h, i, j: s + torch.zeros(L - 1)[i])


def test_double_backward():
    small = [seeded(1, 1, 5, 3, seed=i).double().requires_grad_() for i in range(3)]
    for score_mod in (None, lambda s, b, h, i, j: s - (i - j).abs(), lambda s, b, h, i, j: s.sigmoid() * 3):
        assert torch.autograd.gradgradcheck(lambda *x, mod=score_mod: tk.flex_attention(*x, mod), small)


@pytest.mark.parametrize("mod", ["none", "bias", "of scores"])
def test_transforms(mod):
    tensors = [x.detach() for x in operands().values()]
    made = {
        "none": None,
        "bias": lambda s, b, h, i, j: s - (i - j).abs(),
        "of scores": MODS["of scores"].made(seeded(H)),
    }
    function = lambda *x: tk.flex_attention(*x, made[mod])  # noqa: E731
    batched = torch.vmap(function)(*(torch.stack([x, 2 * x]) for x in tensors))
    torch.testing.assert_close(batched[1], function(*(2 * x for x in tensors)), rtol=1e-4, atol=1e-5)
    primal, tangent = torch.func.jvp(function, tuple(tensors), tuple(tensors))
    torch.testing.assert_close(primal, function(*tensors), rtol=1e-4, atol=1e-5)
    moved = [function(*(x.double() * scale for x in tensors)) for scale in (1.001, 0.999)]
    torch.testing.assert_close(tangent.double(), (moved[0] - moved[1]) / 0.002, rtol=1e-3, atol=1e-3)


def test_transforms_of_captured_tensors():
    """None of them is remembered."""
    q, slopes = seeded(1, H, 70, D), seeded(H)

    def loss(slopes):
        return tk.flex_attention(q, q, q, lambda s, b, h, i, j: s + slopes[h] * (j - i)).sin().sum()

    leaf = slopes.clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(leaf), leaf)
    for _ in range(2):
        torch.testing.assert_close(torch.func.grad(loss)(slopes), expected, rtol=1e-4, atol=1e-4)
        batched = torch.vmap(torch.func.grad(loss))(torch.stack([2 * slopes, slopes]))
        torch.testing.assert_close(batched[1], expected, rtol=1e-4, atol=1e-4)
        along = torch.func.jvp(loss, (slopes,), (slopes.cos(),))[1]
        torch.testing.assert_close(along, (expected * slopes.cos()).sum(), rtol=1e-4, atol=1e-4)


def test_compilation_is_refused():
    tensors = [x.detach() for x in operands().values()]
    with pytest.raises(Exception, match=r"flex_attention: torch.compile is not supported"):
        torch.compile(lambda *x: tk.flex_attention(*x), fullgraph=True, backend="eager")(*tensors)


def test_empty_meta_and_autocast():
    q, k, v = (x.detach() for x in operands().values())
    score_mod = MODS["of scores"].made(seeded(H))
    assert tk.flex_attention(q[:0], k[:0], v[:0], score_mod).shape == (0, H, L, D)
    assert not tk.flex_attention(q, k[:, :, :0], v[:, :, :0], score_mod).any()
    assert tk.flex_attention(*(x.to("meta") for x in (q, k, v)), score_mod).shape == q.shape
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for each in (score_mod, None):
            assert tk.flex_attention(q, k, v, each).dtype is torch.bfloat16
    assert torch.equal(
        tk.flex_attention(q, k[:1], v[:1]), tk.flex_attention(q, *(x[:1].expand(2, -1, -1, -1) for x in (k, v)))
    )


def test_a_replayed_step_evaluates_its_functions_again():
    """What they read has changed between the calls, in memory; values that were remembered before are not used."""
    limits, slopes, weight = torch.tensor([81, 50]), torch.rand(H), torch.nn.Parameter(torch.rand(D))
    made = block_mask(lambda b, h, i, j: i >= 0, separate_full_blocks=False)
    made.mask_mod = lambda b, h, i, j: (i >= j) & (j < limits[b])
    optimizer = torch.optim.SGD([weight], lr=0.1, fused=True)

    def loss(x):
        return tk.flex_attention(x * weight, x, x, lambda s, b, h, i, j: s - slopes[h] * (i - j), made).square().mean()

    def step(x):
        found = loss(x)
        found.backward()
        optimizer.step()
        optimizer.zero_grad()
        return found.detach()

    graphed = tk.graphed(step, optimizer)
    for i in range(6):
        x = seeded(B, H, L, D, seed=i)
        limits[1], slopes[0] = 60 - 9 * i, i
        torch.testing.assert_close(loss(x).detach(), graphed(x))
