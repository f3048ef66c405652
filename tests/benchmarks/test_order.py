"""The order of the backends on a GPU is a table that its record changes."""

import json
import runpy
from pathlib import Path

import pytest
import torch

import transformer_kernels as tk
from benchmarks import evidence, gpu, order, results
from tests.benchmarks.rows import STAMP, operation_row
from transformer_kernels.backends import _order, dispatch

HOPPER = (9, 0)


def row(op, backend, seconds, width, dtype="bfloat16"):
    named = {"kind": "operation", "op": op, "case": "rows", "direction": "forward", "candidate": f"ours {backend}"}
    return {**named, "dtype": dtype, "shape": {"M": 4, "N": width}, "status": "ok", "seconds": seconds}


def verdict(op, backend, failed=0, complete=True, dtype="bfloat16"):
    return {"kernel": f"{op}/{backend}", "dtype": dtype, "failed": failed, "complete": complete}


ROWS = [
    row(op, backend, seconds, width)
    for op, cuda in (("gelu", 1.0), ("softmax", 1.96), ("rms_norm", 1.0), ("attention", 1.0))
    for backend, seconds in (("triton", 2.0), ("cuda", cuda))
    for width in (64, 128)
]
VERDICTS = [
    verdict("gelu", "cuda"),
    verdict("softmax", "cuda"),
    verdict("rms_norm", "cuda", failed=1),
    verdict("attention", "cuda", complete=False),
]


def test_a_backend_comes_first_if_it_is_faster_and_verified():
    assert order.fastest(ROWS, VERDICTS) == {"gelu": "cuda"}  # softmax is faster by 2 %, the others are not verified


def test_every_timed_dtype_must_be_verified():
    rows = [*ROWS, *(row("gelu", backend, 1.0, 64, "float16") for backend in ("triton", "cuda"))]
    assert order.fastest(rows, VERDICTS) == {}


def test_the_command_rewrites_the_table(tmp_path, capsys):
    (tmp_path / "environment.json").write_text(json.dumps({"capability": HOPPER}))
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(each) + "\n" for each in ROWS))
    (tmp_path / "kernels.json").write_text(json.dumps(VERDICTS))
    file = tmp_path / "_order.py"
    with open(_order.__file__) as source:
        file.write_text(source.read())
    assert order.main([str(tmp_path), "--file", str(file)]) == 0
    written = file.read_text()
    assert order.main([str(tmp_path), "--file", str(file)]) == 0 and file.read_text() == written
    assert runpy.run_path(str(file))["MEASURED"] == _order.MEASURED | {HOPPER: {"gelu": "cuda"}}
    (tmp_path / "environment.json").write_text(json.dumps({"capability": None}))
    assert (
        order.main([str(tmp_path), "--file", str(file)]) == 1 and "not the record of a GPU" in capsys.readouterr().out
    )


def lines(folder, **files):
    for name, listed in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in listed))


def test_auto_follows_the_record_of_a_gpu(tmp_path, monkeypatch):
    """The folder that a call leaves is merged, its order written, and used, as benchmarks/README.md describes."""
    left, table = tmp_path / "left", tmp_path / "_order.py"
    left.mkdir()
    described = {**STAMP, "device_type": "cuda", "sources": "x", "capability": HOPPER}
    (left / "environment.json").write_text(json.dumps(described))
    timed = [
        operation_row(seconds, op=op, candidate=f"ours {backend}", case="rows", shape={"M": 4, "N": 64})
        for op, backend, seconds in (("gelu", "triton", 2.0), ("gelu", "cuda", 1.0), ("softmax", "triton", 1.0))
    ]
    passed = {"outcome": "passed", "dtype": "bfloat16", "backend": "cuda", "op": "gelu"}
    test = {
        "test": "tests/ops/test_gelu.py::test_forward[cuda-bfloat16]",
        "outcome": "passed",
        "seconds": 0.1,
        "why": "",
    }
    lines(left, rows=timed, tests=[test], verdicts=[passed], steps=[{"step": "parity", "event": "ended", "wrong": ""}])
    assert {evidence.TESTS, gpu.VERDICTS, gpu.STEPS} <= {file.name for file in left.iterdir()}
    table.write_text(Path(_order.__file__).read_text())

    folder = results.merge(left, tmp_path / "results")
    assert order.main([str(folder), "--file", str(table)]) == 0

    monkeypatch.setattr(_order, "MEASURED", runpy.run_path(str(table))["MEASURED"])
    monkeypatch.setattr(_order, "_capability", lambda device: HOPPER)
    monkeypatch.setattr(dispatch, "unavailable", lambda backend, device: None)
    monkeypatch.setattr(dispatch, "_refusal", lambda operation, backend, call: None)
    monkeypatch.setattr(dispatch, "distrusted", None)
    for op, first in (("gelu", "cuda"), ("softmax", "triton")):
        assert dispatch._automatic(dispatch.OPERATIONS[op], None, torch.device("cuda", 0)) == (first, {})


def test_a_kernel_that_failed_since_is_not_verified():
    """A record keeps the verdicts on older sources; the last one counts."""
    assert order.fastest(ROWS, [*VERDICTS, verdict("gelu", "cuda", failed=1)]) == {}
    assert order.fastest(ROWS, [verdict("gelu", "cuda", failed=1), *VERDICTS]) == {"gelu": "cuda"}


@pytest.mark.parametrize(("op", "first"), [("gelu", "cuda"), ("softmax", "triton")])
def test_auto_asks_in_the_order_of_the_table(op, first, monkeypatch):
    monkeypatch.setattr(_order, "MEASURED", {HOPPER: {"gelu": "cuda"}})
    monkeypatch.setattr(_order, "_capability", lambda device: HOPPER)
    names = dispatch._order_of(op, torch.device("cuda", 0))
    assert names[0] == first and sorted(names) == ["cuda", "torch", "triton"]
    monkeypatch.setattr(_order, "_capability", lambda device: (8, 0))
    assert dispatch._order_of(op, torch.device("cuda", 0)) == dispatch.AUTO_ORDER["cuda"]


def test_dispatch_reads_the_table(monkeypatch):
    monkeypatch.setattr(_order, "measured", lambda operation, usual, device: ("torch", *usual))
    assert tk.explain("gelu", torch.ones(2, 8)).chosen == "torch"
