"""`run_ptx` on kernels that are not the package's: tests/support/ptx/README.md describes it."""

import re

import pytest
import torch

from tests.support.ptx.barriers import UNFENCED_INIT
from tests.support.ptx.cases import CP_ASYNC_PROXY
from tests.support.ptx.types import Fault, Refused
from tests.support.ptx.worker import in_worker

pytest.importorskip("triton", reason="Triton is not installed")

PER_TARGET = pytest.mark.parametrize("target", ["sm_80", "sm_90"])


def call(name, *arguments, **options):
    return in_worker(_call, name, arguments, options)


def _call(name, arguments, options):
    from tests.ptx import kernels  # only where Triton does not interpret

    torch.manual_seed(0)
    return getattr(kernels, name)(*arguments, **options)


@PER_TARGET
@pytest.mark.parametrize("name", ["add", "softmax", "layer_norm", "count", "locked"])
def test_kernels_of_others(name, target):
    got, want = call(name, target)
    torch.testing.assert_close(got, want)


@PER_TARGET
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_matrix_product(dtype, target):
    """float32 by tf32, which is Triton's default."""
    expected = (CP_ASYNC_PROXY,) if target == "sm_90" else ()
    got, want = call("matmul", target, dtype, expected=expected)
    tolerance = {"rtol": 0.0, "atol": 0.05} if dtype is torch.float32 else {}
    torch.testing.assert_close(got, want, **tolerance)


@PER_TARGET
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_matrix_product_of_tensor_descriptors(dtype, target):
    """On sm_90 by the copy engine, in boxes whose last ones are partly outside."""
    got, want = call("described_matmul", target, dtype, expected=(UNFENCED_INIT,) if target == "sm_90" else ())
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    ("pattern", "replacement", "message"),
    [
        (r"fence\.proxy\.async\S*;", "", "a tensor copy reads what ordinary stores wrote"),
        (r"cp\.async\.bulk\.wait_group\S*\s+0;", "", "a copy from shared memory that is never waited for"),
        (
            r"mbarrier\.try_wait\S* complete, [^;]*;",
            "setp.eq.u32 complete, 0, 0;",
            "more arrivals than the initialisation announced",
        ),
        (r"wgmma\.wait_group\.sync\.aligned\s+0;", "", "never waited for|under way reads"),
    ],
)
def test_what_tensor_copies_need(pattern, replacement, message):
    with pytest.raises((AssertionError, Fault), match=message):
        in_worker(_described_with, pattern, replacement)


def _described_with(pattern, replacement):
    from tests.ptx import kernels

    def edit(name, ptx):
        edited, count = re.subn(pattern, replacement, ptx)
        assert count, pattern
        return edited

    kernels.described_matmul("sm_90", torch.float16, edit=edit, expected=(UNFENCED_INIT,))


def test_tensor_copies_are_reported_without_a_fence_of_their_mbarriers():
    with pytest.raises(AssertionError, match=UNFENCED_INIT):
        call("described_matmul", "sm_90", torch.float16)


def test_the_missing_fence_fails_unless_it_is_expected():
    with pytest.raises(AssertionError, match=re.escape(CP_ASYNC_PROXY)):
        call("matmul", "sm_90", torch.float16)


def test_a_missing_mask_is_a_fault_of_one_argument():
    with pytest.raises(Fault, match=r"byte 4000 of [xy], which has 4000; at ld\.global"):
        call("add", "sm_80", "add_without_mask_kernel")


def test_programs_that_write_the_same_element_race():
    with pytest.raises(AssertionError, match=r"a write after another CTA's write to global memory \(out\)"):
        call("overlapping", "sm_80")


def test_a_lock_orders_nothing_for_the_race_check():
    with pytest.raises(AssertionError, match=r"another CTA's write to global memory \(total\)"):
        call("locked", "sm_80", races=True)


def test_an_instruction_that_is_not_known_is_refused():
    with pytest.raises(Refused, match=r"add\.sat\.f32 .*: modifiers \.sat"):
        in_worker(_with_another_opcode, r"\badd\.f32", "add.sat.f32")
    with pytest.raises(Refused, match=r"frobnicate\.f32 .*: no such instruction"):
        in_worker(_with_another_opcode, r"\badd\.f32", "frobnicate.f32")


def _with_another_opcode(opcode, other):
    from tests.ptx import kernels

    kernels.add("sm_80", edit=lambda name, ptx: re.sub(opcode, other, ptx))
