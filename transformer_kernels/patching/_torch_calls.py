"""The functions of torch that `accelerate` reroutes: the equivalent call of this package, or why there is none.

A handler receives the backend and the unchanged arguments of torch's function. It returns the result, or a string: the
reason why PyTorch computes the call. A call is rerouted only where the result means the same: the
alignment of causality, the polarity of masks, the axis of classes and the dtype of the result are torch's.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from transformer_kernels import ops
from transformer_kernels.backends import cpu
from transformer_kernels.backends.dispatch import unavailable
from transformer_kernels.ops._crossover_table import REROUTED
from transformer_kernels.ops._crossovers import of_pytorch, prefers_torch
from transformer_kernels.ops._foreign import rejected
from transformer_kernels.ops._plan import any_autocast, dispatch_modes
from transformer_kernels.ops.attention import flex
from transformer_kernels.ops.embedding._padding import without_gradient
from transformer_kernels.ops.linear import _cpu as linear_cpu
from transformer_kernels.patching._products import linear_is_ours

FLOATING = (torch.float32, torch.float16, torch.bfloat16)
REDUCTIONS = ("none", "mean", "sum")
"""By the number that torch's functions pass on."""

AUTOCAST = "autocast chooses the dtype of its result"
REFUSED = "this package's operation does not accept its arguments"
FASTER = "PyTorch computes calls of this size in less time"

MIN_PRODUCTS = 1 << 23
"""Multiplications by a weight in a cache from which ours save more than the time of the checks of a rerouted call."""


EPS_IS_WIDE = bool(torch.ops.aten.rms_norm(torch.full((1,), 1e-3, dtype=torch.bfloat16, device="cpu"), [1]) > 0.5)
"""Whether the default eps of this torch's RMSNorm belongs to its computation dtype, as in recent releases."""


def default_eps(dtype: torch.dtype) -> float:
    """The eps of torch.nn.functional.rms_norm without one, for rows of this dtype."""
    return torch.finfo(torch.promote_types(dtype, torch.float32) if EPS_IS_WIDE else dtype).eps


def is_autocast(x: Tensor) -> bool:
    kind = x.device.type
    return kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind)


def refusal(
    name: str, backend: str, elements: int, dtype: torch.dtype, *tensors: Tensor | None, random: bool = False
) -> str | None:
    """Why a call of plain tensors that has an exact counterpart is not rerouted; a named backend always computes it.

    Args:
        name: an operation that the table of crossovers has as a rerouted one.
        elements: the size in that table.
        dtype: in which it is computed.
        tensors: the inputs of the call, the first of them never None.
        random: whether it draws random numbers.
    """
    if backend != "auto":
        return None
    device = tensors[0].device  # type: ignore[union-attr]
    if device.type not in ("cpu", "cuda"):
        return f"there are no kernels for {device.type}"
    if dtype not in FLOATING:
        return f"there are no kernels for {dtype}"
    if device.type == "cuda":
        missing = all(unavailable(kernels, device) is not None for kernels in ("triton", "cuda"))
        return "no backend for CUDA tensors is available" if missing else None
    recorded = torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)
    if prefers_torch(name + REROUTED, elements, dtype.itemsize, recorded=recorded, random=random):
        return FASTER
    return "the CPU kernels are not available" if unavailable("cpu", device) is not None else None


@functools.cache
def left_below(operation: str, dtype: torch.dtype, recorded: bool | None = None) -> int:
    """The size below which "auto" leaves calls to PyTorch; by default in inference and in training."""
    first, end = of_pytorch(operation + REROUTED, dtype.itemsize, recorded)
    return 0 if first else end


cpu.dependents.append(left_below.cache_clear)


