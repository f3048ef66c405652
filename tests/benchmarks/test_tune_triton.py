"""The tuner of the Triton row kernels, as far as it can be tried without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from benchmarks import tune_triton
from benchmarks.tune_triton import Target
from transformer_kernels.backends import triton as _triton
from transformer_kernels.backends import triton_tiles
from transformer_kernels.backends.triton_tiles import TUNED, RowTile

TARGETS = tune_triton.targets()


def test_every_kernel_with_tiles_is_a_target() -> None:
    names = {target.tiles.name for target in TARGETS}
    assert len(names) == len(TARGETS) and {"softmax forward", "layer_norm backward", "gelu forward"} <= names
    assert {name for name, *_ in TUNED} <= names


def test_tuned_is_as_the_tuner_writes_it() -> None:
    source = Path(triton_tiles.__file__).read_text()
    assert tune_triton.rewritten(source, TUNED) == source


def test_another_entry_is_read_as_it_was_written() -> None:
    tile = RowTile(rows=2, columns=64, num_warps=8, num_stages=3)
    tuned = {**TUNED, ("softmax forward", (9, 0), 2, 64): (tile, "GPU, 2026-01-02: 1.0 us, 2.0 us by the rule")}
    source = tune_triton.rewritten(Path(triton_tiles.__file__).read_text(), tuned)
    start = source.index("TUNED: dict")
    exec(source[start:], names := dict(vars(triton_tiles)))
    assert names["TUNED"] == tuned


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.tiles.name)
def test_candidates_start_with_the_present_tile_and_are_sane(target: Target) -> None:
    for itemsize, width in tune_triton.points(target):
        present = target.tiles.find((9, 0), itemsize, width)
        tiles = tune_triton.candidates(target, width, present)
        assert tiles[0] == present and len(tiles) == len(set(tiles))
        low, high = tune_triton.ELEMENTS_PER_THREAD
        assert all(low <= tile.rows * tile.columns / (32 * tile.num_warps) <= high for tile in tiles[1:])


@pytest.mark.skipif(not _triton.interpreting(), reason="needs Triton's interpreter")
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.tiles.name)
def test_a_candidate_is_installed_runs_and_is_taken_away_again(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[RowTile] = []
    itemsize, width = next(iter(tune_triton.points(target)))
    present = target.tiles.find((9, 0), itemsize, width)
    tile = RowTile(rows=1, columns=present.columns, num_warps=1)
    find = type(target.tiles).find
    monkeypatch.setattr(type(target.tiles), "find", lambda *arguments: seen.append(find(*arguments)) or seen[-1])
    call = target.call(3, width, torch.float32, "cpu")
    with tune_triton.installed(target.tiles, (9, 0), 4, width, tile):
        call()
        assert tile in seen
    seen.clear()
    call()
    assert tile not in seen


def test_the_dry_run_says_that_nothing_was_timed(capsys: pytest.CaptureFixture[str]) -> None:
    assert tune_triton.main(["--dry-run", "softmax"]) == 0
    assert "none was timed" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_without_a_gpu_nothing_changes(capsys: pytest.CaptureFixture[str]) -> None:
    assert tune_triton.main(["softmax"]) == 2
    assert "needs a CUDA device" in capsys.readouterr().err
