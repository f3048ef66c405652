"""The interpreter on a few lines of PTX each: its reports and refusals."""

import numpy as np
import pytest
import torch

from tests.support.ptx.launch import Execution, execute
from tests.support.ptx.memory import DIFFERENT, ONE_ULP, ZEROS, difference
from tests.support.ptx.syntax import parse
from tests.support.ptx.types import Fault, Refused

HEAD = """
.version 8.7
.target sm_80
.address_size 64
.extern .shared .align 16 .b8 memory[];
.visible .entry kernel(.param .u64 p)
.reqntid 64
{
    .reg .pred %p<4>;
    .reg .b32 %r<9>;
    .reg .b64 %rd<9>;
    ld.param.b64 %rd1, [p];
    mov.u32 %r1, %tid.x;
    shl.b32 %r2, %r1, 2;
    cvt.u64.u32 %rd2, %r2;
    add.s64 %rd3, %rd1, %rd2;
    mov.b32 %r3, memory;
    add.s32 %r4, %r3, %r2;
    xor.b32 %r5, %r4, 128;
    setp.lt.s32 %p1, %r1, 8;
"""
EXCHANGE = "st.shared.b32 [%r4], %r1; {barrier} ld.shared.b32 %r6, [%r5]; st.global.b32 [%rd3], %r6;"


def run(body, elements=64, ctas=1):
    """64 threads: %rd3 is the address of their element, %r4 of their word of shared memory, %r5 of another warp's."""
    kernel, out = parse(f"{HEAD}{body} ret; }}"), torch.full((elements,), -1, dtype=torch.int32)
    result = Execution("kernel", "sm_80", "")
    execute(kernel, (ctas,), [out], 64, 256, result)
    return out, {message for _, message, _ in result.findings}


@pytest.mark.parametrize("barrier", ["bar.sync 0;", "barrier.sync 0;", "bar.sync 0, 64;"])
def test_a_barrier_orders_two_warps(barrier):
    out, found = run(EXCHANGE.format(barrier=barrier))
    assert not found and torch.equal(out, (torch.arange(64, dtype=torch.int32) + 32) % 64)


def test_without_it_they_race():
    _, found = run(EXCHANGE.format(barrier=""))
    assert found == {"a read after another warp's write to shared memory"}


def test_lanes_of_a_warp_need_a_barrier_of_the_warp():
    exchange = EXCHANGE.replace("[%r5]", "[%r8]")
    body = "xor.b32 %r8, %r4, 4; " + exchange
    assert run(body.format(barrier=""))[1] == {"a read after another lane's write to shared memory"}
    assert not run(body.format(barrier="bar.warp.sync -1;"))[1]


def test_ctas_that_write_the_same_bytes_race():
    body = "mov.u32 %r6, %ctaid.x; st.global.b32 [%rd3], %r6;"
    assert not run(body)[1]
    assert "a write after another CTA's write to global memory (argument 0)" in run(body, ctas=2)[1]


def test_bytes_of_a_copy_are_poison_until_its_wait():
    body = "cp.async.ca.shared.global [%r4], [%rd3], 4; cp.async.commit_group; {wait} ld.shared.b32 %r6, [%r4];"
    assert not run(body.format(wait="cp.async.wait_group 0;"))[1]
    found = run(body.format(wait="cp.async.wait_group 1;"))[1]
    assert found == {"a read of bytes that a copy under way writes", "a copy that is never waited for"}


def test_threads_that_miss_a_barrier():
    found = run("@%p1 bra $A; bar.sync 0; bra.uni $B; $A: bar.sync 0; $B:")[1]
    assert found == {"threads of one CTA wait at different barriers"}


def test_a_register_that_nobody_wrote():
    assert run("add.s32 %r6, %r7, 1;")[1] == {"%r7 is read before it is written"}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("st.global.b32 [%rd3 + 4], %r1;", "byte 256 of argument 0, which has 256"),
        ("ld.shared.b32 %r6, [%r4 + 4];", "4 bytes at byte 256 of shared memory, which has 256"),
        ("ld.global.b32 %r6, [%rd3 + 2];", "not a multiple"),
        ("@%p1 shfl.sync.bfly.b32 %r6, %r1, 1, 31, -1;", "lanes of the member mask are missing"),
    ],
)
def test_faults(body, message):
    with pytest.raises(Fault, match=message):
        run(body)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("add.sat.s32 %r6, %r1, 1;", r"modifiers \.sat"),
        ("add.s32 %rd4, %rd1, 1;", "a register of b64, as s32|a register of b64, for s32"),
        ("setp.gt.f16x2 %p2, %r1, %r2, 1;", "4 operands|operands"),
        ("mul.s32 %r6, %r1, %r2;", "expected one of .wide, .lo, .hi"),
        ("cp.async.bulk.shared.global [%r4], [%rd3], 16;", "expected one of"),
    ],
)
def test_what_is_not_known_is_refused(body, message):
    with pytest.raises(Refused, match=message):
        run(body)


@pytest.mark.parametrize(
    ("instruction", "function"),
    [
        ("add.f32x2 %rd5, %rd5, %rd4;", lambda low, high: (low + 3.0, high - 0.5)),
        ("sub.f32x2 %rd5, %rd5, %rd4;", lambda low, high: (low - 3.0, high + 0.5)),
        ("mul.rn.ftz.f32x2 %rd5, %rd5, %rd4;", lambda low, high: (low * 3.0, high * -0.5)),
        ("fma.rn.f32x2 %rd5, %rd5, %rd4, %rd5;", lambda low, high: (low * 4.0, high * 0.5)),
    ],
)
def test_pairs_of_fp32(instruction, function):
    """(3, -0.5) with (lane, lane + 1), and the halves exchanged."""
    body = f"""
        mov.b32 %r6, 0f40400000; mov.b32 %r7, 0fBF000000; mov.b64 %rd4, {{%r6, %r7}};
        cvt.rn.f32.u32 %r6, %r1; add.f32 %r7, %r6, 0f3F800000; mov.b64 %rd5, {{%r6, %r7}};
        {instruction}
        mov.b64 {{%r6, %r7}}, %rd5; sub.f32 %r6, %r7, %r6; st.global.b32 [%rd3], %r6;
    """
    out, found = run(body)
    low, high = function(torch.arange(64.0), torch.arange(64.0) + 1)
    assert not found and torch.equal(out.view(torch.float32), high - low)


def test_divergent_threads_meet_again():
    body = (
        "mov.b32 %r6, 1; @!%p1 bra $A; add.s32 %r6, %r6, %r1; $A: mul.lo.s32 %r6, %r6, 10; st.global.b32 [%rd3], %r6;"
    )
    lane = torch.arange(64, dtype=torch.int32)
    assert torch.equal(run(f"{body} st.global.b32 [%rd3], %r6;")[0], torch.where(lane < 8, 10 * (1 + lane), 10))


@pytest.mark.parametrize(
    ("stored", "given", "reported"),
    [
        ((0.0, 1.0), (-0.0, 1.0), ZEROS),
        ((0.0, 1.0), (-0.0, np.nextafter(np.float32(1), np.float32(2))), ONE_ULP),
        ((0.0, 1.0), (-0.0, -1.0), DIFFERENT),
        ((0.0, 1.0), (1e-45, 1.000001), DIFFERENT),
    ],
)
def test_copies_that_differ(stored, given, reported):
    assert difference(*(np.array(values, np.float32).view(np.uint32) for values in (stored, given))) == reported
