"""mbarriers, named barriers and tensor copies on a few lines of PTX each: the order of accesses, and the reports."""

import pytest
import torch

from tests.support.ptx.launch import Execution, execute
from tests.support.ptx.syntax import parse
from tests.support.ptx.tensor_maps import BYTES, TensorMap
from tests.support.ptx.types import Fault, Refused

HEAD = """
.version 8.7
.target sm_90a
.address_size 64
.extern .shared .align 1024 .b8 memory[];
.visible .entry kernel(.param .u64 p, .param .align 64 .b8 map[128])
.reqntid {threads}
{{
    .reg .pred %p<9>;
    .reg .b32 %r<9>;
    .reg .b64 %rd<9>;
    ld.param.b64 %rd1, [p];
    mov.b64 %rd5, map;
    cvta.param.u64 %rd4, %rd5;
    mov.u32 %r1, %tid.x;
    shl.b32 %r2, %r1, 2;
    cvt.u64.u32 %rd2, %r2;
    add.s64 %rd3, %rd1, %rd2;
    mov.b32 %r3, memory;
    and.b32 %r4, %r2, 124;
    add.s32 %r4, %r3, %r4;
    add.s32 %r5, %r3, 2048;
    setp.eq.s32 %p1, %r1, 0;
    setp.lt.s32 %p2, %r1, 32;
    and.b32 %r8, %r1, 31;
    setp.eq.s32 %p3, %r8, 0;
"""
INIT = "@%p1 mbarrier.init.shared::cta.b64 [%r5], {count};"
FENCE, MEET = "fence.mbarrier_init.release.cluster;", "bar.sync 0;"
ARRIVE = "mbarrier.arrive.shared::cta.b64 _, [%r5];"
WAIT = "$A: mbarrier.try_wait.parity.shared::cta.b64 %p4, [%r5], 0; @!%p4 bra $A;"
HANDSHAKE = """
    {init} {meet}
    @!%p2 bra $WAIT;
    st.shared.b32 [%r4], %r1; {warp}
    {arrive}
    bra $END;
    $WAIT: {wait}
    ld.shared.b32 %r6, [%r4]; st.global.b32 [%rd3], %r6;
    $END:
"""
LOAD = (
    "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%r3], [%rd4, {%r6, %r7}], [%r5];"
)
COPY = """
    {init} {fence} {meet}
    {before}
    mov.b32 %r6, 8; mov.b32 %r7, -1;
    @%p1 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r5], {bytes};
    @%p1 {load}
    {wait}
    ld.shared.b32 %r6, [%r4]; st.global.b32 [%rd3], %r6;
"""
STORE = """
    mov.b32 %r6, 8; mov.b32 %r7, -1;
    @%p2 st.shared.b32 [%r4], %r1; {fence} bar.sync 0;
    @%p1 cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd4, {{%r6, %r7}}], [%r3];
    @%p1 cp.async.bulk.commit_group; {wait} {after}
"""
SOURCE = torch.arange(16 * 4, dtype=torch.int32).reshape(4, 16)
BOX = TensorMap(0, 4, (16, 4), (64,), (16, 2), 0)


def run(body, threads=64, tensor=SOURCE):
    """%r4: this lane's word of shared memory, %r5: an mbarrier, %rd3: this thread's element, %rd4: a map of a tensor
    [4, 16] and boxes of [2, 16]; %p1: thread 0, %p2: the first warp, %p3: the first lane of a warp.
    """
    kernel = parse(f"{HEAD.format(threads=threads)}{body} ret; }}")
    out = torch.full((threads,), -1, dtype=torch.int32)
    tensor_map = TensorMap(tensor.data_ptr(), BOX.width, BOX.sizes, BOX.strides, BOX.box, BOX.swizzle)
    result = Execution("kernel", "sm_90a", "")
    execute(kernel, (1,), [out, tensor_map.pack()], threads, 4096, result, tensors={"tensor": tensor})
    return out, {message for _, message, _ in result.findings}


def handshake(**changed):
    given = {"init": INIT.format(count=32), "meet": MEET, "warp": "", "arrive": ARRIVE, "wait": WAIT}
    return run(HANDSHAKE.format(**{**given, **changed}))


def test_an_mbarrier_orders_two_warps():
    out, found = handshake()
    assert not found and torch.equal(out[32:], torch.arange(32, dtype=torch.int32))


