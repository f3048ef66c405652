"""Merging, comparing, growth, pictures, the report, and the verdict on each kernel."""

import json
import shutil
from pathlib import Path

import matplotlib.image
import pytest

from benchmarks import cli, evidence, gpu, results
from benchmarks.compilers import status
from benchmarks.gpu.summary import is_whole
from benchmarks.measure import identity
from benchmarks.plots import draw_all, roofline
from benchmarks.report import report
from benchmarks.runner import append
from tests.benchmarks.rows import STAMP, operation_row, sweep, whole_record

LATER = "2026-02-02T00:00:00+00:00"
ENVIRONMENT = {**STAMP, "device_type": "cuda", "sources": "x"}


def write(folder, rows, **changes):
    folder.mkdir()
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "environment.json").write_text(json.dumps(ENVIRONMENT | changes))
    return folder


# Merging


def test_merging_keeps_the_newer_of_two_and_adds_the_rest():
    old = [operation_row(1.0), operation_row(2.0, candidate="eager")]
    new = [operation_row(0.5, date=LATER), operation_row(3.0, candidate="flex", date=LATER)]
    merged = results.merged_rows(old, new)
    assert [(row["candidate"], row["seconds"]) for row in merged] == [
        ("ours triton", 0.5),
        ("eager", 2.0),
        ("flex", 3.0),
    ]
    assert results.merged_rows(new, old)[0]["seconds"] == 0.5, "an older record must not replace a newer one"
    assert results.merged_rows(old, [operation_row(4.0)])[0]["seconds"] == 4.0, "of the same time"
    for other in ("skipped", "out of memory", "failed"):
        (kept, _) = results.merged_rows(old, [operation_row(9.0, date=LATER, status=other)])
        assert kept["status"] == ("failed" if other == "failed" else "ok"), "only a failure replaces a time"


def test_merge_writes_a_record_for_the_device(tmp_path):
    source = write(tmp_path / "out", [operation_row(1.0)])
    tests = [
        {"test": "tests/ops/test_softmax.py::test_a[triton]", "outcome": "passed", "seconds": 0.1, "why": ""},
        {"test": "tests/ops/test_softmax.py::test_b[triton]", "outcome": "failed", "seconds": 0.1, "why": "E off"},
    ]
    (source / "tests.jsonl").write_text("".join(json.dumps(test) + "\n" for test in tests))
    for _ in range(2):  # merging the same folder again changes nothing
        folder = results.merge(source, tmp_path / "results")
        assert folder.name == "nvidia-test"
        assert len(results.load_rows(folder)) == 1
        assert json.loads((folder / "kernels.json").read_text())[0]["failed"] == 1
        assert json.loads((folder / "tests.json").read_text())["failures"] == [[tests[1]["test"], "E off"]]


# Comparing


def test_compare_flags_what_is_slower_beyond_its_spread(tmp_path, capsys):
    shapes = [{"L": length} for length in (1, 2, 3, 4)]
    before = [operation_row(1.0, shape=shape) for shape in shapes]
    after = [
        operation_row(1.2, shape=shapes[0]),
        operation_row(1.2, shape=shapes[1], spread=0.5),  # noise could be all of it
        operation_row(1.02, shape=shapes[2]),
        operation_row(0.5, shape=shapes[3]),
    ]
    verdicts = {each.name.split()[5]: each.verdict for each in results.compare(before, after)}
    assert verdicts == {"L1": "SLOWER", "L2": "same", "L3": "same", "L4": "faster"}
    old, new = write(tmp_path / "old", before), write(tmp_path / "new", after)
    assert cli.main(["--compare", str(old), str(new / "rows.jsonl")]) == 1
    printed = capsys.readouterr().out
    assert "1.20x" in printed and "SLOWER" in printed and "1 slower, 1 faster" in printed
    assert cli.main(["--compare", str(new), str(new)]) == 0


# Growth


def test_growth_finds_the_exponents():
    fits = {fit.candidate: fit for fit in results.growth(sweep("ours triton", 2.0, 1.0) + sweep("eager", 1.5, 2.0))}
    assert fits["ours triton"].time_exponent == pytest.approx(2.0, abs=1e-6)
    assert fits["ours triton"].memory_exponent == pytest.approx(1.0, abs=1e-3)
    assert fits["eager"].time_exponent == pytest.approx(1.5, abs=1e-6)
    assert fits["eager"].memory_exponent == pytest.approx(2.0, abs=1e-3)


def test_ours_is_held_against_the_fastest_peer():
    ours, slow = operation_row(2.0), operation_row(4.0, candidate="ours cuda")
    rows = [ours, slow, operation_row(8.0, candidate="eager"), operation_row(6.0, candidate="sdpa flash")]
    assert results.against_peers(rows) == {identity(ours): 3.0, identity(slow): 1.5}
    assert "| attention causal D64 | both | bfloat16 | ours triton | 1 | 3.00 | 3.00 | 3.00 |" in report(rows)
    assert results.against_peers([ours, slow]) == {}


