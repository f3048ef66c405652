"""The emulated primitives against the fragment tables of the PTX ISA and other definitions."""

from __future__ import annotations

import pytest

from tests.emulation.programs import BUILDS, run


@pytest.mark.parametrize(
    "build", [pytest.param(build, marks=() if build == "plain" else pytest.mark.slow) for build in BUILDS]
)
def test_primitives_follow_their_definitions(build: str) -> None:
    result = run("conformance", build)
    print(result.stdout)
    assert result.returncode == 0, result.stdout + result.stderr
