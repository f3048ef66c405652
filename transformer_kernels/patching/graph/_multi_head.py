"""torch.nn.functional.multi_head_attention_forward, which Dynamo keeps as one call, where its weights are not used."""

from __future__ import annotations

import inspect
import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from transformer_kernels import ops
from transformer_kernels.ops._operation import is_traced
from transformer_kernels.ops._pattern import Call, Match, Option, Pattern, Replacement
from transformer_kernels.patching._products import faster_linear
from transformer_kernels.patching.graph._calls import attention

PARAMETERS = tuple(inspect.signature(F.multi_head_attention_forward).parameters)
ABSENT = ("bias_k", "bias_v", "static_k", "static_v", "add_zero_attn")
SEPARATE = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
USED = ("query", "key", "value", "num_heads", "in_proj_weight", "in_proj_bias", "dropout_p", "out_proj_weight",
        "out_proj_bias", "training", "key_padding_mask", "need_weights", "attn_mask", "is_causal")  # fmt: skip


def multi_head_attention(
    query: Tensor, key: Tensor, value: Tensor, heads: int, weight: Any, bias: Tensor | None, p: float,
    out_weight: Tensor, out_bias: Tensor | None, training: bool, padding: Tensor | None, need_weights: bool,
    mask: Tensor | None, causal: bool, backend: str | None = None, bounds: Tensor | None = None,
) -> tuple[Tensor, None]:  # fmt: skip
    """The output (L, B, E) of torch's function, for query (L, B, E) and key and value (S, B, E).

    The weight is one tensor, or one each of queries, keys and values. With bounds of packed sequences B is 1, and
    padding is not read.
    """
    if causal and padding is None and not need_weights:
        mask = None  # as torch does: the mask is a hint then
    else:
        causal = False
    q, k, v = _projected(query, key, value, weight, bias, heads, backend)
    visible = None if bounds is not None else _visible(mask, padding, q, k)
    dropout = p if training else 0.0
    if bounds is not None:
        out: Any = ops.attention(q, k, v, cu_seqlens=bounds, dropout_p=dropout, backend=backend)
    elif need_weights and visible is not None and _hides_rows(visible):
        out = _as_written(q, k, v, visible, dropout)
    elif visible is None and not (causal and q.shape[2] != k.shape[2]):
        out = ops.attention(q, k, v, causal=causal, dropout_p=dropout, backend=backend)
    else:
        out = attention(q, k, v, visible, dropout, causal, backend=backend or "auto")
    joined = out.permute(2, 0, 1, 3).reshape(query.shape)
    return _product(joined, out_weight, out_bias, backend), None


multi_head_attention.rounds_under_autocast = True  # type: ignore[attr-defined]


def _projected(
    query: Tensor, key: Tensor, value: Tensor, weight: Any, bias: Tensor | None, heads: int, backend: str | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values (B, H, L, D): views of one product if they are projections of the same tensor."""
    width = query.shape[-1]
    groups = [(query, 3)] if key is query and value is key else [(query, 1), (key, 2)]
    if isinstance(weight, tuple) or (key is not value and len(groups) > 1):
        groups = [(query, 1), (key, 1), (value, 1)]
    found: list[Tensor] = []
    for tensor, count in groups:
        rows = slice(len(found) * width, (len(found) + count) * width)
        part = weight[len(found)] if isinstance(weight, tuple) else weight[rows]
        product = _product(tensor, part, None if bias is None else bias[rows], backend)
        split = product.view(*product.shape[:2], count, heads, width // heads)
        found.extend(split.permute(2, 1, 3, 0, 4))
    return found[0], found[1], found[2]


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, backend: str | None) -> Tensor:
    """x W^T + b of x (L, B, E), or of the tensor (B, L, E) that x is a transposed view of.

    Without gradients PyTorch multiplies such a view as a batch of matrices, in 16 bits with a copy of the weight for
    each. The result has the strides of the view, so it is not for a product that the program itself reads.
    """
    if x.is_contiguous() or not (batches := x.transpose(0, 1)).is_contiguous():
        return faster_linear(x, weight, bias, backend)
    return faster_linear(batches, weight, bias, backend).transpose(0, 1)


def _visible(mask: Tensor | None, padding: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """Both masks as one of `scaled_dot_product_attention`: bool with True = visible, or added to the scores."""
    if mask is not None:
        mask = mask.view(q.shape[0], -1, *mask.shape[1:]) if mask.dim() == 3 else mask[None, None]
    if padding is not None:
        padding = padding[:, None, None]
    found = [value for value in (mask, padding) if value is not None]
    if all(item.dtype is torch.bool for item in found):
        hidden = found[0] | found[-1] if found else None
        return None if hidden is None else hidden.logical_not()
    added = [
        torch.zeros_like(x, dtype=q.dtype).masked_fill_(x, -torch.inf) if x.dtype is torch.bool else x for x in found
    ]
    return added[0] if len(added) == 1 else added[0] + added[1]


def _hides_rows(visible: Tensor) -> bool:
    """Whether a query has no visible key, or may where values are not read."""
    if is_traced(visible):
        return True
    hidden = visible.logical_not() if visible.dtype is torch.bool else visible == -torch.inf
    return bool(hidden.all(-1).any())


def _as_written(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, p: float) -> Tensor:
    """As torch computes it where weights are wanted: NaN for a query without visible keys."""
    if visible.dtype is torch.bool:
        visible = torch.zeros_like(visible, dtype=q.dtype).masked_fill_(visible.logical_not(), -torch.inf)
    weights = (q * q.shape[-1] ** -0.5 @ k.transpose(-1, -2) + visible).softmax(-1)
    return (torch.dropout(weights, p, True) if p else weights) @ v


def _replace(match: Match) -> Replacement | str:
    bound, query = match.bound, match.fake("query")
    names = SEPARATE if bound["use_separate_proj_weight"] else ("in_proj_weight",)
    weights = tuple(bound[name] for name in names)
    if any(bound[name] not in (None, False) for name in ABSENT) or None in weights:
        return "it has further keys"
    if any(user.target is not operator.getitem or user.args[1] != 0 for user in match.root.users):
        return "its weights are used"
    if query.dim() != 3 or not match.has_kernel(query.dtype, *(match.fake(x).dtype for x in names)):
        return "its input is not (L, B, E) of a dtype with a kernel"
    if torch.is_autocast_enabled(query.device.type) and not (match.is_auto and query.is_cpu):
        return "autocast chooses its dtypes"
    if match.is_auto and match.size(*query.shape) < MIN_ELEMENTS:
        return "PyTorch's function is the faster one at this size"
    weight = weights if len(weights) > 1 else weights[0]
    return Replacement(
        multi_head_attention, tuple(weight if name == "in_proj_weight" else bound[name] for name in USED)
    )


MIN_ELEMENTS = 1 << 14
"""Elements of the queries from which the parts are faster than torch's function."""

PATTERNS = (Pattern("multi_head_attention", Call("mha", *map(Option, PARAMETERS)), _replace),)
