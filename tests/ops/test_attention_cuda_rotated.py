"""Queries and keys rotated in shared memory by the CUDA attention kernels: bitwise equal to rotated copies."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from python_ref.ops import rotary_table
from tests.support.arguments import dtype_id
from tests.support.parity import require
from transformer_kernels.backends import cuda
from transformer_kernels.ops.attention import _compiled, prepare
from transformer_kernels.ops.attention._common import Angles
from transformer_kernels.ops.rotary import Heads, RotaryCall
from transformer_kernels.ops.rotary._compiled import Kernels

KERNELS = _compiled.Kernels.on(cuda)
TENSOR_CORES = (torch.float16, torch.bfloat16)
CASES: dict[str, tuple[str, tuple[torch.dtype, ...], dict[str, Any]]] = {
    "plain": ("general", TENSOR_CORES, {"width": 64, "rotated": 64, "causal": True}),
    "padded": ("general", TENSOR_CORES, {"width": 128, "rotated": 96, "length": 70, "padded": True, "dropout_p": 0.2}),
    "packed": ("general", TENSOR_CORES, {"width": 40, "rotated": 20, "starts": [0, 20, 70, 70, 95], "batch": 1}),
    "window": ("general", TENSOR_CORES, {"width": 32, "rotated": 16, "window": 40, "causal": True, "softcap": 5.0}),
    "wide": ("general", TENSOR_CORES, {"width": 256, "rotated": 256, "length": 40, "batch": 1}),
    "float32": ("general", (torch.float32,), {"width": 64, "rotated": 24, "length": 70, "padded": True}),
    "float32_wide": ("general", (torch.float32,), {"width": 256, "rotated": 256, "length": 20, "batch": 1}),
    "hopper": ("sm90", TENSOR_CORES, {"width": 64, "rotated": 64, "length": 150, "causal": True}),
    "hopper_padded": (
        "sm90",
        TENSOR_CORES,
        {"width": 128, "rotated": 100, "length": 140, "padded": True, "softcap": 5.0},
    ),
    "hopper_packed": (
        "sm90",
        TENSOR_CORES,
        {"width": 64, "rotated": 32, "length": 280, "batch": 1, "starts": [0, 20, 150, 270]},
    ),
    "hopper_persistent": ("sm90_persistent", TENSOR_CORES, {"width": 64, "rotated": 40, "length": 150, "causal": True}),
    "hopper_wide": ("sm90", TENSOR_CORES[1:], {"width": 256, "rotated": 256, "length": 70, "batch": 1}),
    "hopper_filled_up": ("sm90", TENSOR_CORES[:1], {"width": 96, "rotated": 96, "length": 70, "causal": True}),
    "short": ("short", TENSOR_CORES, {"width": 64, "rotated": 64, "causal": True}),
    "short_padded": (
        "short",
        TENSOR_CORES,
        {"width": 24, "rotated": 12, "length": 70, "padded": True, "dropout_p": 0.2},
    ),
    "short_long": ("short", TENSOR_CORES, {"width": 64, "rotated": 32, "length": 150, "batch": 1, "window": 50}),
}


@pytest.fixture(autouse=True)
def _cuda_backend(device):
    require("attention", "cuda", device, torch.float32)


def make(dtype, device, length, width, batch, padded, starts, **options):
    """Two query heads for each of two key heads."""
    generator = torch.Generator().manual_seed(length + width)
    x = torch.randn(batch, length, 8, width, generator=generator).to(device, dtype).transpose(1, 2)
    mask = torch.arange(length) < torch.tensor([[length], [length // 2]]) if padded else None
    call = prepare(
        x[:, :4],
        x[:, 4:6],
        x[:, 6:],
        key_padding_mask=None if mask is None else mask.to(device),
        cu_seqlens=None if starts is None else torch.tensor(starts, dtype=torch.int32, device=device),
        **options,
    )
    return call if call.seed is None else call._replace(seed=torch.tensor([7], device=device))


def rotated(x, angles, inverse=False):
    out = Heads(torch.empty_like(x), None)
    call = RotaryCall(x, x, *angles)
    Kernels.on(cuda)(call).rotate(call, Heads(x, None), out, inverse=inverse)
    return out.q


def forward_and_backward(call, angles):
    result = KERNELS(call).forward(call, angles)
    dout = torch.randn(result.out.shape, generator=torch.Generator().manual_seed(1)).to(result.out)
    return result, KERNELS(call).backward(call, result, (dout, None), (True, True, True, False), angles=angles)


def copied(call, angles):
    """The same by rotary's own kernel before and after attention without angles."""
    on_copies = call._replace(q=rotated(call.q, angles), k=rotated(call.k, angles))
    result, (dq, dk, dv, _) = forward_and_backward(on_copies, None)
    assert dq is not None and dk is not None
    return result, (rotated(dq, angles, inverse=True), rotated(dk, angles, inverse=True), dv)


@pytest.mark.parametrize(
    ("case", "dtype", "interleaved"),
    [
        pytest.param(
            case,
            dtype,
            interleaved,
            id=f"{case}-{dtype_id(dtype)}-{'interleaved' if interleaved else 'halves'}",
            marks=[pytest.mark.slow] * (interleaved != number % 2 or dtype is not dtypes[0]),
        )
        for number, (case, (_, dtypes, _)) in enumerate(CASES.items())
        for dtype in dtypes
        for interleaved in (False, True)
    ],
)
def test_equals_rotated_copies(case, dtype, interleaved, device, monkeypatch):
    path, _, options = CASES[case]
    monkeypatch.setattr(_compiled, "path", path)
    monkeypatch.setenv("TRANSFORMER_KERNELS_EMULATE_ARCH", "90" if path.startswith("sm90") else "80")
    given = {"length": 100, "batch": 2, "padded": False, "starts": None, **options}
    width = given.pop("rotated")
    call = make(dtype, device, **given)
    batch, _, length, _ = call.q.shape
    places = torch.arange(length) + 30 * torch.arange(batch)[:, None]  # each sequence begins elsewhere
    cos, sin = (table.to(device) for table in rotary_table(places, width))
    result, gradients = forward_and_backward(call, Angles(cos, sin, interleaved))
    wanted, wanted_gradients = copied(call, Angles(cos, sin, interleaved))
    for name, got, want in zip(("out", "lse", "statistics"), result, wanted, strict=True):
        assert torch.equal(got, want), name
    for name, got, want in zip(("dq", "dk", "dv"), gradients, wanted_gradients, strict=False):
        assert got is not None and torch.equal(got, want), name
