"""The tuner of the Triton row kernels, as far as it can be tried without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from benchmarks import tune_triton
from benchmarks.tune_triton import Target
from transformer_kernels.backends import triton_tiles
from transformer_kernels.backends.triton_tiles import TUNED

TARGETS = tune_triton.targets()


def test_every_kernel_with_tiles_is_a_target() -> None:
    names = {target.tiles.name for target in TARGETS}
    assert len(names) == len(TARGETS) and {"softmax forward", "layer_norm backward", "gelu forward"} <= names
    assert {name for name, *_ in TUNED} <= names


def test_tuned_is_as_the_tuner_writes_it() -> None:
    source = Path(triton_tiles.__file__).read_text()
    assert tune_triton.rewritten(source, TUNED) == source


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.tiles.name)
def test_candidates_start_with_the_present_tile_and_are_sane(target: Target) -> None:
    for itemsize, width in tune_triton.points(target):
        present = target.tiles.find((9, 0), itemsize, width)
        tiles = tune_triton.candidates(target, width, present)
        assert tiles[0] == present and len(tiles) == len(set(tiles))
        low, high = tune_triton.ELEMENTS_PER_THREAD
        assert all(low <= tile.rows * tile.columns / (32 * tile.num_warps) <= high for tile in tiles[1:])


def test_the_dry_run_says_that_nothing_was_timed(capsys: pytest.CaptureFixture[str]) -> None:
    assert tune_triton.main(["--dry-run", "softmax"]) == 0
    assert "none was timed" in capsys.readouterr().out
