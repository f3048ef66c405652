"""Every family of attention kernels on small inputs in the emulation; run under a sanitizer by test_sanitizers.py.

The argument is the schedule of the emulated threads. Results are compared with the torch backend with a loose
tolerance; the parity suite has the budgets.
"""

from __future__ import annotations

import os
import sys
from typing import NamedTuple

import torch

from transformer_kernels.backends import cuda as _extension
from transformer_kernels.ops.attention import _compiled, _torch, prepare

KERNELS = _compiled.Kernels.on(_extension)


class Case(NamedTuple):
    family: str
    dtype: torch.dtype
    width: int
    queries: int
    keys: int
    heads: tuple[int, int]  # of q and k
    everything: bool = False  # bias, window and dropout
    starts: list[int] | None = None  # of packed sequences


CASES = [
    Case("general", torch.float16, 64, 70, 133, (2, 1)),
    Case("general", torch.bfloat16, 40, 33, 70, (2, 2), everything=True),
    Case("general", torch.bfloat16, 160, 20, 40, (1, 1), everything=True),
    Case("general", torch.float32, 32, 40, 50, (2, 1), everything=True),
    Case("general", torch.bfloat16, 40, 150, 150, (2, 1), starts=[0, 20, 90, 90, 145]),
    Case("general", torch.float32, 32, 70, 70, (2, 2), everything=True, starts=[0, 33, 64]),
    Case("short", torch.bfloat16, 32, 64, 64, (2, 2)),
    Case("short", torch.float16, 64, 70, 100, (2, 1), everything=True),
    Case("sm90", torch.bfloat16, 64, 130, 200, (1, 1)),
    Case("sm90", torch.bfloat16, 64, 200, 200, (1, 1), starts=[0, 30, 150, 190]),
    Case("sm90_persistent", torch.bfloat16, 64, 150, 200, (4, 2)),
    Case("sm90_persistent", torch.float16, 128, 200, 200, (6, 1), starts=[0, 30, 150, 190]),
]
NONSENSE = ([5, 3, 1000, -7], [5, -(2**31)], [-(2**31), 2**31 - 1], [2**31 - 1], [90, 80, 70, 60, 50])


def random(*shape, dtype, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def use(family):
    """Use the kernels of a family, on their architecture."""
    _compiled.path = family
    os.environ["TRANSFORMER_KERNELS_EMULATE_ARCH"] = "90" if family.startswith("sm90") else "80"


def check_case(case):
    batch = 1 if case.starts else 2
    q = random(batch, case.heads[0], case.queries, case.width, dtype=case.dtype, seed=1)
    k, v = (random(batch, case.heads[1], case.keys, case.width, dtype=case.dtype, seed=seed) for seed in (2, 3))
    mask = torch.arange(case.keys) < torch.tensor([[case.keys], [case.keys // 2]])[:batch]
    bias = seed = window = None
    if case.everything:
        bias = random(1, case.heads[0], case.queries, case.keys, dtype=case.dtype, seed=4)
        seed, window = torch.tensor([1234]), case.keys // 2
    cu_seqlens = torch.tensor(case.starts, dtype=torch.int32) if case.starts else None
    dropout_p = 0.25 if case.everything else 0.0
    masks = {"key_padding_mask": mask, "attn_bias": bias, "cu_seqlens": cu_seqlens, "window": window}
    call = prepare(q, k, v, **masks, causal=True, dropout_p=dropout_p)._replace(seed=seed)
    use(case.family)
    result, want = KERNELS(call).forward(call), _torch.Kernels(call).forward(call)
    check(f"{case} forward", result, want)
    if case.family.startswith("sm90"):  # a forward kernel; its backward is the general one
        use("general")
    dout = random(*q.shape, dtype=case.dtype, seed=5)
    wanted = (True, True, True, case.everything and case.family != "short")  # that family has no gradient of a bias
    into = views_of_one_buffer(q, k) if case.starts else None
    gradients = KERNELS(call).backward(call, result, (dout, None), wanted, into)
    expected = _torch.Kernels(call).backward(call, want, (dout, None), wanted)
    check(f"{case} backward", gradients, expected)


def views_of_one_buffer(q, k):
    """Three gradients, adjacent in memory, with rows not aligned to 16 bytes, the last at the end of the buffer."""
    heads = [q.shape[1], k.shape[1], k.shape[1]]
    buffer = torch.zeros(q.shape[0], q.shape[2], sum(heads), q.shape[3] + 1, dtype=q.dtype)
    dq, dk, dv = buffer[..., 1:].transpose(1, 2).split(heads, dim=1)
    return dq, dk, dv


def check_nonsense(starts):
    """Invalid starts give undefined results, without accesses outside of the tensors."""
    q, k, v = (random(1, 1, 100, 64, dtype=torch.bfloat16, seed=seed) for seed in (1, 2, 3))
    cu_seqlens = torch.tensor(starts, dtype=torch.int32)
    call = prepare(q, k, v, causal=True, scale=0.125)
    call = call._replace(scores=call.scores._replace(cu_seqlens=cu_seqlens))
    for family in ("general", "sm90"):
        use(family)
        result = KERNELS(call).forward(call)
    use("general")
    KERNELS(call).backward(call, result, (result.out, None), (True, True, True, False))


def check(name, ours, theirs):
    for got, want in zip(ours, theirs, strict=True):
        if got is not None and want is not None:
            torch.testing.assert_close(got.double(), want.double(), atol=0.08, rtol=0.08, msg=lambda m: f"{name}: {m}")


def main(schedule):
    torch.set_num_threads(1)
    module = _extension.load()
    module.set_schedule(schedule, 1)
    for case in CASES:
        check_case(case)
    for starts in NONSENSE:
        check_nonsense(starts)
    print("attention kernels ran", module.counters())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