def test_without_its_wait_they_race():
    assert "a read after another warp's write to shared memory" in handshake(wait="")[1]


def test_a_wait_for_arrivals_that_never_come():
    with pytest.raises(Fault, match=r"thread 32 waits at mbarrier 0 \(phase of parity 0, 32 of 32 arrivals"):
        handshake(arrive="")
    with pytest.raises(Fault, match=r"1 of 33 arrivals and 0 bytes missing"):
        handshake(init=INIT.format(count=33))


def test_one_lane_arrives_for_its_warp():
    """Only after a barrier of the warp does it announce what the others wrote."""
    one = {"init": INIT.format(count=1), "arrive": f"@%p1 {ARRIVE}"}
    assert not handshake(**one, warp="bar.warp.sync -1;")[1]
    assert handshake(**one)[1] == {"a read after another warp's write to shared memory"}


def test_more_arrivals_than_announced():
    with pytest.raises(Fault, match="more arrivals than the initialisation announced"):
        handshake(arrive="@%p1 mbarrier.arrive.shared::cta.b64 _, [%r5], 33;")


def test_the_initialisation_must_come_before():
    assert "an mbarrier is used although nothing orders its initialisation before" in handshake(meet="")[1]
    with pytest.raises(Fault, match="byte 2048 of shared memory is no mbarrier"):
        handshake(init="")


def test_ordinary_accesses_of_an_mbarrier():
    assert "a write of an mbarrier by an ordinary instruction" in handshake(warp="st.shared.b32 [%r5], %r1;")[1]


@pytest.mark.parametrize(
    ("wait", "found"), [(WAIT, set()), ("", {"a write after another warp's read to shared memory"})]
)
def test_an_mbarrier_releases_what_was_read(wait, found):
    """The warp that reads runs first: the other jumps behind it in the code."""
    body = f"""
        {INIT.format(count=32)} {MEET}
        @%p2 bra $WRITE;
        ld.shared.b32 %r6, [%r4]; {ARRIVE} st.global.b32 [%rd3], %r6;
        bra $END;
        $WRITE: {wait} st.shared.b32 [%r4], %r1;
        $END:
    """
    assert run(body)[1] == found


NAMED = """
    @!%p2 bra $WAIT;
    st.shared.b32 [%r4], %r1; {arrive}
    bra $END;
    $WAIT: {wait}
    ld.shared.b32 %r6, [%r4]; st.global.b32 [%rd3], %r6;
    $END:
"""


@pytest.mark.parametrize("arrive", ["bar.arrive 1, 64;", "bar.sync 1, 64;", "mov.b32 %r6, 1; bar.sync %r6, 64;"])
def test_a_named_barrier_orders_two_warps(arrive):
    out, found = run(NAMED.format(arrive=arrive, wait="bar.sync 1, 64;"))
    assert not found and torch.equal(out[32:], torch.arange(32, dtype=torch.int32))


def test_who_only_arrives_is_not_ordered():
    body = NAMED.format(arrive="bar.sync 1, 64;", wait="bar.arrive 1, 64;")
    assert run(body)[1] == {"a read after another warp's write to shared memory"}


def test_what_follows_an_arrival_is_not_ordered():
    late = NAMED.replace("st.shared.b32 [%r4], %r1; {arrive}", "{arrive} st.shared.b32 [%r4], %r1;")
    found = run(late.format(arrive="bar.arrive 1, 64;", wait="bar.sync 1, 64;"))[1]
    assert found == {"a read after another warp's write to shared memory"}
    assert (
        "a read after another warp's write to shared memory"
        in handshake(warp=ARRIVE, arrive="st.shared.b32 [%r4], %r1;")[1]
    )


@pytest.mark.parametrize("wait", ["bar.sync 2, 64;", "bar.sync 1, 96;"])
def test_barriers_that_do_not_meet(wait):
    with pytest.raises(Fault, match=r"waits at barrier|barrier 1 of 96 threads"):
        run(NAMED.format(arrive="bar.sync 1, 64;", wait=wait))


def test_more_threads_than_a_named_barrier_has():
    with pytest.raises(Fault, match="64 threads at barrier 1 of 32"):
        run("bar.sync 1, 32;")


def copied(**changed):
    given = {"init": INIT.format(count=1), "fence": FENCE, "meet": MEET, "before": "", "bytes": "128"}
    return run(COPY.format(**{**given, "load": LOAD, "wait": WAIT, **changed}), threads=32)