def is_left(operation: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the size of a call alone shows that "auto" leaves it to PyTorch.

    The other checks of a handler take longer than a small call does.
    """
    try:
        x = args[0]
        if dispatch_modes() or not x.is_cpu:
            return False
        if operation == "linear":
            weight, elements = args[1], x.numel()
            fewest = linear_cpu.few_rows(size := weight.numel(), True)
            if elements < fewest * x.shape[-1]:
                return True
            saves_little = size < linear_cpu.MIN_READ and elements * weight.shape[0] < MIN_PRODUCTS
            return fewest > 0 and saves_little and not any_autocast()
        if operation == "attention":
            return not any_autocast() and x.numel() // x.shape[-1] * args[1].shape[-2] < left_below(operation, x.dtype)
        if operation == "embedding":
            return args[1].numel() * x.shape[-1] < left_below(operation, x.dtype)
        if kwargs and kwargs.get("approximate") == "tanh":
            operation = "gelu_tanh"
        return x.numel() < left_below(operation, x.dtype, None if torch.is_grad_enabled() else False)
    except (AttributeError, IndexError, RuntimeError, TypeError, ZeroDivisionError):  # the handler has the reason
        return False


def computed_dtype(x: Tensor) -> torch.dtype:
    """The dtype of products of x, which autocast may choose."""
    if x.dtype is not torch.float64 and is_autocast(x):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


def fits_last_axis(x: Tensor, shape: Any) -> bool:
    """Whether a normalized_shape names the last axis of x alone."""
    return isinstance(shape, Sequence) and len(shape) == 1 and x.dim() > 0 and shape[0] == x.shape[-1]


def linear(backend: str, input: Any = None, weight: Any = None, bias: Any = None) -> Tensor | str:
    if (reason := rejected(input, weight, optional=[bias])) is not None:
        return reason
    if weight.dim() != 2 or input.dim() < 1 or input.shape[-1] != weight.shape[1]:
        return "the shapes are not those of a linear layer"
    if bias is not None and bias.shape != weight.shape[:1]:
        return "the bias has another shape than (out_features,)"
    if backend == "auto" and not linear_is_ours(input, weight, backend):
        return "PyTorch's product is the faster one"
    dtypes = {tensor.dtype for tensor in (input, weight, bias) if tensor is not None}
    if len(dtypes) > 1 and not is_autocast(input):
        return "the dtypes differ"
    if input.is_floating_point():
        input = input.to(computed_dtype(input))  # so that the call is planned, which halves its host time
    return ops.linear(input, weight, bias, backend=backend)


def layer_norm(
    backend: str,
    input: Any = None,
    normalized_shape: Any = None,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor | str:
    if weight is None:
        return "it has no weight"
    if (reason := rejected(input, weight, optional=[bias])) is not None:
        return reason
    if not fits_last_axis(input, normalized_shape) or weight.shape != input.shape[-1:] or not eps > 0.0:
        return "more than the last axis is normalised"
    if any(tensor is not None and tensor.dtype is not input.dtype for tensor in (weight, bias)):
        return "the dtypes differ"
    if input.is_cuda and is_autocast(input):
        return AUTOCAST
    if (reason := refusal("layer_norm", backend, input.numel(), input.dtype, input, weight, bias)) is not None:
        return reason
    return ops.layer_norm(input, weight, bias, eps=eps, backend=backend)


def rms_norm(
    backend: str, input: Any = None, normalized_shape: Any = None, weight: Any = None, eps: float | None = None
) -> Tensor | str:
    if (reason := rejected(input, optional=[weight])) is not None:
        return reason
    if not fits_last_axis(input, normalized_shape) or not (eps is None or eps > 0.0):
        return "more than the last axis is normalised"
    if not input.is_floating_point() or (weight is not None and weight.dtype is not input.dtype):
        return "the dtypes differ"
    if input.is_cuda and is_autocast(input):
        return AUTOCAST
    if (reason := refusal("rms_norm", backend, input.numel(), input.dtype, input, weight)) is not None:
        return reason
    weight = input.new_ones(input.shape[-1]) if weight is None else weight
    eps = default_eps(input.dtype) if eps is None else eps
    return ops.rms_norm(input, weight, eps=eps, backend=backend)


def gelu(backend: str, input: Any = None, *, approximate: str = "none") -> Tensor | str:
    if (reason := rejected(input)) is not None:
        return reason
    if approximate not in ("none", "tanh") or not input.is_floating_point():
        return "the arguments are not those of GELU"
    name = "gelu_tanh" if approximate == "tanh" else "gelu"
    if (reason := refusal(name, backend, input.numel(), input.dtype, input)) is not None:
        return reason
    return ops.gelu(input, approximate=approximate, backend=backend)


def softmax(backend: str, input: Any = None, dim: Any = None, dtype: torch.dtype | None = None) -> Tensor | str:
    if (reason := rejected(input)) is not None:
        return reason
    if type(dim) is not int or input.dim() == 0 or dim not in (-1, input.dim() - 1):
        return "it is not over the last axis"
    result = input.dtype if dtype is None else dtype
    if not input.is_floating_point() or not result.is_floating_point:
        return "its dtype is not floating"
    if input.is_cuda and is_autocast(input):
        return AUTOCAST
    if (reason := refusal("softmax", backend, input.numel(), result, input)) is not None:
        return reason
    return ops.softmax(input if result is input.dtype else input.to(result), backend=backend)


def cross_entropy(
    backend: str,
    input: Any = None,
    target: Any = None,
    weight: Any = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor | str:
    if (reason := rejected(input, target, optional=[weight])) is not None:
        return reason
    if target.dtype is not torch.int64:
        return "the targets are probabilities" if target.is_floating_point() else "the targets are not int64"
    if input.dim() < 2 or target.shape != (input.shape[0], *input.shape[2:]):
        return "the logits are not (N, C, ...) with targets (N, ...)"
    if weight is not None and (weight.requires_grad or weight.dtype is not input.dtype):
        return "the weights of the classes have a gradient or another dtype"
    rows = input
    if input.dim() > 2:  # the classes are axis 1
        rows = input.movedim(1, -1)
        if not rows.is_contiguous():
            return "the axis of the classes is not the innermost one in memory"
        rows = rows.flatten(0, -2)
    if (reason := refusal("cross_entropy", backend, input.numel(), input.dtype, input)) is not None:
        return reason
    loss = ops.cross_entropy(
        rows,
        target.flatten(),
        weight=weight,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction=REDUCTIONS[reduction],
        backend=backend,
    )
    loss = loss.view(target.shape) if loss.dim() else loss
    return loss if is_autocast(input) else loss.to(input.dtype)  # which computes it in float32


def embedding(
    backend: str,
    weight: Any = None,
    indices: Any = None,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor | str:
    if (reason := rejected(weight, indices)) is not None:
        return reason
    if scale_grad_by_freq or sparse:
        return "its gradient is sparse or scaled by frequency"
    if weight.dim() != 2 or indices.dtype not in (torch.int64, torch.int32):
        return "the arguments are not those of an embedding"
    elements = indices.numel() * weight.shape[1]
    if (reason := refusal("embedding", backend, elements, weight.dtype, weight)) is not None:
        return reason
    table = without_gradient(weight, padding_idx if padding_idx >= 0 else None)
    return ops.embedding(indices.reshape(1, -1), table, backend=backend).view(*indices.shape, weight.shape[1])


def attention(
    backend: str,
    query: Any = None,
    key: Any = None,
    value: Any = None,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | str:
    if (reason := rejected(query, key, value, optional=[attn_mask])) is not None:
        return reason
    if (reason := unlike_ours(query, key, value, enable_gqa)) is not None:
        return reason
    if attn_mask is not None and (is_causal or not _broadcasts(attn_mask, query, key)):
        return "the mask does not broadcast to the scores, or comes with is_causal"
    if attn_mask is not None and attn_mask.dtype not in (torch.bool, query.dtype) and not is_autocast(query):
        return "the dtypes differ"
    queries, keys = query.shape[2], key.shape[2]
    scores, dtype = math.prod(query.shape[:3]) * keys, computed_dtype(query)
    read = query, key, value, attn_mask
    if (reason := refusal("attention", backend, scores, dtype, *read, random=dropout_p > 0.0)) is not None:
        return reason
    options: dict[str, Any] = {"causal": is_causal}
    if is_causal and queries < keys:  # torch's causality is aligned top-left: keys beyond the queries are masked
        key, value = key[:, :, :queries], value[:, :, :queries]
    elif is_causal and queries > keys:  # keys up to i are visible; ours are aligned bottom-right
        options = {"window": (None, queries - keys)}
    if attn_mask is not None and (padding := _padding(attn_mask, query.shape[0], keys)) is not None:
        options["key_padding_mask"] = padding
    elif attn_mask is not None:
        options["attn_bias"] = attn_mask
    out = ops.attention(query, key, value, dropout_p=dropout_p, scale=scale, backend=backend, **options)
    return out


def varlen_attention(
    backend: str,
    query: Any = None,
    key: Any = None,
    value: Any = None,
    cu_seq_q: Any = None,
    cu_seq_k: Any = None,
    max_q: int = 0,
    max_k: int = 0,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: Sequence[int] | None = None,
    enable_gqa: bool = False,
    seqused_k: Any = None,
    block_table: Any = None,
    num_splits: int | None = None,
) -> tuple[Tensor, Tensor, Tensor] | str:
    """The operator of torch.nn.attention.varlen, which PyTorch has on GPUs only."""
    if (reason := rejected(query, key, value, cu_seq_q, optional=[cu_seq_k])) is not None:
        return reason
    if not query.is_cpu:
        return "PyTorch has a kernel for it"
    if cu_seq_k is None or seqused_k is not None or block_table is not None:
        return "its keys are pages, or used in part"
    if not query.dim() == key.dim() == value.dim() == 3:
        return "query, key and value are not (tokens, heads, D)"
    alike = query.shape[0] == key.shape[0] and torch.equal(cu_seq_q, cu_seq_k)
    left, right = (None if reach < 0 else reach for reach in window_size or (-1, -1))
    packed = [x.unsqueeze(0).transpose(1, 2) for x in (query, key, value)]
    out, lse = ops.attention(
        *packed,
        cu_seqlens=cu_seq_q,
        cu_seqlens_k=None if alike else cu_seq_k,
        window=(left, 0 if is_causal else right),
        scale=scale,
        return_lse=True,
        backend=backend,
    )
    return out.transpose(1, 2).squeeze(0), lse.squeeze(0), torch.empty(2, dtype=torch.int64)


def flex_attention(
    backend: str,
    query: Any = None,
    key: Any = None,
    value: Any = None,
    score_mod: Any = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: Any = None,
) -> Any:
    """The function of torch.nn.attention.flex_attention, which PyTorch trains on GPUs only."""
    if (reason := rejected(query, key, value)) is not None:
        return reason
    if not query.is_cpu:
        return "PyTorch has a kernel for it"
    options: dict[str, Any] = {"return_lse": return_lse, "return_aux": return_aux, "backend": backend}
    return flex.flex_attention(query, key, value, score_mod, block_mask, scale, enable_gqa, **options)


def unlike_ours(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> str | None:
    """Why `attention` does not support these shapes and dtypes, or None."""
    if not query.dim() == key.dim() == value.dim() == 4:
        return "query, key and value are not (B, H, L, D)"
    if not query.dtype is key.dtype is value.dtype and not is_autocast(query):
        return "the dtypes differ"
    batch, heads, _, width = query.shape
    if key.shape[0] != batch or key.shape[3] != width or value.shape[:3] != key.shape[:3]:
        return "query, key and value do not have one batch size, length and head dimension"
    shared = key.shape[1]
    if heads != shared and not (enable_gqa and heads % shared == 0):
        return "the heads of key broadcast without enable_gqa"
    return None


def _broadcasts(mask: Tensor, query: Tensor, key: Tensor) -> bool:
    scores = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    pairs = zip(reversed(mask.shape), reversed(scores), strict=False)
    return mask.dim() <= 4 and all(size in (1, full) for size, full in pairs)


def _padding(mask: Tensor, batch: int, keys: int) -> Tensor | None:
    """The visible keys (B, Lk) of a mask that is the same for all queries and heads, else None."""
    if mask.dtype is not torch.bool or mask.dim() != 4 or mask.shape[3] != keys:
        return None
    if any(mask.shape[axis] > 1 and mask.stride(axis) != 0 for axis in (1, 2)):
        return None
    return mask[:, 0, 0].expand(batch, keys)


Handler = Callable[..., Any]


def attempted(handler: Handler, backend: str, *args: Any, **kwargs: Any) -> Any:
    """The handler's result. What it refuses under "auto" is PyTorch's, with the error that callers handle."""
    try:
        return handler(backend, *args, **kwargs)
    except (TypeError, ValueError):
        if backend != "auto":
            raise
        return REFUSED


FUNCTIONS: tuple[tuple[Any, str, str, Handler], ...] = (
    (torch.nn.functional, "scaled_dot_product_attention", "attention", attention),
    (torch.nn.functional, "linear", "linear", linear),
    (torch.nn.functional, "gelu", "gelu", gelu),
    (torch, "layer_norm", "layer_norm", layer_norm),
    (torch, "rms_norm", "rms_norm", rms_norm),
    (torch, "softmax", "softmax", softmax),
    (torch, "embedding", "embedding", embedding),
    (torch._C._nn, "cross_entropy_loss", "cross_entropy", cross_entropy),
)
"""Owner, name, our operation and handler of each function.

The functions of torch.nn.functional that are written in Python (layer_norm, rms_norm, embedding, cross_entropy,
softmax) look these up when they are called, so that they stay the objects that they are.
"""

VARLEN, FLEX = "torch.nn.attention.varlen", "torch.nn.attention.flex_attention"
"""Modules that take a second to import: their calls are rerouted in blocks that begin after they were imported."""
