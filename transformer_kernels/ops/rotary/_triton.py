"""Rotary positions in Triton: q and k in one launch."""

import triton
import triton.language as tl

from transformer_kernels.backends import triton as _triton
from transformer_kernels.backends.triton_language import from_fp32, rotated, to_fp32
from transformer_kernels.ops.rotary import Heads, RotaryCall, RotaryKernels

BYTES = 2048
"""Pairs per tile, on four warps; twice as many spill in float32 on sm_80."""


@triton.jit
def rotate_rows(
    x, out, cos, sin, row, half, D, stride_row, stride_out, inside, within,
    INVERSE: tl.constexpr, INTERLEAVED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rotate one head's rows x [ROWS, D] by cos and sin [ROWS, BLOCK]; columns after the pairs are copied.

    INVERSE rotates by the negative angles; `out` may be x.
    """
    pair = tl.arange(0, BLOCK)[None, :]
    element = out.dtype.element_ty
    if INVERSE:
        sin = -sin
    if INTERLEAVED:  # load both columns of all pairs together, in whole vectors
        column = tl.arange(0, 2 * BLOCK)[None, :]
        both = within & (column < 2 * half)
        loaded = to_fp32(tl.load(x + row * stride_row + column, mask=both, other=0.0))  # [ROWS, 2 * BLOCK]
        a, b = tl.split(tl.reshape(loaded, (ROWS, BLOCK, 2)))
        a, b = rotated(a, b, cos, sin)
        both_rotated = tl.reshape(tl.join(a, b), (ROWS, 2 * BLOCK))
        tl.store(out + row * stride_out + column, from_fp32(both_rotated, element), mask=both)
    else:
        a = to_fp32(tl.load(x + row * stride_row + pair, mask=inside, other=0.0))  # [ROWS, BLOCK]
        b = to_fp32(tl.load(x + row * stride_row + half + pair, mask=inside, other=0.0))
        a, b = rotated(a, b, cos, sin)
        tl.store(out + row * stride_out + pair, from_fp32(a, element), mask=inside)
        tl.store(out + row * stride_out + half + pair, from_fp32(b, element), mask=inside)
    for start in range(2 * half, D, BLOCK):
        rest = within & (start + pair < D)
        kept = tl.load(x + row * stride_row + start + pair, mask=rest, other=0.0)
        tl.store(out + row * stride_out + start + pair, kept, mask=rest)


@triton.jit(do_not_specialize=["L", "Hq", "Hk"])
def rotary_kernel(
    q, k, cos, sin, q_out, k_out, Hq, Hk, L, D, half,
    stride_qb, stride_qh, stride_ql, stride_kb, stride_kh, stride_kl,
    stride_qob, stride_qoh, stride_qol, stride_kob, stride_koh, stride_kol, stride_table,
    INVERSE: tl.constexpr, INTERLEAVED: tl.constexpr, VECTOR: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program owns ROWS tokens of one head, of q or, from head Hq on, of k; k may be None.

    q (B, Hq, L, D), k (B, Hk, L, D), cos and sin (1 or B, L, half).
    """
    half = half // VECTOR * VECTOR  # a multiple of VECTOR: both halves of a row are aligned
    D = D // VECTOR * VECTOR
    tiles = tl.cdiv(L, ROWS)
    program = tl.program_id(0).to(tl.int64)
    head = program // tiles % (Hq + Hk)
    batch = program // tiles // (Hq + Hk)
    row = program % tiles * ROWS + tl.arange(0, ROWS)[:, None]  # [ROWS, 1]
    pair = tl.arange(0, BLOCK)[None, :]
    within = row < L
    inside = within & (pair < half)
    at = batch * stride_table + row * half + pair
    c = to_fp32(tl.load(cos + at, mask=inside, other=0.0))  # [ROWS, BLOCK]
    s = to_fp32(tl.load(sin + at, mask=inside, other=0.0))
    if head < Hq:
        rotate_rows(
            q + batch * stride_qb + head * stride_qh, q_out + batch * stride_qob + head * stride_qoh,
            c, s, row, half, D, stride_ql, stride_qol, inside, within, INVERSE, INTERLEAVED, ROWS, BLOCK,
        )  # fmt: skip
    if k is not None:  # noqa: SIM102 -- this condition is compile-time, the next is not
        if head >= Hq:
            rotate_rows(
                k + batch * stride_kb + (head - Hq) * stride_kh, k_out + batch * stride_kob + (head - Hq) * stride_koh,
                c, s, row, half, D, stride_kl, stride_kol, inside, within, INVERSE, INTERLEAVED, ROWS, BLOCK,
            )  # fmt: skip


class Kernels(RotaryKernels):
    """Rotary positions by Triton for calls of one layout."""

    def bound(self, call: RotaryCall, heads: Heads, out: Heads, inverse: bool) -> _triton.Launch:
        batch, count, length, width = heads.q.shape
        kv_heads, half = 0 if heads.k is None else heads.k.shape[1], call.cos.shape[-1]
        block = max(8, _triton.next_power_of_2(half))
        rows = max(1, BYTES // (block * heads.q.element_size()))
        grid = (_triton.ceil_div(length, rows) * (count + kv_heads) * batch,)
        table = 0 if len(call.cos) == 1 else call.cos.stride(0)
        numbers = (count, kv_heads, length, width, half, *heads.strides(), *out.strides(), table)
        constants = (inverse, call.interleaved, _triton.vector_width(2, half, width), rows, block)
        return _triton.Launch(rotary_kernel, grid, numbers, constants, num_warps=4)
