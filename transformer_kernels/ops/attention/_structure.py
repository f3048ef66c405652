"""The structure of a dense mask, read from its values: one interval of keys per query, among the keys not padded.

Causality, windows, documents, prefixes, chunks, padding on either side and their conjunctions are such intervals, and
kernels skip the keys outside them. csrc/cpu/rows/mask.cpp reads each byte of the mask once; the result is cached
as long as the mask's memory exists and nothing writes to it. A mask without such a structure stays dense.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.multiprocessing.reductions import StorageWeakRef

from transformer_kernels.backends.dispatch import requested
from transformer_kernels.ops._checks import PLAIN
from transformer_kernels.ops._derivatives import is_transformed
from transformer_kernels.ops._dropout import compiled
from transformer_kernels.ops._operation import autocast_dtype, is_traced

Shape = tuple[int, int, int, int]
"""(B, H, Lq, Lk)."""


class Structure(NamedTuple):
    """The visible keys of each query: the keys that no field hides.

    causal: query i attends to the keys j <= i + Lk - Lq.
    key_padding_mask: bool (B, Lk), True = visible; None: all.
    key_ranges: int32 (1 or B, 1 or H, 1 or Lq, 2), the first key and the one after the last; None: all.
    hidden: the value that the mask adds to a hidden score: -inf, or a negative number, which is equivalent only if the
        scores are so small that the weight of a hidden key is exactly 0 (see `hides`).
    """

    causal: bool
    key_padding_mask: Tensor | None
    key_ranges: Tensor | None
    hidden: float

    @property
    def is_empty(self) -> bool:
        """Whether every query attends to every key."""
        return not self.causal and self.key_padding_mask is None and self.key_ranges is None


MAX_MASKS = 256
"""Maximum number of cached structures; above it all are dropped."""

MIN_SCORES = 4096
"""Scores of a head from which a call reads its mask."""

MIN_RECORDED_SCORES = 1 << 18
"""Scores of a call from which each replay of a recorded step reads its mask: that takes 0.1 ms of Python (Zen 5)."""

LOG_OF_SMALLEST = -104.0
"""exp of less is 0 in float32."""

FORMATS = {torch.float16: ("<H", "<e"), torch.float32: ("<I", "<f"), torch.float64: ("<Q", "<d")}
"""How the bits of a number of each dtype are packed."""

_remembered: dict[Any, tuple[StorageWeakRef, int, Structure | None]] = {}


def structure_of(mask: Tensor, shape: Shape, remembered: bool = True) -> Structure | None:
    """The structure of a mask that broadcasts to the scores; None where it has none, or is not to be read.

    Args:
        mask: bool, True = visible, or floating and added to the scores; 1 to 4 axes, which broadcast to `shape`.
        shape: (B, H, Lq, Lk) of the scores.
        remembered: False reads the values again: replays of a recorded step write them without a new version.

    A mask with a gradient, on another device than the CPU, or being traced is not read. The structure is cached by
    the memory of the mask, its layout and its version, except if the memory is shared with numpy or another process,
    whose writes do not change the version. As in autograd, writes through `mask.data` are not detected.
    """
    if not _is_readable(mask) or mask.requires_grad or mask.dim() > 4:
        return None
    if not remembered:
        return _read(mask[(None,) * (4 - mask.dim())], shape)
    storage = mask.untyped_storage()
    key = storage._cdata, mask.data_ptr(), mask.shape, mask.stride(), mask.dtype, shape
    found = _remembered.get(key)
    version = None if mask.is_inference() else mask._version
    if found is not None and found[1] == version and storage.resizable():  # numpy() makes it not resizable
        return found[2]
    structure = _read(mask[(None,) * (4 - mask.dim())], shape)
    if version is not None and storage.resizable() and not storage.is_shared():
        _remember(key, (StorageWeakRef(storage), version, structure))
    return structure


def _remember(key: Any, found: tuple[StorageWeakRef, int, Structure | None]) -> None:
    """Store a structure and drop entries of freed masks; the reference keeps the mask's address from being reused."""
    for other in [other for other, (storage, _, _) in _remembered.items() if storage.expired()]:
        _remembered.pop(other, None)
    if len(_remembered) >= MAX_MASKS:
        _remembered.clear()
    _remembered[key] = found


def hides(hidden: float, q: Tensor, k: Tensor, scale: float | None, softcap: float | None) -> bool:
    """Whether a number that is added to scores makes their weights exactly 0 for these operands, as -inf does."""
    width = q.shape[-1]
    factor = width**-0.5 if scale is None else abs(scale)
    largest = factor * width * _largest(q) * _largest(k)
    if softcap is not None:
        largest = min(largest, softcap)
    return 2.0 * largest + hidden < LOG_OF_SMALLEST  # False for NaN


def _largest(x: Tensor) -> float:
    """The largest magnitude; NaN where there is one."""
    lowest, highest = x.detach().aminmax()
    return max(-float(lowest), float(highest))


