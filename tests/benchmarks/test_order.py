"""The order of the backends on a GPU is a table that its record changes."""

import json
import runpy

import pytest
import torch

import transformer_kernels as tk
from benchmarks import order
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
    for _ in range(2):
        assert order.main([str(tmp_path), "--file", str(file)]) == 0
        assert runpy.run_path(str(file))["MEASURED"] == _order.MEASURED | {HOPPER: {"gelu": "cuda"}}
    (tmp_path / "environment.json").write_text(json.dumps({"capability": None}))
    assert (
        order.main([str(tmp_path), "--file", str(file)]) == 1 and "not the record of a GPU" in capsys.readouterr().out
    )


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