def test_a_box_of_a_tensor_arrives_with_zeros_outside():
    out, found = copied()
    box = torch.zeros(2, 16, dtype=torch.int32)
    box[1, :8] = SOURCE[0, 8:]
    assert not found and torch.equal(out.reshape(2, 16), box)


def test_bytes_of_a_box_are_poison_until_the_wait():
    out, found = copied(wait="")
    assert "a read after a tensor copy's write to shared memory" in found
    assert "a tensor copy that is never waited for" in found
    assert (out == -1).all()


@pytest.mark.parametrize(
    ("bytes", "message"), [("64", "more bytes are copied than expected"), ("256", "128 bytes miss")]
)
def test_a_wrong_number_of_bytes(bytes, message):
    with pytest.raises(Fault, match=message):
        copied(bytes=bytes)


def test_fences_of_the_copy_engine():
    assert copied(fence="")[1] == {"a tensor copy counts on an mbarrier that was initialised without a fence"}
    written = "st.shared.b32 [%r4], %r1; {} bar.sync 0;"
    overwritten = "a tensor copy overwrites what ordinary stores wrote without fence.proxy.async"
    assert copied(before=written.format(""))[1] == {overwritten}
    assert not copied(before=written.format("fence.proxy.async.shared::cta;"))[1]


def test_a_fence_counts_where_a_barrier_follows_it():
    """Thread 0 starts the copy; the fences of the others must precede it."""
    written = "st.shared.b32 [%r4], %r1; bar.sync 0; fence.proxy.async.shared::cta;"
    overwritten = "a tensor copy overwrites what ordinary stores wrote without fence.proxy.async"
    assert copied(before=written)[1] == {overwritten}


def stored(**changed):
    tensor = torch.full((4, 16), -1, dtype=torch.int32)
    given = {"fence": "fence.proxy.async.shared::cta;", "wait": "@%p1 cp.async.bulk.wait_group.read 0;", "after": ""}
    return tensor, run(STORE.format(**{**given, **changed}), tensor=tensor)[1]


def test_a_box_is_stored_where_it_is_inside():
    tensor, found = stored()
    want = torch.full((4, 16), -1, dtype=torch.int32)
    want[0, 8:] = torch.arange(16, 24, dtype=torch.int32)
    assert not found and torch.equal(tensor, want)


def test_what_a_store_needs():
    assert stored(fence="")[1] == {"a tensor copy reads what ordinary stores wrote without fence.proxy.async"}
    assert stored(wait="")[1] == {"a copy from shared memory that is never waited for"}
    overwrite = "@%p1 st.shared.b32 [%r4], %r1;"
    assert not stored(after=overwrite)[1]
    early = stored(wait=f"{overwrite} @%p1 cp.async.bulk.wait_group.read 0;")[1]
    assert early == {"a write to shared memory that a product or a tensor copy under way reads"}


@pytest.mark.parametrize(
    ("body", "error", "message"),
    [
        ("setmaxnreg.inc.sync.aligned.u32 240;", Fault, "ask for more than"),
        ("setmaxnreg.inc.sync.aligned.u32 100;", Refused, "100 registers"),
        ("mbarrier.test_wait.parity.shared::cta.b64 %p4, [%r5], 0;", Refused, "expected one of"),
        ("mbarrier.arrive.shared::cta.b64 %rd5, [%r5];", Refused, "the state of an mbarrier"),
        ("cp.async.bulk.shared::cluster.global [%r3], [%rd1], 16, [%r5];", Refused, "expected one of"),
        ("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%rd4, {%r6, %r7}];", Refused, "expected one of|rank"),
    ],
)
def test_what_is_refused(body, error, message):
    with pytest.raises(error, match=message):
        run(body, threads=384)


def test_tensor_maps_of_128_bytes():
    made = TensorMap(4096, 2, (100, 7, 3), (208, 2080), (64, 4, 1), 128)
    assert len(made.pack()) == BYTES and TensorMap.unpack(made.pack()) == made
    with pytest.raises(Fault, match=r"not that of a tensor map"):
        TensorMap.unpack(bytes(BYTES))
    with pytest.raises(ValueError, match="strides on 16 bytes"):
        TensorMap(4096, 2, (100, 7), (200,), (64, 4), 128)
