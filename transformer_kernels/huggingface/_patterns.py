"""Masks of transformers as patterns, recognised by the functions of `transformers.masking_utils` that make them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from transformers import masking_utils
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from transformer_kernels.ops._operation import is_traced


class MaskPattern(Tensor):
    """A boolean mask (B, 1, Lq, Lk), True = visible, stored as a pattern and materialised when it is read.

    Query i attends to the keys i' - left <= j <= i' + right with i' = i + keys - Lq that belong to the same sequence
    and are not padding. Any operator of torch materialises the mask: slicing or converting it gives a plain
    tensor.

    Attributes:
        left, right: the reach to both sides, None without a limit.
        keys: the number of visible keys; later ones are masked.
        padding: bool (B, keys), True at real keys, or None.
        cu_seqlens: the bounds of the sequences in the (B * Lq) tokens, int32, or None.
    """

    left: int | None
    right: int | None
    keys: int
    padding: Tensor | None
    cu_seqlens: Tensor | None
    _make: Callable[[], Tensor]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def of(cls, shape: tuple[int, ...], device: Any, make: Callable[[], Tensor], **fields: Any) -> MaskPattern:
        """A pattern of this shape; `make` returns its mask."""
        pattern: MaskPattern = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)
        vars(pattern).update(fields, _make=functools.cache(make))
        return pattern

    def dense(self) -> Tensor:
        """The mask as a plain tensor."""
        return self._make()

    def hides_the_future_at_most(self) -> bool:
        """Whether it hides what causality does, or nothing at all."""
        last = self.keys - 1
        whole = self.keys == self.shape[3] and self.padding is None and self.cu_seqlens is None
        return whole and (self.left is None or self.left >= last) and (self.right in (0, None) or self.right >= last)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        packed = 0 if self.cu_seqlens is None else len(self.cu_seqlens) - 1
        return f"MaskPattern({tuple(self.shape)}, left={self.left}, right={self.right}, sequences={packed})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map(lambda x: x.dense() if isinstance(x, MaskPattern) else x, (args, kwargs or {}))
        return function(*args, **kwargs)


class _Reach(NamedTuple):
    """The pattern of a mask function, in positions: q - left <= k <= q + right, in one sequence of a packed row."""

    left: int | None = None
    right: int | None = None
    sequences: Tensor | None = None
    positions: Tensor | None = None

    def and_also(self, other: _Reach) -> _Reach | None:
        """The conjunction; None for two packings."""
        if self.sequences is not None and other.sequences is not None:
            return None
        if self.positions is not None and other.positions is not None:
            return None
        reaches = ([x for x in pair if x is not None] for pair in zip(self[:2], other[:2], strict=True))
        left, right = (min(reach) if reach else None for reach in reaches)
        mine, theirs = self[2:], other[2:]
        return _Reach(left, right, *(a if b is None else b for a, b in zip(mine, theirs, strict=True)))


def _reach(function: Any) -> _Reach | None:
    """The pattern of a mask function of `transformers.masking_utils`; None for every other function."""
    if function is causal_mask_function:
        return _Reach(right=0)
    if function is bidirectional_mask_function:
        return _Reach()
    name = _composers().get(getattr(function, "__code__", None))
    if name is None:
        return None
    closure = inspect.getclosurevars(function).nonlocals
    if name == "and_masks":
        parts = [_reach(part) for part in closure["mask_functions"]]
        whole: _Reach | None = _Reach()
        for part in parts:
            whole = None if whole is None or part is None else whole.and_also(part)
        return whole
    if name == "sliding_window_overlay":  # kv > q - window
        return _Reach(left=closure["sliding_window"] - 1)
    if name == "sliding_window_bidirectional_overlay":  # |q - kv| <= window
        return _Reach(left=closure["sliding_window"], right=closure["sliding_window"])
    if name == "packed_sequence_mask_function":
        return _Reach(sequences=closure["packed_sequence_mask"])
    inner = _reach(closure["mask_function"])  # of the positions in each sequence
    if inner is None or inner.sequences is not None or inner.positions is not None:
        return None
    return inner._replace(positions=closure["position_ids"])


@functools.cache
def _composers() -> dict[Any, str]:
    """The functions of `transformers.masking_utils` that make mask functions, by the code of their results."""
    samples: dict[str, tuple[Any, ...]] = {
        "and_masks": (),
        "sliding_window_overlay": (1,),
        "sliding_window_bidirectional_overlay": (1,),
        "packed_sequence_mask_function": (None,),
        "remap_positions_for_packed_sequence": (causal_mask_function, None),
    }
    found = ((getattr(masking_utils, name, None), name, given) for name, given in samples.items())
    return {make(*given).__code__: name for make, name, given in found if make is not None}


def pattern_of(pattern: dict[str, Any], make: Callable[[], Any], device: Any) -> MaskPattern | None:
    """The mask of a call of `attention_mask` as a pattern; None if it is not known to be one, or during tracing."""
    reach = _reach(pattern["mask_function"])
    batch, queries, keys = (pattern[name] for name in ("batch_size", "q_length", "kv_length"))
    first, first_key, mask = pattern["q_offset"], pattern["kv_offset"], pattern["attention_mask"]
    given = [x for x in (first, mask, *(reach or ())) if isinstance(x, Tensor)]
    if reach is None or torch.compiler.is_compiling() or any(is_traced(x) or x.device.type != "cpu" for x in given):
        return None  # reading a value on a GPU would synchronise
    make_of = functools.partial(MaskPattern.of, (batch, 1, queries, keys), device, make)
    if reach.sequences is not None or reach.positions is not None:
        bounds = None if mask is not None or queries != keys or first or first_key else _bounds(reach, batch, queries)
        if bounds is None:
            return None
        return make_of(left=reach.left, right=reach.right, keys=keys, padding=None, cu_seqlens=bounds)
    shift = int(first) - first_key - (keys - queries)  # of positions against the alignment of `attention`
    left, right = reach.left, reach.right
    if right is not None and right + shift < 0 and reach.right == 0:
        keys, shift = keys + shift, 0
    left, right = (None if left is None else left - shift), (None if right is None else right + shift)
    if keys < 1 or any(reach is not None and reach < 0 for reach in (left, right)):
        return None
    padding = None
    if mask is not None:
        padding = torch.nn.functional.pad(mask, (0, max(0, first_key + keys - mask.shape[1])))
        padding = padding[:, first_key : first_key + keys].bool()
        if padding.shape != (batch, keys):
            return None
        padding = None if bool(padding.all()) else padding
    return make_of(left=left, right=right, keys=keys, padding=padding, cu_seqlens=None)


def _bounds(reach: _Reach, batch: int, length: int) -> Tensor | None:
    """cu_seqlens of packed rows in order; None unless positions rise by one within each sequence.

    transformers 5.23 and later compute the mask function at positions, earlier releases at indices.
    """
    sequences, positions = reach.sequences, reach.positions
    if sequences is None or sequences.shape != (batch, length):
        return None
    if positions is not None and positions.shape != (batch, length):
        return None
    begins = torch.ones_like(sequences, dtype=torch.bool)  # where a sequence begins
    begins[:, 1:] = sequences.diff() != 0 if positions is None else positions.diff() != 1
    if not torch.equal(sequences - sequences[:, :1], begins.cumsum(1) - 1):
        return None
    starts = begins.flatten().nonzero().flatten()
    return torch.cat([starts, starts.new_full((1,), batch * length)]).int()
