"""Planted bugs, and the builds of the emulation that must detect each."""

import re

import pytest

from tests.emulation.programs import BUILDS, run

SCHEDULES = [("lowest_first", 0), ("one_warp_ahead", 1), ("one_warp_ahead", 2), ("random", 3), ("random", 4)]

# The builds that detect a bug in at least one of the schedules.
FOUND_BY = {
    "missing_barrier_before_read": ("plain", "address", "thread"),
    "missing_barrier_before_overwrite": ("plain", "address", "thread"),
    "shared_overrun": ("plain", "address", "thread"),
    "global_overrun": ("address",),
    "misaligned_vector_access": ("plain", "address", "thread"),
    "uninitialised_shared_read": ("plain", "address", "thread"),
    "early_return_before_barrier": ("plain", "address", "thread"),
    "divergent_shuffle": ("plain", "address", "thread"),
    "global_race_between_blocks": ("thread",),
    "wrong_fragment_index": ("plain", "address", "thread"),
    "copy_used_before_wait": ("plain", "address", "thread"),
}

# Rules of Hopper's asynchronous units. The numbers are correct (or nothing is computed): only the rule detects the bug,
# in any schedule and build, with this message.
BREAKS_A_RULE = {
    "arrival_without_a_wait": "the block ends with 32 arrivals at named barrier 1",
    "missing_proxy_fence": r"wgmma touches shared memory that thread \d+ wrote .* without fence_for_async",
    "missing_barrier_after_fence": "without a barrier after its fence_for_async",
    "unreported_store_without_fence": "that ordinary stores wrote without fence_for_async",
    "missing_wgmma_fence": r"wgmma without a wgmma.fence before it in thread \d+",
    "missing_wgmma_commit": "the block ends with wgmma under way",
    "wgmma_registers_overwritten": "a register operand of wgmma changed in thread 77 ",
    "wgmma_shared_operand_overwritten": "an operand of wgmma in shared memory changed",
    "wgmma_accumulator_overwritten": "an accumulator of wgmma was written in thread 77 ",
    "wgmma_operand_beyond_its_piece": "wgmma touches 16 bytes of shared memory that are not of one piece",
    "wgmma_on_another_architecture": "wgmma exists on sm_90 only; this is sm_100",
    "too_few_bytes_expected": r"more bytes were copied than expected: mbarrier 0 .* -16 bytes missing",
    "too_many_bytes_expected": r"thread \d+ waits for parity 0 of mbarrier 0 .* 16 bytes missing",
    "too_many_arrivals": "more arrivals than the initialisation announced: mbarrier 0",
    "too_few_arrivals": r"deadlock: .* waits for parity 0 of mbarrier 0 .* 1 of 2 arrivals",
    "wait_for_a_phase_that_never_comes": r"deadlock: .* waits for parity 0 of mbarrier 0 \(phase of parity 0",
    "missing_barrier_init_fence": "initialised without barrier_init_fence",
    "barrier_initialised_twice": "initialised for the second time: mbarrier 0",
    "copy_over_ordinary_stores": r"a tensor copy touches shared memory that thread \d+ wrote",
    "copy_beyond_its_piece": "a tensor copy touches 8192 bytes of shared memory that are not of one piece",
    "copy_to_a_misaligned_place": "a swizzled tensor copy needs a destination on 1024 bytes",
    "copy_never_awaited": "the block ends with tensor copies under way",
    "misaligned_tensor": "a tensor map needs an address on 16 bytes",
    "misaligned_stride": "a tensor map needs strides that are multiples of 16 bytes",
    "box_of_too_many_rows": "a tensor map needs a box of 1 to 256 rows",
    "too_much_shared_memory": "a block of sm_90 has at most 232448 bytes of shared memory",
    "too_many_registers": "setmaxnreg: the warp groups ask for 92160 registers, the block has 64512",
}

ALL_BUILDS = [pytest.param(build, marks=() if build == "plain" else pytest.mark.slow) for build in BUILDS]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: f"{schedule[0]}-{schedule[1]}")
@pytest.mark.parametrize("build", ALL_BUILDS)
def test_a_correct_kernel_raises_no_alarm(build, schedule):
    result = run("planted_bugs", build, "none", schedule[0], str(schedule[1]))
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("build", ALL_BUILDS)
@pytest.mark.parametrize("bug", FOUND_BY)
def test_a_planted_bug_is_noticed(bug, build):
    if build not in FOUND_BY[bug]:
        pytest.skip(f"{bug} shows in the builds {', '.join(FOUND_BY[bug])}")
    results = [run("planted_bugs", build, bug, kind, str(seed)) for kind, seed in SCHEDULES]
    assert any(result.returncode for result in results)


@pytest.mark.parametrize("bug", BREAKS_A_RULE)
def test_a_broken_rule_is_named(bug):
    for kind, seed in SCHEDULES[::2]:
        result = run("planted_bugs", "plain", bug, kind, str(seed))
        assert result.returncode == 2
        assert re.search(BREAKS_A_RULE[bug], result.stderr), result.stderr