# Pictures and report


def test_every_picture_is_drawn_and_is_not_empty(tmp_path):
    files = draw_all(whole_record(), tmp_path)
    names = {"attention_throughput", "bandwidth", "training_ladder", "roofline", "growth"}
    assert {path.name for path in files} == {f"{name}.png" for name in names}
    for path in files:
        pixels = matplotlib.image.imread(path)[..., :3]
        inked = (pixels.min(axis=-1) < 0.5).mean()
        assert pixels.shape[0] > 200 and 0.005 < inked < 0.5, (path.name, inked)


def test_the_roofline_has_each_measured_operation():
    rows = [row for row in whole_record() if row["kind"] == "operation" and row["status"] == "ok"]
    figure = roofline(whole_record())
    assert figure is not None
    assert sum(len(points.get_offsets()) for points in figure.axes[0].collections) == len(rows) > 0


def test_the_report_gathers_everything():
    page = report(whole_record(), [Path("plots/roofline.png")], {"passed": 3, "failures": []})
    for text in (
        "NVIDIA Test, torch 2.11.0, Triton 3.6.0, driver 580.0, commit 0123456789ab, 2026-01-02",
        "![roofline](plots/roofline.png)",
        "memory 4,000 GB/s; multiplications bfloat16 700 TFLOP/s",
        "3 passed",
        "quack is not installed",
        "| char_gpt B64 L64 | ours triton + one graph, bf16 | 0.50 | 2% | 8,192,000 | 8.00 |",
    ):
        assert text in page, text


# Verdicts on kernels


@pytest.mark.parametrize(
    "events, whole",
    [
        ([("ended", "")], True),
        ([("ended", "pytest ended with 1")], True),
        ([("ended", "its time ended")], False),
        ([("ended", "pytest ended with 3")], False),
        ([("begun", "")], False),
        ([], False),
    ],
)
def test_a_verdict_is_complete_only_if_the_parity_suite_ended_by_itself(tmp_path, events, whole):
    for event, wrong in events:
        append(tmp_path / gpu.STEPS, {"step": "parity", "event": event, "wrong": wrong})
    assert is_whole(tmp_path) is whole
    test = {"test": "tests/ops/test_gelu.py::test_a[cuda-float32]", "outcome": "passed"}
    smoke = {"op": "gelu", "backend": "cuda", "dtype": "float32", "outcome": "passed"}
    (verdict,) = evidence.verdicts([test], ENVIRONMENT, [smoke], is_whole(tmp_path))
    assert verdict["complete"] is whole


@pytest.fixture
def checkout(tmp_path):
    """A copy of the sources, to change."""
    for folder in ("csrc", "transformer_kernels"):
        shutil.copytree(status.CHECKOUT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("*.so"))
    (tmp_path / "benchmarks" / "results" / "nvidia-test").mkdir(parents=True)
    return tmp_path


def state(checkout, kernel):
    return next(line for line in status.verification(checkout) if line.startswith(kernel))


def note(checkout, **changes):
    """Record that all kernels passed their tests in their present state."""
    entries = []
    for op in status.OPERATIONS:
        for backend in status.BACKENDS:
            digest = status.kernel_hash(op, backend, checkout)
            entry = {"kernel": f"{op}/{backend}", "hash": digest, "passed": 5, "failed": 0, "complete": True}
            entries.append({**entry, "dtype": "float32", "device": "NVIDIA Test", "date": LATER, **changes})
    (checkout / "benchmarks" / "results" / "nvidia-test" / "kernels.json").write_text(json.dumps(entries))


def test_a_kernel_is_verified_until_something_it_is_made_of_changes(checkout):
    assert "on no GPU yet" in state(checkout, "layer_norm/cuda")
    note(checkout)
    assert "verified on NVIDIA Test, 2026-02-02 (5 tests)" in state(checkout, "layer_norm/cuda")
    with open(checkout / "csrc" / "cuda" / "primitives" / "reductions.h", "a") as file:
        file.write("\n")
    assert "changed since 2026-02-02" in state(checkout, "layer_norm/cuda")
    assert "changed since 2026-02-02, when on NVIDIA Test it was verified" in state(checkout, "add_layer_norm/cuda")
    assert "verified on" in state(checkout, "layer_norm/triton")
    with open(checkout / "transformer_kernels" / "backends" / "triton_reduce.py", "a") as file:
        file.write("\n")
    assert "changed since" in state(checkout, "layer_norm/triton")
    assert "verified on" in state(checkout, "softmax/triton")
