"""The emulated tensor cores against mmasim, a model that was checked bit for bit on GPUs."""

from __future__ import annotations

import os
import subprocess

import pytest
import torch
from torch import Tensor

from tests.emulation.programs import program

FRAGMENTS = 8192  # of 16 x 8 sums: 2^20
DEPTH = {"float16": 16, "bfloat16": 16, "tf32": 8}
DTYPE = {"float16": torch.float16, "bfloat16": torch.bfloat16, "tf32": torch.float32}
MMASIM = {
    "float16": "m16n8k16.f32.f16.f16.f32",
    "bfloat16": "m16n8k16.f32.bf16.bf16.f32",
    "tf32": "m16n8k8.f32.tf32.tf32.f32",
}


def operand(dtype: torch.dtype, *shape: int) -> Tensor:
    """A quarter each: normal numbers, a wide range with zeros, every bit pattern that is finite, and small integers."""
    normal, wide = torch.randn(shape), torch.randn(shape) * torch.exp2(torch.randint(-20, 15, shape).float())
    wide[torch.rand(shape) < 0.1] = 0.0
    whole = torch.int32 if dtype == torch.float32 else torch.int16
    limits = torch.iinfo(whole)
    patterns = torch.randint(limits.min, limits.max, shape, dtype=whole).view(dtype).float()
    patterns = patterns.masked_fill(~patterns.isfinite(), 1.0)
    kinds = torch.stack([normal, wide, patterns, torch.randint(-9, 10, shape).float()])
    return kinds.gather(0, (torch.arange(shape[0]) % 4).view(1, -1, 1, 1).expand(1, *shape))[0].to(dtype)


def words(values: Tensor) -> bytes:
    if values.dtype == torch.float32:
        return values.numpy().tobytes()
    return (values.view(torch.int16).int() & 0xFFFF).numpy().tobytes()


def multiply(type_: str, architecture: int, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    result = subprocess.run(
        [str(program("tensor_cores", "plain")), type_, str(len(a))],
        input=b"".join(map(words, (a, b, c))),
        env={**os.environ, "TRANSFORMER_KERNELS_EMULATE_ARCH": str(architecture)},
        capture_output=True,
        check=True,
    )
    return torch.frombuffer(bytearray(result.stdout), dtype=torch.float32).view(c.shape)


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "name"), [(80, "Ampere"), (90, "Hopper")])
@pytest.mark.parametrize("type_", DEPTH)
def test_every_sum_has_the_bits_of_the_hardware(type_: str, architecture: int, name: str) -> None:
    simulator = pytest.importorskip("mmasim.nv_ptx", reason="needs mmasim").MMA(name, MMASIM[type_])
    torch.manual_seed(architecture)
    dtype, depth = DTYPE[type_], DEPTH[type_]
    a, b = operand(dtype, FRAGMENTS, 16, depth), operand(dtype, FRAGMENTS, depth, 8)
    c = operand(torch.float32, FRAGMENTS, 16, 8)
    c[::3] = -(a[::3].float() @ b[::3].float())  # much is cancelled
    for tensor in (a, b, c):
        tensor[7::512, 3, 5] = float("inf")
        tensor[9::1024, 3, 5] = float("nan")
    got = multiply(type_, architecture, a, b, c)
    left, right = a[:, :, None, :].expand(-1, -1, 8, -1), b.transpose(1, 2)[:, None].expand(-1, 16, -1, -1)
    chunks = [slice(start, start + 512) for start in range(0, FRAGMENTS, 512)]
    want = torch.cat([simulator.dpa(left[chunk].clone(), right[chunk].clone(), c[chunk].clone()) for chunk in chunks])
    different = got.view(torch.int32) != want.view(torch.int32)
    assert not different.any(), f"{int(different.sum())} of {different.numel()} sums differ"
