"""The tuner of the Triton row kernels, as far as it can be tried without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from benchmarks import tune_triton
from benchmarks.tune_triton import TARGETS, Target
from transformer_kernels.backends.triton import RowTile, Table

OPERATIONS = sorted({target.operation for target in TARGETS})


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_tables_are_as_the_tuner_writes_them(operation: str) -> None:
    written = Path(str(tune_triton.table_module(operation).__file__)).read_text()
    assert tune_triton.current_source(operation) == written


def test_another_capability_gets_rows_of_its_own() -> None:
    old, new = RowTile(rows=1, columns=64, num_warps=4), RowTile(rows=2, columns=64, num_warps=8, num_stages=3)
    table = Table("sample", {((8, 0), 2): ((None, old),), ((9, 0), 2): ((None, new),), ((10, 0), 2): ((None, old),)})
    scope: dict[str, Table[RowTile]] = {}
    exec(tune_triton.render("Sample.\n", {"FORWARD": table}, ""), scope)
    assert scope["FORWARD"] == table


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_candidates_start_with_the_present_tile_and_are_sane(target: Target) -> None:
    table = getattr(tune_triton.table_module(target.operation), target.table)
    for width, present in table.entries((9, 0), 2):
        tiles = tune_triton.candidates(target, width, present)
        assert tiles[0] == present and len(tiles) == len(set(tiles))
        low, high = tune_triton.ELEMENTS_PER_THREAD
        assert all(low <= tile.rows * tile.columns / (32 * tile.num_warps) <= high for tile in tiles[1:])


def test_a_candidate_is_installed_and_taken_away_again() -> None:
    target, tile = TARGETS[0], RowTile(rows=1, columns=64, num_warps=1)
    present = target.launcher().FORWARD
    with tune_triton.installed(target, tile) as module:
        assert module.FORWARD.find((9, 0), 2, 10**6) is tile
    assert target.launcher().FORWARD is present


def test_the_dry_run_says_that_nothing_was_timed(capsys: pytest.CaptureFixture[str]) -> None:
    assert tune_triton.main(["--dry-run", "softmax"]) == 0
    assert "none was timed" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_without_a_gpu_nothing_changes(capsys: pytest.CaptureFixture[str]) -> None:
    assert tune_triton.main(["softmax"]) == 2
    assert "needs a CUDA device" in capsys.readouterr().err