def understood(
    backend: str | None,
    q: Tensor,
    shape: Shape,
    attn_bias: Tensor,
    causal: bool,
    key_padding_mask: Tensor | None,
    is_hidden_by: Callable[[float], bool],
    remembered: bool = True,
) -> tuple[Tensor | None, bool, Tensor | None, Tensor | None]:
    """`attn_bias`, `causal`, `key_padding_mask` and the ranges of keys of a call, whose mask is recognised.

    They stay as they are where it is not and where they are invalid; kernels of a GPU receive a bool mask as a bias.
    `is_hidden_by` says whether a number that the mask adds hides a key exactly.
    """
    given = attn_bias, causal, key_padding_mask, None
    if type(attn_bias) not in PLAIN or type(q) not in PLAIN or attn_bias.is_nested or not _broadcasts(attn_bias, shape):
        return given
    named = "auto" if is_compiling() else requested(backend)  # Dynamo cannot read the default, a context variable
    if attn_bias.dtype is torch.bool and (named in ("triton", "cuda") or not q.is_cpu):
        shown = torch.zeros((), dtype=autocast_dtype(q) or q.dtype, device=attn_bias.device)
        return torch.where(attn_bias, shown, -math.inf), causal, key_padding_mask, None
    if named not in ("auto", "cpu") or shape[2] * shape[3] < MIN_SCORES:
        return given
    structure = structure_of(attn_bias, shape, remembered)
    if structure is None or not (structure.hidden == -math.inf or is_hidden_by(structure.hidden)):
        return given
    padding = structure.key_padding_mask
    if padding is not None and key_padding_mask is not None:
        if key_padding_mask.shape != padding.shape or key_padding_mask.dtype is not torch.bool:
            return given
        padding = padding & key_padding_mask
    return None, causal or structure.causal, key_padding_mask if padding is None else padding, structure.key_ranges


def recognised(backend: str | None, call: Any, q: Tensor, k: Tensor | None, shape: Shape) -> Any:
    """A call of a traced operation with the structure that the values of its mask have now; itself without one.

    Without keys only -inf hides.
    """
    scores = call.scores
    mask = scores.mask if scores.bias is None else scores.bias
    both = scores.mask is not None and scores.bias is not None
    if mask is None or both or scores.key_ranges is not None or scores.cu_seqlens is not None:
        return call
    if math.prod(shape) < MIN_RECORDED_SCORES:
        return call
    alone = not (scores.causal or scores.windowed) and scores.key_padding_mask is scores.alibi_slopes is None

    def is_hidden_by(number: float) -> bool:
        return alone and k is not None and hides(number, q, k, scores.scale, scores.softcap or None)

    mask, causal, padding, ranges = understood(
        backend, q, shape, mask, scores.causal, scores.key_padding_mask, is_hidden_by, remembered=False
    )
    if mask is not None:
        return call
    right = 0 if causal else scores.right
    found = {"right": right, "key_padding_mask": padding, "key_ranges": ranges}
    return call._replace(scores=scores._replace(bias=None, mask=None, **found))


def _is_readable(mask: Tensor) -> bool:
    """Whether the values of a mask are in memory, at strides, and the call is eager and without transforms."""
    if not mask.is_cpu or is_traced(mask) or is_transformed((mask,)):
        return False
    return mask.layout is torch.strided and not mask.is_neg()


def _broadcasts(mask: Tensor, shape: Shape) -> bool:
    sizes = zip(reversed(mask.shape), reversed(shape), strict=False)
    return mask.dim() <= 4 and all(size in (1, full) for size, full in sizes)


def _read(mask: Tensor, shape: Shape) -> Structure | None:
    """The structure of a mask of four axes."""
    module, keys = compiled(), shape[3]
    if module is None or mask.shape[3] != keys or not mask.numel() or (keys > 1 and mask.stride(3) == 0):
        return None
    if mask.dtype is not torch.bool and mask.dtype not in FORMATS and mask.dtype is not torch.bfloat16:
        return None
    mask = mask[tuple(slice(0, 1 if stride == 0 else None) for stride in mask.stride()[:3])]
    mask = mask if mask.stride(3) == 1 or keys == 1 else mask.contiguous()
    batch, heads, queries, _ = mask.shape
    ranges = mask.new_empty((batch, heads, queries, 2), dtype=torch.int32)
    columns = mask.new_empty((batch, keys), dtype=torch.bool)
    work = mask.new_empty(2 * batch * heads * queries, dtype=torch.int64)
    found = mask.new_empty(6, dtype=torch.int64)
    strides = (stride if size > 1 else 0 for size, stride in zip(mask.shape[:3], mask.stride()[:3], strict=True))
    addresses = ranges.data_ptr(), columns.data_ptr(), work.data_ptr(), found.data_ptr()
    module.mask_ranges(mask.element_size(), mask.data_ptr(), *mask.shape, *strides, *addresses)
    understood, whole, causal, has_columns, has_empty_rows, bits = found.tolist()
    hidden = _number(bits, mask.dtype)
    if not understood or not hidden < 0.0 or (has_empty_rows and hidden != -math.inf):
        return None
    causal = bool(causal and not whole and queries == shape[2])
    padding = columns.expand(shape[0], keys).contiguous() if has_columns else None
    return Structure(causal, padding, None if whole or causal else _repeated_once(ranges), hidden)


def _repeated_once(ranges: Tensor) -> Tensor:
    """The ranges without the batches and heads in which they repeat."""
    for axis in (0, 1):
        first = ranges.narrow(axis, 0, 1)
        if ranges.shape[axis] > 1 and bool((ranges == first).all()):
            ranges = first.contiguous()
    return ranges


def _number(bits: int, dtype: torch.dtype) -> float:
    """The number of a mask's dtype with these bits; -inf for bool, and where nothing is hidden."""
    if dtype is torch.bool or not bits:
        return -math.inf
    if dtype is torch.bfloat16:
        bits, dtype = bits << 16, torch.float32
    packed, unpacked = FORMATS[dtype]
    number: float = struct.unpack(unpacked, struct.pack(packed, bits % (1 << 64)))[0]
    return number
