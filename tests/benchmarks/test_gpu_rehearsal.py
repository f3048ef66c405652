"""Both calls of a GPU's record against a stand-in for the GPU (tests/support/stand_in), with planted failures."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from benchmarks import evidence, gpu
from benchmarks.environment import ROOT
from benchmarks.gpu import kit, steps
from benchmarks.gpu.session import FILES
from benchmarks.gpu.summary import broken_off
from benchmarks.runner import read_lines
from tests.support.day import on_turn
from transformer_kernels.verification import BAD

pytestmark = pytest.mark.slow
OPERATIONS = ("gelu", "softmax")
FAULTS = [
    ["hangs", "gelu", "triton", "bfloat16"],
    ["poisons", "softmax", "cuda", "float16"],
    ["wrong", "*", "*", "float32"],
]
EXPECTED = {
    ("gelu", "triton", "bfloat16"): "hung",
    ("softmax", "cuda", "float16"): "faulted",
    **{(op, backend, "float32"): "wrong" for op in OPERATIONS for backend in gpu.BACKENDS},
}
NVCC = """#!/bin/sh
# Makes an empty object of every source but one.
case "$*" in
  *--version*) echo "release 13.0"; exit 0 ;;
  *softmax.cu*) echo "softmax.cu: planted error" >&2; exit 1 ;;
esac
for last; do :; done
echo | g++ -x c++ -c - -o "$last"
"""
REFUSED = "#!/bin/sh\necho 'Device not supported'; exit 1\n"


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """The environment of a machine with a GPU that this one stands in for, and a compiler that fails for one file."""
    for name, text in (("cuda/bin/nvcc", NVCC), ("bin/compute-sanitizer", REFUSED), ("bin/ncu", REFUSED)):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    (tmp_path / "cuda" / "lib64").mkdir()
    (tmp_path / "cuda" / "lib64" / "libcudart_static.a").write_bytes(b"!<arch>\n")
    for name in ("launches", "package"):
        (tmp_path / name).mkdir()
    variables = {
        "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT / 'tests' / 'support' / 'stand_in'}{os.pathsep}{ROOT}",
        "CUDA_HOME": str(tmp_path / "cuda"),
        "STAND_IN_FAULTS": json.dumps(FAULTS),
        "STAND_IN_LAUNCHES": str(tmp_path / "launches"),
        "STAND_IN_PACKAGE": str(tmp_path / "package"),
        "TRITON_INTERPRET": "0",
        "TRANSFORMER_KERNELS_EMULATE": "0",
        "BENCHMARK_SECONDS_FACTOR": os.environ.get("BENCHMARK_SECONDS_FACTOR", "3"),
        "OMP_NUM_THREADS": "1",
        "PYTEST_ADDOPTS": "",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return tmp_path


def call(machine, name, seconds):
    """Start a call in a session of its own, as a machine's tool does."""
    command = [sys.executable, "-m", "benchmarks.gpu", f"--{name}", "--device", "cpu", "--seconds", str(seconds)]
    command += ["--folder", str(machine / "run"), "--out", str(machine / "out")]
    command += [text for op in OPERATIONS for text in ("--op", op)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True)


def kill(process):
    """Kill every process of its session."""
    for path in os.listdir("/proc"):
        try:
            if path.isdigit() and os.getsid(int(path)) == process.pid:
                os.kill(int(path), signal.SIGKILL)
        except OSError:
            continue
    process.wait()


