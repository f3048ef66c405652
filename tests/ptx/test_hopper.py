"""In the gates: the Hopper forward kernel by the PTX that nvcc makes for sm_90a, and bugs planted in it.

mbarriers, tensor copies, named barriers, registers that move between warp groups, and wgmma from nvcc.
"""

import itertools

import pytest
import torch

from tests.support.day import in_turn
from tests.support.ptx.cases import problems
from tests.support.ptx.hopper import CALLS, VARIANTS, persistent, planted, variant, verdict
from transformer_kernels.backends import build
from transformer_kernels.backends import cuda as backend

pytestmark = pytest.mark.slow

DTYPES = (torch.float16, torch.bfloat16)
PERSISTENT = ("64 columns, padding", "64 columns, options", "128 columns", "128 columns, options")
NOT_FOUND = {
    "plain: row and column of a box swapped, 1 of 4": "the box of queries, whose row and column are both 0",
    "plain: without bar.warp.sync, 1 of 6": "of the producer, whose other lanes do nothing",
    "plain: without bar.warp.sync, 2 of 6": "the warp meets again at the first release, before it reads these rows",
    "plain: without bar.warp.sync, 4 of 6": "the producer has waited for values that are released after these keys",
    "plain: without wgmma.fence, 3 of 4": "the fence of the scores comes after the last writes to these registers",
    "options: without arrival, 2 of 3": "of three tiles: nothing is copied over these keys again",
    "options: without fence.proxy.async, 1 of 5": "of the queries: the fence of the first keys follows",
    "options: without bar.sync, 2 of 7": "of the queries: the barrier of the first keys follows",
    "options: without bar.sync, 7 of 7": "the barrier of the last values has followed the last product of the queries",
}
"""Bugs that change nothing in their call, and why; all others are found."""


@pytest.fixture(autouse=True)
def _sm_90(monkeypatch):
    if build.find_toolkit() is None:
        pytest.skip("there is no nvcc")
    if not backend.emulating():
        pytest.skip("the launchers of the emulation are needed")
    monkeypatch.setenv("TRANSFORMER_KERNELS_EMULATE_ARCH", "90")


@pytest.mark.parametrize(("name", "dtype"), in_turn(itertools.product(VARIANTS, DTYPES)), ids=str)
def test_matches_reference(name, dtype):
    result = variant(name, dtype)
    assert result.kernels == ["attention_forward_sm90_kernel"]
    assert not (lines := problems(result)), "\n".join(lines[:20])


@pytest.mark.parametrize(("name", "dtype"), in_turn(itertools.product(PERSISTENT, DTYPES)), ids=str)
def test_a_persistent_grid_matches_reference(name, dtype):
    result = persistent(name, dtype)
    assert result.kernels == ["attention_forward_sm90_kernel"]
    assert not (lines := problems(result)), "\n".join(lines[:20])


@pytest.mark.parametrize("call", in_turn(CALLS))
def test_planted_bugs_are_found(call):
    assert not problems(CALLS[call](None))
    bugs = planted(call)
    assert len(bugs) >= {"plain": 50, "options": 25}[call]
    known = {name for name in NOT_FOUND if name.startswith(f"{call}:")}
    assert known <= bugs.keys(), f"no longer planted: {sorted(known - bugs.keys())}"
    chosen = in_turn(bugs)
    unseen = {name for name in chosen if not verdict(call, *bugs[name])}
    explained = known.intersection(chosen)
    assert unseen == explained, f"unexplained {sorted(unseen - explained)}; found now {sorted(explained - unseen)}"
