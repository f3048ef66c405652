"""Triton kernels that are independent of this package, and calls of `run_ptx` on them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from tests.support.ptx.launch import run_ptx


@triton.jit
def add_kernel(x, y, out, n, BLOCK: tl.constexpr):
    """One program owns BLOCK elements."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    tl.store(out + at, tl.load(x + at, mask=inside, other=0.0) + tl.load(y + at, mask=inside, other=0.0), mask=inside)


@triton.jit
def add_without_mask_kernel(x, y, out, n, BLOCK: tl.constexpr):
    """The same with its bug: the last program writes behind the tensors."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at) + tl.load(y + at))


@triton.jit
def overlapping_kernel(x, out, n, BLOCK: tl.constexpr):
    """Neighbouring programs write the element between them."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK * 2)
    inside = at < n
    tl.store(out + at, tl.load(x + at, mask=inside, other=0.0), mask=inside)


@triton.jit
def softmax_kernel(x, out, row_stride, columns, BLOCK: tl.constexpr):
    """One program owns a row."""
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    values = tl.load(x + row * row_stride + at, mask=at < columns, other=float("-inf"))
    powers = tl.exp(values - tl.max(values, 0))
    tl.store(out + row * columns + at, powers / tl.sum(powers, 0), mask=at < columns)


@triton.jit
def layer_norm_kernel(x, weight, bias, out, columns, eps, BLOCK: tl.constexpr):
    """One program owns a row."""
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    inside = at < columns
    values = tl.load(x + row * columns + at, mask=inside, other=0.0).to(tl.float32)
    centred = tl.where(inside, values - tl.sum(values, 0) / columns, 0.0)
    rstd = tl.rsqrt(tl.sum(centred * centred, 0) / columns + eps)
    scaled = centred * rstd * tl.load(weight + at, mask=inside, other=0.0) + tl.load(bias + at, mask=inside, other=0.0)
    tl.store(out + row * columns + at, scaled, mask=inside)


@triton.jit
def matmul_kernel(a, b, c, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """One program owns a tile [BLOCK_M, BLOCK_N] of c."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        of_a = (rows[:, None] < M) & (depth[None, :] + k < K)
        of_b = (depth[:, None] + k < K) & (columns[None, :] < N)
        left = tl.load(a + rows[:, None] * K + depth[None, :] + k, mask=of_a, other=0.0)
        right = tl.load(b + (depth[:, None] + k) * N + columns[None, :], mask=of_b, other=0.0)
        total = tl.dot(left, right, total)
    of_c = (rows[:, None] < M) & (columns[None, :] < N)
    tl.store(c + rows[:, None] * N + columns[None, :], total.to(c.dtype.element_ty), mask=of_c)


@triton.jit
def described_matmul_kernel(a, b, c, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """The same by tensor descriptors: no masks, for what is outside is zero."""
    row, column = tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        total = tl.dot(a.load([row, k]), b.load([k, column]), total)
    c.store([row, column], total.to(c.dtype))


@triton.jit
def count_kernel(x, counts, n, BLOCK: tl.constexpr):
    """One program owns BLOCK elements, and adds how many are positive to the one counter."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    positive = (tl.load(x + at, mask=at < n, other=0.0) > 0).to(tl.int32)
    tl.atomic_add(counts, tl.sum(positive, 0), sem="relaxed")


@triton.jit
def locked_kernel(x, total, lock, BLOCK: tl.constexpr):
    """One program adds its block to the one total, which a lock protects."""
    at = tl.arange(0, BLOCK)
    own = tl.load(x + tl.program_id(0) * BLOCK + at)
    while tl.atomic_cas(lock, 0, 1) == 1:
        pass
    tl.store(total + at, tl.load(total + at) + own)
    tl.debug_barrier()
    tl.atomic_xchg(lock, 0)


def add(target, kernel="add_kernel", **options):
    x, y, out = torch.randn(1000), torch.randn(1000), torch.full((1000,), float("nan"))
    args = {"x": x, "y": y, "out": out, "n": 1000, "BLOCK": 256}
    run_ptx(globals()[kernel], (4,), args, target, **options)
    return out, x + y


def overlapping(target):
    args = {"x": torch.randn(1000), "out": torch.empty(1000), "n": 1000, "BLOCK": 256}
    return run_ptx(overlapping_kernel, (4,), args, target)


def softmax(target):
    x, out = torch.randn(5, 300), torch.full((5, 300), float("nan"))
    args = {"x": x, "out": out, "row_stride": 300, "columns": 300, "BLOCK": 512}
    run_ptx(softmax_kernel, (5,), args, target)
    return out, torch.softmax(x, -1)


def layer_norm(target):
    x, weight, bias = torch.randn(5, 200).half(), torch.randn(200).half(), torch.randn(200).half()
    out = torch.full_like(x, float("nan"))
    args = {"x": x, "weight": weight, "bias": bias, "out": out, "columns": 200, "eps": 1e-5, "BLOCK": 256}
    run_ptx(layer_norm_kernel, (5,), args, target)
    return out, torch.nn.functional.layer_norm(x.float(), (200,), weight.float(), bias.float()).half()


def matmul(target, dtype, **options):
    a, b = torch.randn(100, 144).to(dtype), torch.randn(144, 80).to(dtype)
    c = torch.full((100, 80), float("nan"), dtype=dtype)
    args = {"a": a, "b": b, "c": c, "M": 100, "N": 80, "K": 144, "BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 32}
    run_ptx(matmul_kernel, (2, 2), args, target, **options)
    return c, (a.double() @ b.double()).to(dtype)


def described_matmul(target, dtype, **options):
    a, b = torch.randn(100, 144).to(dtype), torch.randn(144, 80).to(dtype)
    c = torch.full((100, 80), float("nan"), dtype=dtype)
    blocks = {"a": (a, [64, 32]), "b": (b, [32, 64]), "c": (c, [64, 64])}
    described = {name: TensorDescriptor.from_tensor(tensor, block) for name, (tensor, block) in blocks.items()}
    args = {**described, "K": 144, "BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 32}
    run_ptx(described_matmul_kernel, (2, 2), args, target, **options)
    return c, (a.double() @ b.double()).to(dtype)


def count(target):
    x, counts = torch.randn(1000), torch.zeros(1, dtype=torch.int32)
    run_ptx(count_kernel, (4,), {"x": x, "counts": counts, "n": 1000, "BLOCK": 256}, target)
    return counts, (x > 0).sum(dtype=torch.int32)[None]


def locked(target, races=False):
    x, total, lock = torch.randn(6, 256), torch.zeros(256), torch.zeros(1, dtype=torch.int32)
    run_ptx(locked_kernel, (6,), {"x": x, "total": total, "lock": lock, "BLOCK": 256}, target, races=races)
    assert lock.item() == 0
    return total, x.sum(0)
