"""The emulation proves itself: bugs planted on purpose, and the builds that must notice each."""

from __future__ import annotations

import pytest

from tests.emulation.programs import BUILDS, run

SCHEDULES = [("lowest_first", 0), ("one_warp_ahead", 1), ("one_warp_ahead", 2), ("random", 3), ("random", 4)]

# Which builds notice a bug in at least one of the schedules.
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
    "missing_proxy_fence": ("plain", "address", "thread"),
}

ALL_BUILDS = [pytest.param(build, marks=() if build == "plain" else pytest.mark.slow) for build in BUILDS]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: f"{schedule[0]}-{schedule[1]}")
@pytest.mark.parametrize("build", ALL_BUILDS)
def test_a_correct_kernel_raises_no_alarm(build: str, schedule: tuple[str, int]) -> None:
    result = run("planted_bugs", build, "none", schedule[0], str(schedule[1]))
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("build", ALL_BUILDS)
@pytest.mark.parametrize("bug", FOUND_BY)
def test_a_planted_bug_is_noticed(bug: str, build: str) -> None:
    if build not in FOUND_BY[bug]:
        pytest.skip(f"{bug} shows in the builds {', '.join(FOUND_BY[bug])}")
    results = [run("planted_bugs", build, bug, kind, str(seed)) for kind, seed in SCHEDULES]
    assert any(result.returncode for result in results)


def test_every_bug_is_found_by_some_build() -> None:
    assert all(FOUND_BY.values())
