"""In the gates: the PTX that nvcc makes of csrc for sm_80, one shape of each family; the emulation runs the sources.

The emulation compiles the sources with g++; here nvcc's front end and optimiser have been at work.
"""

import itertools
import re

import pytest
import torch

from tests.ptx.test_operations import PER_DTYPE
from tests.support.arguments import normal
from tests.support.day import in_turn
from tests.support.operations import CPU, EXAMPLES
from tests.support.parity import check_parity
from tests.support.ptx.cases import outcome, poisoned, problems
from tests.support.ptx.cuda import by_ptx
from transformer_kernels.backends import build
from transformer_kernels.backends import cuda as backend

SUFFIX = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
SOURCES = {
    **{op: (op,) for op in EXAMPLES if op not in ("linear", "attention_weights")},
    "linear_cross_entropy": ("cross_entropy",),
    "packed_attention": ("rotary", "attention"),
}
"""The files of csrc/cuda/launchers that have an operation's kernels; attention has a file for each dtype and family."""

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _sm_80(monkeypatch):
    if build.find_toolkit() is None:
        pytest.skip("there is no nvcc")
    if not backend.emulating():
        pytest.skip("the launchers of the emulation are needed")
    monkeypatch.setenv("TRANSFORMER_KERNELS_EMULATE_ARCH", "80")


def sources_of(op, dtype):
    attention = [f"attention_{SUFFIX[dtype]}"] + [f"attention_short_{SUFFIX[dtype]}"] * (dtype is not torch.float32)
    return [name for each in SOURCES[op] for name in (attention if each == "attention" else [each])]


def parity(op, tensors, edit=None):
    """Forward and backward within the budget of tests/support/parity.py, by the PTX of each launch."""
    dtype = next(value.dtype for value in tensors.values() if value is not None and value.is_floating_point())
    with by_ptx(*sources_of(op, dtype), edit=edit) as executions, poisoned():
        share = check_parity(op, "cuda", tensors, EXAMPLES[op].options, seed=7)
    return outcome(share, executions)


def check(result):
    assert result.kernels
    assert not (lines := problems(result)), "\n".join(lines[:20])


@pytest.mark.parametrize(("op", "dtype"), in_turn(itertools.product(sorted(SOURCES), SUFFIX)), ids=str)
def test_every_operation_matches_reference(op, dtype):
    check(parity(op, EXAMPLES[op].make(12, 64, dtype)))


def several_blocks(dtype):
    return {name: normal(1, 1, 150, 64, dtype=dtype, device=CPU, seed=i) for i, name in enumerate("qkv")}


@PER_DTYPE
def test_attention_over_several_blocks_matches_reference(dtype):
    check(parity("attention", several_blocks(dtype)))


@pytest.mark.parametrize("bug", [r"bar\.sync\s+0;", r"cp\.async\.wait_(all|group\s+\d+);"])
def test_a_missing_barrier_or_wait_is_found(bug):
    removed = 0

    def edit(kernel, ptx):
        nonlocal removed
        changed, count = re.subn(bug, "", ptx)
        removed += count
        return changed

    with pytest.raises(AssertionError):
        check(parity("attention", several_blocks(torch.bfloat16), edit))
    assert removed > 0
