"""Small programs, spelled in hundreds of ways, compiled by the graph route: never wrong, and not blind.

A program must give eager PyTorch's outputs and gradients, whether it was matched or not, by a named backend and by the
fastest. In float64 the two agree to 1e-10, so a match of something that is nearly attention or nearly a norm is found.
The plain spellings of each family must be matched.
"""

from __future__ import annotations

import pytest
import torch

from tests.support.day import EVERY
from tests.support.handwritten import Family
from tests.support.handwritten.catalogue import FAMILIES, OPEN
from tests.support.handwritten.compare import AUTOCAST, EVALUATED, EXACT, HALF, SINGLE, Mode, failures
from transformer_kernels.backends import cpu

pytestmark = pytest.mark.skipif(
    cpu.unavailable(torch.device("cpu")) is not None, reason="without the CPU kernels the other backend would be tested"
)

MODES = {"float64": EXACT, "no_grad": EVALUATED, "float32": SINGLE, "autocast": AUTOCAST}

families = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name.replace(" ", "_"))
modes = pytest.mark.parametrize("mode", MODES.values(), ids=list(MODES))


def none(found: list[str]) -> None:
    assert not found, "\n".join([f"{len(found)} programs are wrong", *found])


@families
def test_each_spelling_is_matched_and_right(family: Family) -> None:
    none(failures([program for program in family.single() if program.name not in OPEN], EXACT))


def test_open_spellings_are_right_and_not_recognised() -> None:
    programs = [program for family in FAMILIES for program in family.single() if program.name in OPEN]
    assert [program.name for program in programs] == list(OPEN)
    found = failures(programs, EXACT)
    assert len(found) == len(OPEN) and all("was recognised, only" in line for line in found), found


@families
def test_what_only_resembles_it_is_right(family: Family) -> None:
    programs = family.trapped()
    with_gradients = [program for program in programs if not program.without_gradients]
    none(failures(with_gradients, EXACT))
    none(failures([program for program in programs if program.without_gradients], EVALUATED))


@pytest.mark.parametrize("mode", (SINGLE, HALF, AUTOCAST), ids=("float32", "bfloat16", "autocast"))
@families
def test_few_random_spellings(family: Family, mode: Mode) -> None:
    none([line for line in failures(family.sampled(6, 1), mode) if "was recognised, only" not in line])


@pytest.mark.slow
@modes
@families
def test_many_programs(family: Family, mode: Mode) -> None:
    programs = [*family.single(), *family.trapped(), *family.sampled(400 // min(10, EVERY), 0)]
    none([line for line in failures(programs, mode) if "was recognised, only" not in line])
