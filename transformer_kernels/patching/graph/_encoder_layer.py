"""torch.nn.TransformerEncoderLayer in inference: PyTorch computes it in one call, _transformer_encoder_layer_fwd.

Its parts on these kernels are faster from a few hundred tokens on.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from transformer_kernels import ops
from transformer_kernels.backends import cpu
from transformer_kernels.ops._operation import is_traced
from transformer_kernels.ops._pattern import Call, Match, Option, Pattern, Prepared, Replacement
from transformer_kernels.ops.linear._cpu import MIN_ROWS
from transformer_kernels.patching._products import faster_linear

PARAMETERS = ("x", "width", "heads", "in_weight", "in_bias", "out_weight", "out_bias", "gelu", "norm_first", "eps",
              "weight1", "bias1", "weight2", "bias2", "up_weight", "up_bias", "down_weight", "down_bias", "mask",
              "kind")  # fmt: skip


def visible_keys(mask: Tensor) -> Tensor | None:
    """The mask of torch's function, in which a key with any number but 0 is hidden, True where a key is visible.

    None where a query has no visible key, and where values are not read.
    """
    if is_traced(mask):
        return None
    visible = mask == 0
    visible = visible[:, None, None] if visible.dim() == 2 else visible
    return visible if bool(visible.any(-1).all()) else None


def encoder_layer(
    x: Tensor, width: int, heads: int, in_weight: Tensor, in_bias: Tensor, out_weight: Tensor, out_bias: Tensor,
    gelu: bool, norm_first: bool, eps: float, weight1: Tensor, bias1: Tensor, weight2: Tensor, bias2: Tensor,
    up_weight: Tensor, up_bias: Tensor, down_weight: Tensor, down_bias: Tensor, mask: Tensor | None = None,
    kind: int | None = None, visible: Tensor | None = None, backend: str | None = None,
) -> Tensor:  # fmt: skip
    """The output (B, L, E) of torch's function."""
    if mask is not None and visible is None:
        return torch._transformer_encoder_layer_fwd(  # type: ignore[attr-defined, no-any-return]
            x, width, heads, in_weight, in_bias, out_weight, out_bias, gelu, norm_first, eps, weight1, bias1, weight2,
            bias2, up_weight, up_bias, down_weight, down_bias, mask, kind,
        )  # fmt: skip

    def attended(x: Tensor) -> Tensor:
        packed = faster_linear(x, in_weight, in_bias, backend).view(*x.shape[:2], 3, heads, width // heads)
        q, k, v = packed.permute(2, 0, 3, 1, 4)
        out: Any = ops.attention(q, k, v, attn_bias=visible, backend=backend)
        return faster_linear(out.transpose(1, 2).reshape(x.shape), out_weight, out_bias, backend)

    def widened(x: Tensor) -> Tensor:
        up = faster_linear(x, up_weight, up_bias, backend, "gelu" if gelu else "relu")
        return faster_linear(up, down_weight, down_bias, backend)

    options: dict[str, Any] = {"eps": eps, "backend": backend}
    if norm_first:
        branch = attended(ops.layer_norm(x, weight1, bias1, **options))
        normed, stream = ops.add_layer_norm(branch, x, weight2, bias2, **options)
        return stream + widened(normed)
    normed = ops.add_layer_norm(attended(x), x, weight1, bias1, **options)[0]
    return ops.add_layer_norm(widened(normed), normed, weight2, bias2, **options)[0]


def _replace(match: Match) -> Replacement | str:
    x = match.fake("x")
    tensors = [match.shape(match.bound[name]) for name in PARAMETERS[:-1]]
    if match.trains and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        return "it has a gradient"
    if x.dim() != 3 or not match.has_kernel(x.dtype) or any(match.bound[name] is None for name in PARAMETERS[:18]):
        return "its input is not (B, L, E) of a dtype with a kernel"
    if any(tensor is not None and tensor.dtype is not x.dtype for tensor in tensors[3:-1]):
        return "the dtypes differ"
    if torch.is_autocast_enabled(x.device.type):
        return "autocast chooses its dtypes"
    few = match.size(*x.shape[:-1]) < MIN_ROWS and not cpu.is_reproducible()
    if match.is_auto and (few or not x.is_cpu):
        return "PyTorch's function is the faster one at this size"
    values = tuple(match.bound[name] for name in PARAMETERS)
    mask = match.bound["mask"]
    return Replacement(encoder_layer, values if mask is None else (*values, Prepared(visible_keys, (mask,))))


PATTERNS = (Pattern("encoder_layer", Call("encoder_layer", *map(Option, PARAMETERS)), _replace),)
