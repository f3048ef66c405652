"""Smoke cases find kernels that are wrong, hang or end their process, and "auto" leaves those out."""

import json
import os
import sys
import textwrap

import pytest
import torch

import transformer_kernels as tk
from transformer_kernels import verification
from transformer_kernels.backends import cpu, dispatch
from transformer_kernels.verification import BAD, PASSES, Case, trust

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(cpu.unavailable(CPU) is not None, reason="needs the CPU kernels")

FAULTS = {
    "wrong": "return gelu(x, backend=backend) * 1.1",
    "hung": "time.sleep(600)",
    "faulted": "os.abort()",
    "failed": "raise RuntimeError('planted')",
}


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """Plants a fault in GELU by the backend cpu, in one dtype, in every process that verifies."""

    def plant(fault, dtype="bfloat16"):
        code = f"""
            import importlib.abc, os, sys, time

            class Finder(importlib.abc.MetaPathFinder):
                def find_spec(self, name, path, target=None):
                    if name == "transformer_kernels.verification.__main__":
                        sys.meta_path.remove(self)
                        import torch
                        from transformer_kernels import ops
                        gelu = ops.gelu
                        def planted(x, backend=None):
                            if backend == "cpu" and x.dtype is torch.{dtype}:
                                {FAULTS[fault]}
                            return gelu(x, backend=backend)
                        ops.gelu = planted
                    return None

            sys.meta_path.insert(0, Finder())
        """
        (tmp_path / "sitecustomize.py").write_text(textwrap.dedent(code))
        path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
        monkeypatch.setenv("PYTHONPATH", path)

    return plant


def test_each_kernel_of_this_processor_passes():
    verdicts = verification.verify("cpu", CPU, verification.cases(), 200.0, 60.0)
    assert len(verdicts) == 2 * len(verification.cases())
    assert {verdict.outcome for verdict in verdicts} == {"passed"}


def test_every_operation_has_cases_in_each_dtype():
    assert {case.op for case in verification.cases()} == set(dispatch.OPERATIONS)
    assert {case.dtype for case in verification.cases(["softmax"])} == {"float32", "float16", "bfloat16"}
    with pytest.raises(ValueError, match="unknown operations nope"):
        verification.cases(["nope"])


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_costs_its_own_verdict_only(planted, fault):
    planted(fault)
    listed = [case for case in verification.cases(["gelu"]) if case.columns == 64]
    seconds = 3.0 if fault == "hung" else 60.0
    verdicts = verification.verify("cpu", CPU, listed, 120.0, seconds)
    outcomes = {(verdict.case, verdict.direction): verdict.outcome for verdict in verdicts}
    assert len(outcomes) == 2 * len(listed)
    found = {key for key, outcome in outcomes.items() if outcome in BAD}
    assert found and {case for case, _ in found} == {"gelu/bfloat16/12x64"}
    assert outcomes["gelu/bfloat16/12x64", "forward"] == fault


def test_a_process_that_does_not_start_is_an_error(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="did not start"):
        verification.verify("cpu", CPU, verification.cases(["gelu"])[:1])


@pytest.fixture
def untrusted(tmp_path, monkeypatch):
    """The CPU's kernels are verified before "auto" uses them, as those of a GPU are, with verdicts in a new folder."""
    monkeypatch.setattr(trust, "DEVICES", ("cpu",))
    monkeypatch.setattr(trust, "folder", lambda: tmp_path / "verdicts")
    monkeypatch.delenv(verification.VARIABLE, raising=False)
    trust.forget()
    yield tmp_path / "verdicts"
    trust.forget()


def test_auto_verifies_once_and_keeps_the_verdict(untrusted, monkeypatch):
    x = torch.randn(4, 64)
    assert tk.explain("gelu", x).chosen == "cpu"
    (file,) = untrusted.iterdir()
    kept = json.loads(file.read_text())
    assert {(entry["op"], entry["dtype"]) for entry in kept["verdicts"]} == {("gelu", "float32")}
    trust.forget()
    monkeypatch.setattr(verification, "verify", None)  # a second process asks the file
    assert tk.explain("gelu", x).chosen == "cpu"


@pytest.mark.parametrize("fault", ["wrong", "faulted"])
def test_auto_leaves_out_a_kernel_that_failed_with_one_warning(untrusted, planted, fault):
    planted(fault)
    x = torch.randn(4, 64, dtype=torch.bfloat16)
    with pytest.warns(UserWarning, match=f"gelu in bfloat16: auto leaves out the cpu kernel.*{fault}") as caught:
        explained = tk.explain("gelu", x)
        tk.explain("gelu", x)
    assert len(caught) == 1 and explained.chosen == "torch"
    assert tk.explain("gelu", x.float()).chosen == "cpu"


def test_auto_goes_on_where_nothing_can_be_verified(untrusted, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.warns(UserWarning, match="gelu in float32: auto leaves out .* smoke cases could not be run"):
        assert tk.explain("gelu", torch.randn(4, 64)).chosen == "torch"


def test_verdicts_that_cannot_be_kept_count_for_this_process(untrusted, monkeypatch):
    untrusted.parent.mkdir(exist_ok=True)
    untrusted.write_text("a file in the way")
    assert tk.explain("gelu", torch.randn(4, 64)).chosen == "cpu"


def test_a_verdict_of_other_kernels_does_not_count(untrusted, monkeypatch):
    assert tk.explain("gelu", torch.randn(4, 64)).chosen == "cpu"
    trust.forget()
    monkeypatch.setattr(trust, "_kernels", lambda backend: "others")
    assert trust.recorded("cpu", CPU) == []


def test_a_damaged_file_is_no_verdict(untrusted):
    trust.store("cpu", CPU, [verification.Verdict("gelu", "cpu", "float32", "forward", "gelu/float32/12x64", "wrong")])
    (file,) = untrusted.iterdir()
    assert [verdict.outcome for verdict in trust.recorded("cpu", CPU)] == ["wrong"]
    file.write_text(file.read_text()[:40])
    assert trust.recorded("cpu", CPU) == []


def test_the_check_can_be_turned_off(untrusted, monkeypatch):
    monkeypatch.setenv(verification.VARIABLE, "0")
    monkeypatch.setattr(verification, "verify", None)
    assert tk.explain("gelu", torch.randn(4, 64)).chosen == "cpu"


def test_verify_device_prints_and_keeps_verdicts(untrusted, capsys):
    assert trust.verify_device(CPU, ["cpu"], ["gelu"]) == 0
    assert "cpu        3 kernels and dtypes verified" in capsys.readouterr().out
    assert {verdict.dtype for verdict in trust.recorded("cpu", CPU)} == {"float32", "float16", "bfloat16"}
    with pytest.raises(tk.BackendUnavailable, match="no GPU"):
        trust.verify_device(torch.device("cuda"), None, None)


def test_a_case_names_itself():
    assert Case("attention", "float32", 3, 64, "decode").name == "attention[decode]/float32/3x64"
    assert len(PASSES) == 2
