"""Checks that Triton's interpreter lacks: out-of-bounds accesses, unwritten outputs, dependence on program order.

Under `hardened(seed)` every CPU tensor of `torch.empty` and `torch.empty_like` is filled with NaN and surrounded by two
guard bands of a NaN with a recognisable payload: an out-of-bounds read poisons the result, an out-of-bounds write is
detected at the end. The programs of every launch run in a random order.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import random
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

import numpy as np
import torch
from torch import Tensor

GUARD_ELEMENTS = 256
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
SENTINEL = {torch.float16: 0x7EAD, torch.bfloat16: 0x7FAD, torch.float32: 0x7FC0DEAD, torch.float64: 0x7FF8DEADDEADDEAD}
"""A quiet NaN that arithmetic does not produce; other types get 0x5A in each byte."""


@dataclass
class GuardedBuffer:
    """A tensor's storage with its two bands."""

    storage: Tensor
    span: int

    def check(self):
        """Fail if a band was written to."""
        sentinel = _sentinel(self.storage.dtype)
        bits = self.storage.view(BITS[self.storage.element_size()])
        for name, band in (("before", bits[:GUARD_ELEMENTS]), ("after", bits[GUARD_ELEMENTS + self.span :])):
            touched = (band != sentinel).nonzero().flatten().tolist()
            assert not touched, (
                f"a kernel wrote {name} a buffer of {self.span} {self.storage.dtype} elements, at {touched[:8]}"
            )


def guarded(template, buffers, fill=False):
    """A tensor of the template's size and strides between guard bands; with its values if `fill`, else poisoned."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(template.size(), template.stride(), strict=True))
    bits = BITS[template.element_size()]
    storage = _empty(span + 2 * GUARD_ELEMENTS, dtype=bits).fill_(_sentinel(template.dtype)).view(template.dtype)
    buffers.append(GuardedBuffer(storage, span))
    tensor = _empty(0, dtype=template.dtype)
    tensor.set_(storage.untyped_storage(), GUARD_ELEMENTS, template.size(), template.stride())
    return tensor.copy_(template.detach()) if fill else tensor


@contextmanager
def hardened(seed):
    """Guard, poison and shuffle within the block; check the bands at its end."""
    buffers: list[GuardedBuffer] = []
    with (
        mock.patch("torch.empty", functools.partial(_allocate, _empty, buffers)),
        mock.patch("torch.empty_like", functools.partial(_allocate, _empty_like, buffers)),
        shuffled_programs(seed),
    ):
        yield buffers
    for buffer in buffers:
        buffer.check()


@contextmanager
def shuffled_programs(seed):
    """Run the programs of every interpreted launch in an order drawn from `seed`."""
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    set_dimensions, set_index = builder.set_grid_dim, builder.set_grid_idx
    generator = random.Random(seed)
    order: list[tuple[int, int, int]] = []

    def shuffle(x, y, z):
        set_dimensions(x, y, z)
        order[:] = [(i, j, k) for i in range(x) for j in range(y) for k in range(z)]
        generator.shuffle(order)

    with (
        mock.patch.object(builder, "set_grid_dim", shuffle),
        mock.patch.object(builder, "set_grid_idx", lambda x, y, z: set_index(*order.pop())),
    ):
        yield


def quicken():
    """Remove redundant work from the interpreter.

    It patches all of triton.language at every call of a device function; within a launch only unpatched modules need
    that. It computes a check for integer overflow and ignores it. It recreates the shape of every tensor, and the table
    of numpy types at every use.
    """
    from triton.runtime import interpreter

    if hasattr(interpreter._patch_lang, "quickened") or not hasattr(interpreter, "_LangPatchScope"):
        return  # done already, or another version of the interpreter
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    _sum_in_order(builder)
    type(builder).create_maxnumf = lambda self, a, b: self.binary_op(a, b, np.fmax)  # of a number and NaN, on a GPU too
    type(builder).create_minnumf = lambda self, a, b: self.binary_op(a, b, np.fmin)
    numpy_type = functools.cache(interpreter._get_np_dtype)
    interpreter._get_np_dtype = lambda type: numpy_type(interpreter.tl.uint64 if type.scalar.is_ptr() else type.scalar)
    _share_shapes()
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: set[int] = set()
    nothing = interpreter._LangPatchScope()

    def patch_once(function):
        modules = _languages_of(function)
        if patched and modules <= patched:
            return nothing
        scope = patch(function)
        patched.update(modules)
        return scope

    def launch_anew(*args, **kwargs):
        patched.clear()
        try:
            return launch(*args, **kwargs)
        finally:
            patched.clear()

    patch_once.quickened = True  # type: ignore[attr-defined]
    interpreter._patch_lang = patch_once
    interpreter.GridExecutor.__call__ = launch_anew


def _sum_in_order(builder):
    """Sum float32 products like a GPU's multiply-adds, in order from the accumulator. The order of numpy's library
    depends on transposition and processor, so that backward would recompute other scores than forward."""
    whole = type(builder).create_dot

    def create_dot(self, a, b, d, *options):
        if a.data.dtype != np.float32:
            return whole(self, a, b, d, *options)
        left, right, total = a.data.astype(np.float64), b.data.astype(np.float64), d.data
        for i in range(left.shape[-1]):  # the product of two 24-bit numbers is exact
            total = (left[..., :, i, None] * right[..., i, None, :] + total).astype(np.float32)
        return type(d)(total, d.dtype.scalar)

    type(builder).create_dot = create_dot


def _share_shapes():
    """Share the shape tuple, which is never written, between tensors and block types."""
    from triton.language import core

    @functools.cache
    def shape_of_type(sizes):
        shape = core.tuple(list(sizes))
        return shape, core.validate_block_shape(sizes), str(shape)

    @functools.cache
    def shape_of_tensor(sizes):
        return core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(math.prod(sizes))

    def make_type(self, element_ty, shape):
        self.element_ty = element_ty
        self.shape, self.numel, name = shape_of_type(tuple([getattr(size, "value", size) for size in shape]))
        self.name = f"<{name}, {element_ty}>"

    def make_tensor(self, handle, type):
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shape_of_tensor(tuple(type.shape) if type.is_block() else ())

    core.block_type.__init__, core.tensor.__init__ = make_type, make_tensor


@functools.cache
def _languages_of(function):
    """The modules of triton.language imported by the function's module."""
    import triton.language as language

    known = {id(value) for value in function.__globals__.values()}
    return frozenset(known & {id(language), id(language.core)})


_empty, _empty_like = torch.empty, torch.empty_like


def _allocate(original, buffers, *args, **kwargs):
    template = original(*args, **kwargs)
    if type(template) is not torch.Tensor or template.device.type != "cpu" or not template.numel():
        return template
    if template.dtype not in SENTINEL or template.layout != torch.strided or template.requires_grad:
        return template
    return guarded(template, buffers)


def _sentinel(dtype):
    return SENTINEL.get(dtype) or int.from_bytes(b"\x5a" * dtype.itemsize, "little")