@on_turn(0)
def test_both_calls_with_planted_failures(machine):
    folder, out = machine / "run", machine / "out"
    first = call(machine, "first", 600)
    deadline = time.monotonic() + 900
    while first.poll() is None and len(read_lines(folder / evidence.TESTS)) < 20 and time.monotonic() < deadline:
        time.sleep(0.05)
    kill(first)  # as a machine is at the limit of its command
    assert broken_off(folder) == ["parity"]
    known = [test["test"] for test in read_lines(folder / evidence.TESTS) if test["outcome"] in ("passed", "failed")]
    assert {line["step"] for line in read_lines(out / gpu.STEPS)} >= {"build", "smoke"}  # already copied

    second = call(machine, "second", 240)
    printed = second.communicate(timeout=600)[0]

    ended = {line["step"]: line["wrong"] for line in read_lines(folder / gpu.STEPS) if line["event"] == "ended"}
    assert set(ended) == {step.name for step in steps.CALLS["second"]}, printed
    assert broken_off(folder) == []

    assert "not all of it" in ended["build"] and (machine / "package" / kit.EXTENSION).is_file()
    log = (folder / gpu.LOG).read_text()
    assert "softmax.cu: planted error" in log and log.count("gelu.cu failed") == 0

    verdicts = read_lines(folder / gpu.VERDICTS)
    bad = {(each["op"], each["backend"], each["dtype"]): each["outcome"] for each in verdicts if each["outcome"] in BAD}
    assert bad == EXPECTED
    assert len(verdicts) == len(OPERATIONS) * len(gpu.BACKENDS) * 3 * 3 * 2
    good = {(each["op"], each["backend"], each["dtype"]) for each in verdicts if each["outcome"] == "passed"}
    assert not good & bad.keys() and len(good | bad.keys()) == len(OPERATIONS) * len(gpu.BACKENDS) * 3

    tests = [test["test"] for test in read_lines(folder / evidence.TESTS) if test["test"] != evidence.FINISHED]
    again = [test for test in known if tests.count(test) > 1]
    failed = {test["test"] for test in read_lines(folder / evidence.TESTS) if test["outcome"] == "failed"}
    assert set(again) <= failed, "a test that had passed was repeated"
    assert not any("triton-bfloat16" in test for test in tests if "test_gelu" in test)
    passed = {test["test"] for test in read_lines(folder / evidence.TESTS) if test["outcome"] == "passed"}
    assert any("cuda-bfloat16" in test for test in passed) and any("triton-float16" in test for test in passed)

    families = ("activation", "softmax")
    for step in ("memcheck", "racecheck", "synccheck"):
        assert ended[step] == "; ".join(f"{family}: status 1" for family in families)
    assert ended["counters"] == "ncu: status 1"
    rows = read_lines(folder / "rows.jsonl")
    timed = {(row["op"], row["candidate"].split()[-1], row["dtype"]) for row in rows if row["status"] == "ok"}
    assert {("gelu", "cuda", "bfloat16"), ("softmax", "triton", "bfloat16")} <= timed
    assert not timed & bad.keys()

    launches = {kernel for file in (machine / "launches").iterdir() for kernel in json.loads(file.read_text())}
    assert {kernel.split()[0] for kernel in launches} == set(gpu.BACKENDS)

    files = list(out.rglob("*"))
    assert {file.name for file in files} <= set(FILES) and sum(file.stat().st_size for file in files) < 16 << 20
    assert "verdicts of the smoke cases" in printed[-12000:] and "hung" in printed[-12000:]


ONE_CASE = """
import sys
from pathlib import Path
import torch
from benchmarks.gpu import compile_only, kit
if sys.argv[1] == "elsewhere":
    import triton.runtime.cache as cache
    from triton.compiler import compiler
    other = lambda: "another build of Triton"
    cache.triton_key = other
    print(kit.unpack(Path(sys.argv[2]), "90a", Path(sys.argv[3]), Path(sys.argv[2])).describe())
compile_only.install(90)
launched = compile_only.collect() if sys.argv[1] == "here" else {}
from transformer_kernels import verification
for _ in verification.run_case(verification.cases(["gelu"], ["float32"])[0], "triton", torch.device("cpu")):
    pass
if launched:
    assert compile_only.compile_all(launched, Path(sys.argv[2]), float("-inf")) == len(launched)
    assert compile_only.compile_all(launched, Path(sys.argv[2]), float("inf")) == 0
"""


def test_kernels_of_the_kit_are_found_by_another_build_of_triton(tmp_path, monkeypatch):
    """Triton's keys contain the hash of its library, which differs from one Python to the next."""
    made, folder, keys = tmp_path / "cache", tmp_path / "run", tmp_path / "keys.jsonl"
    for name, value in (("TRITON_INTERPRET", "0"), ("TRANSFORMER_KERNELS_EMULATE", "0"), ("PYTHONPATH", str(ROOT))):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(made))
    subprocess.run([sys.executable, "-c", ONE_CASE, "here", str(keys)], check=True)
    packed = tmp_path / "kit"
    packed.mkdir()
    kit.collect(made, keys, packed)
    kernels = json.loads((packed / "kernels.json").read_text())
    described = {"architecture": "90a", "extension": "", "conformance": "", "triton": kit.triton_version()}
    (packed / kit.DESCRIPTION).write_text(json.dumps(described | {"kernels": kernels}))
    kit.pack(packed, tmp_path / "kit.tar.xz", len(kernels))

    folder.mkdir()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder / "triton"))
    command = [sys.executable, "-c", ONE_CASE, "elsewhere", str(folder), str(tmp_path / "kit.tar.xz")]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert f"{len(kernels)} Triton kernels" in printed and "extension is of other sources" in printed
    assert len(kernels) >= 2 and len(list((folder / "triton").iterdir())) == len(kernels), "something was compiled"
