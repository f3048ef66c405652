"""The emulated tensor cores against mmasim, a model that was checked bit for bit on GPUs."""

import os
import subprocess

import pytest
import torch

from tests.emulation.programs import program

DEPTH = {"float16": 16, "bfloat16": 16, "tf32": 8}
DTYPE = {"float16": torch.float16, "bfloat16": torch.bfloat16, "tf32": torch.float32}
PTX = {"float16": "k16.f32.f16.f16", "bfloat16": "k16.f32.bf16.bf16", "tf32": "k8.f32.tf32.tf32"}
SUMS = {"mma": 2**20, "wgmma": 2**18}
CASES = [
    (75, "mma", "float16"),
    *((80, "mma", type_) for type_ in DTYPE),
    *((90, "mma", type_) for type_ in DTYPE),
    *((90, "wgmma", type_) for type_ in ("float16", "bfloat16")),
]


def operand(dtype, *shape):
    """A quarter each: normal numbers, a wide range with zeros, every bit pattern that is finite, and small integers."""
    normal, wide = torch.randn(shape), torch.randn(shape) * torch.exp2(torch.randint(-20, 15, shape).float())
    wide[torch.rand(shape) < 0.1] = 0.0
    whole = torch.int32 if dtype == torch.float32 else torch.int16
    limits = torch.iinfo(whole)
    patterns = torch.randint(limits.min, limits.max, shape, dtype=whole).view(dtype).float()
    patterns = patterns.masked_fill(~patterns.isfinite(), 1.0)
    kinds = torch.stack([normal, wide, patterns, torch.randint(-9, 10, shape).float()])
    return kinds.gather(0, (torch.arange(shape[0]) % 4).view(1, -1, 1, 1).expand(1, *shape))[0].to(dtype)


def words(values):
    if values.dtype == torch.float32:
        return values.numpy().tobytes()
    return (values.view(torch.int16).int() & 0xFFFF).numpy().tobytes()


def multiply(instruction, type_, architecture, a, b, c):
    result = subprocess.run(
        [str(program("tensor_cores", "plain")), instruction, type_, str(len(a))],
        input=b"".join(map(words, (a, b, c))),
        env={**os.environ, "TRANSFORMER_KERNELS_EMULATE_ARCH": str(architecture)},
        capture_output=True,
        check=True,
    )
    return torch.frombuffer(bytearray(result.stdout), dtype=torch.float32).view(c.shape)


def simulate(instruction, type_, architecture, a, b, c):
    mmasim = pytest.importorskip("mmasim.nv_ptx", reason="needs mmasim")
    name = {75: "Turing", 80: "Ampere", 90: "Hopper"}[architecture]
    if architecture == 75:  # two products of depth 8
        simulator, half = mmasim.MMA(name, "m16n8k8.f32.f16.f16.f32"), a.shape[2] // 2
        c = products(simulator, a[..., :half], b[:, :half], c)
        return products(simulator, a[..., half:], b[:, half:], c)
    if instruction == "mma":
        simulator = mmasim.MMA(name, f"m16n8{PTX[type_]}.f32")
    else:
        simulator = mmasim.WGMMA(name, f"m64n64{PTX[type_]}")
    return products(simulator, a, b, c)


def products(simulator, a, b, c):
    rows, columns = c.shape[1:]
    left, right = a[:, :, None].expand(-1, -1, columns, -1), b.transpose(1, 2)[:, None].expand(-1, rows, -1, -1)
    parts = zip(*(tensor.split(2**16 // c[0].numel()) for tensor in (left, right, c)), strict=True)
    return torch.cat([simulator.dpa(*(tensor.clone() for tensor in part)) for part in parts])


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "instruction", "type_"), CASES)
def test_every_sum_has_the_bits_of_the_hardware(architecture, instruction, type_):
    torch.manual_seed(architecture)
    dtype, depth = DTYPE[type_], DEPTH[type_]
    rows, columns = (16, 8) if instruction == "mma" else (64, 64)
    fragments = SUMS[instruction] // (rows * columns)
    a, b = operand(dtype, fragments, rows, depth), operand(dtype, fragments, depth, columns)
    c = operand(torch.float32, fragments, rows, columns)
    c[::3] = -(a[::3].float() @ b[::3].float())  # much is cancelled
    for tensor in (a, b, c):
        tensor[7 :: fragments // 16, 3, 5] = float("inf")
        tensor[9 :: fragments // 8, 3, 5] = float("nan")
    call = instruction, type_, architecture, a, b, c
    got, want = multiply(*call), simulate(*call)
    different = got.view(torch.int32) != want.view(torch.int32)
    assert not different.any(), f"{int(different.sum())} of {different.numel()} sums differ"
