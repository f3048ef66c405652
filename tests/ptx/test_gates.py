"""In the gates: every operation, the parity grid's small shapes, and random calls, by their PTX.

TRANSFORMER_KERNELS_GATES_EVERY thins them.
"""

import itertools

import pytest

from benchmarks.compilers.triton import OPERATIONS
from tests.ptx.test_operations import DTYPES, PER_DTYPE, TARGETS
from tests.support.day import EVERY, day, in_turn
from tests.support.operations import EXAMPLES
from tests.support.ptx.cases import KNOWN, decoded, example, lengths, problems, random_call
from tests.support.ptx.worker import in_worker
from tests.support.random_calls import DRAWN

pytest.importorskip("triton", reason="Triton is not installed")

CALLS = max(2, 16 // EVERY)
"""Random calls of each operation."""
LENGTHS = [(1, 1), (17, 17), (128, 128), (129, 129), (1, 129), (17, 128), (129, 17), (65, 257)]
BY_PTX = sorted({*OPERATIONS, "packed_attention", "linear_cross_entropy"})
OTHERS = [op for op in BY_PTX if op != "attention"]
pytestmark = pytest.mark.slow


def check(outcome):
    assert outcome.findings.keys() <= KNOWN, "\n".join(outcome.lines[:20])


@pytest.mark.parametrize(("op", "dtype", "target"), in_turn(itertools.product(OTHERS, DTYPES, TARGETS)), ids=str)
def test_every_operation_matches_reference(op, dtype, target):
    check(in_worker(example, op, target, dtype, 12, 64, {}))


@pytest.mark.parametrize("op", BY_PTX)
def test_every_operation_matches_reference_on_sm_120(op):
    """Pairs of fp32 in 64 bits, and else what sm_80 has."""
    dtype = DTYPES[BY_PTX.index(op) % len(DTYPES)]
    result = in_worker(example, op, "sm_120", dtype, 12, 64, {})
    assert result.kernels and not (lines := problems(result)), "\n".join(lines[:20])


@PER_DTYPE
@pytest.mark.parametrize(("queries", "keys"), LENGTHS[::EVERY], ids=str)
def test_attention_matches_reference_over_lengths(queries, keys, dtype):
    """On one target each: the other has the same length in another dtype."""
    target = TARGETS[(LENGTHS.index((queries, keys)) + DTYPES.index(dtype)) % 2]
    check(in_worker(lengths, target, dtype, queries, keys))


@pytest.mark.parametrize("op", [op for op in DRAWN if op in BY_PTX])
def test_random_calls_of_the_day_match_reference(op):
    for number in range(CALLS):
        check(in_worker(random_call, day(), op, number, TARGETS[number % 2]))


@pytest.mark.parametrize("target", (*TARGETS, "sm_120"))
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_sample_of_the_launches_of_the_day_is_known(operation, target):
    """No instruction of theirs is refused; test_census.py has all forms that were found so far."""
    count = 4 if target == "sm_120" else 12
    assert in_worker(decoded, operation, target, day(), max(1, count // EVERY)) > 0


def test_every_operation_with_kernels_runs():
    assert set(BY_PTX) <= EXAMPLES.keys()
