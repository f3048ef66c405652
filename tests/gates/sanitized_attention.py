"""Every family of attention kernels, small, in the emulation; run under a sanitizer by test_sanitizers.py.

Numbers are compared loosely with the torch backend: the sanitizer judges here, the parity suite has the budgets.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from transformer_kernels import _extension
from transformer_kernels.ops.attention import _cuda, _torch

# (family, dtype, head dimension, queries, keys, heads of q and k, everything at once: masks, bias, window, dropout)
CASES = [
    ("general", torch.float16, 64, 70, 133, (2, 1), False),
    ("general", torch.bfloat16, 40, 33, 70, (2, 2), True),
    ("general", torch.bfloat16, 160, 20, 40, (1, 1), True),
    ("general", torch.float32, 32, 40, 50, (2, 1), True),
    ("short", torch.bfloat16, 32, 64, 64, (2, 2), False),
    ("short", torch.float16, 64, 70, 100, (2, 1), True),
    ("sm90", torch.bfloat16, 64, 130, 200, (1, 1), False),
]


def random(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check_case(
    family: str, dtype: torch.dtype, width: int, queries: int, keys: int, heads: tuple[int, int], everything: bool
) -> None:
    q = random(2, heads[0], queries, width, dtype=dtype, seed=1)
    k, v = (random(2, heads[1], keys, width, dtype=dtype, seed=seed) for seed in (2, 3))
    mask = torch.arange(keys) < torch.tensor([[keys], [keys // 2]])
    bias = random(1, heads[0], queries, keys, dtype=dtype, seed=4) if everything else None
    seed = torch.tensor([1234]) if everything else None
    options: tuple[Any, ...] = (True, keys // 2 if everything else None, 0.25 if everything else 0.0, width**-0.5)
    arguments = (mask, bias, seed, *options)
    _cuda.path = family
    out, lse = _cuda.forward(q, k, v, *arguments)
    want = _torch.forward(q, k, v, *arguments)
    check(f"{family} forward", (out, lse), want)
    if family == "sm90":  # a forward kernel; its backward is the general one
        _cuda.path = "general"
    dout = random(*q.shape, dtype=dtype, seed=5)
    bias_needs_grad = everything and family != "short"  # that family has no gradient of a bias
    gradients = _cuda.backward(dout, None, q, k, v, out, lse, *arguments, bias_needs_grad)
    check(f"{family} backward", gradients, _torch.backward(dout, None, q, k, v, *want, *arguments, bias_needs_grad))


def check(name: str, ours: tuple[Tensor | None, ...], theirs: tuple[Tensor | None, ...]) -> None:
    for got, want in zip(ours, theirs, strict=True):
        if got is not None and want is not None:
            torch.testing.assert_close(got.double(), want.double(), atol=0.08, rtol=0.08, msg=lambda m: f"{name}: {m}")


def main() -> None:
    torch.set_num_threads(1)
    module = _extension.load()
    for number, kind in enumerate(("one_warp_ahead", "random")):
        module.set_schedule(kind, number)
        for case in CASES:
            check_case(*case)
    print("attention kernels ran", module.counters())


if __name__ == "__main__":
    sys.exit(main())
