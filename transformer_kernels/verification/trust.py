"""Whether "auto" may use a kernel on a device: its smoke cases are run there once, and the verdict is kept.

A verdict holds for one device, driver, release of PyTorch and Triton, and for the kernels' sources. It is kept in
the package's cache (`~/.cache/transformer_kernels`). TRANSFORMER_KERNELS_VERIFY=0 turns the check off.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from transformer_kernels import verification
from transformer_kernels.backends import cpu, cuda, dispatch
from transformer_kernels.backends.build import cache_folder
from transformer_kernels.backends.errors import BackendUnavailable
from transformer_kernels.verification import BAD, DTYPES, VARIABLE, Verdict

SECONDS = 60.0
"""The limit of the cases of one operation and dtype: a compiler's time on a loaded machine."""
PACKAGE = Path(__file__).resolve().parents[1]
DEVICES = ("cuda",)
"""Types of device whose kernels are verified before "auto" uses them; the CPU's are verified by the test suite."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def folder() -> Path:
    """Where verdicts are kept."""
    return cache_folder() / "verdicts"


@functools.cache
def fingerprint(backend: str, device: torch.device) -> str:
    """The key of a verdict, as text: device, driver, versions, kernels."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        where = f"{properties.name} sm_{properties.major}{properties.minor}, driver {_driver()}"
    else:
        where = f"{platform.machine()} {cpu.describe() if backend == 'cpu' else 'CPU'}"
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = "none"
    return f"{where}, torch {torch.__version__}, triton {triton}, kernels {_kernels(backend)}"


def _driver() -> str:
    try:
        return Path("/proc/driver/nvidia/version").read_text().splitlines()[0].strip()
    except OSError:
        return "unknown"


def _kernels(backend: str) -> str:
    """The hash of a backend's kernels: of the Python sources, or of the compiled module."""
    if backend == "triton":
        files = sorted([*PACKAGE.glob("ops/**/_triton*.py"), *PACKAGE.glob("backends/triton*.py")])
    else:
        module = (cpu if backend == "cpu" else cuda).load()
        files = [Path(module.__file__)]
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def _path(backend: str, device: torch.device) -> Path:
    name = hashlib.sha256(fingerprint(backend, device).encode()).hexdigest()[:16]
    return folder() / f"{backend}-{name}.json"


def recorded(backend: str, device: torch.device) -> list[Verdict]:
    """The verdicts that are kept for a device; none where the file is missing or unreadable."""
    try:
        entries = json.loads(_path(backend, device).read_text())["verdicts"]
        return [Verdict(**entry) for entry in entries]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def store(backend: str, device: torch.device, verdicts: Iterable[Verdict]) -> None:
    """Store verdicts, replacing stored verdicts of the same operations and dtypes."""
    verdicts = list(verdicts)
    renewed = {(verdict.op, verdict.dtype) for verdict in verdicts}
    kept = [verdict for verdict in recorded(backend, device) if (verdict.op, verdict.dtype) not in renewed]
    path = _path(backend, device)
    described = {"fingerprint": fingerprint(backend, device), "verdicts": list(map(asdict, [*kept, *verdicts]))}
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(described, indent=1) + "\n")
    os.replace(temporary, path)


_known: dict[tuple[str, str, torch.dtype, torch.device], str | None] = {}


def distrusted(op: str, backend: str, call: Any) -> str | None:
    """Why "auto" does not use a backend's kernel of an operation on the device of a call; None if it may.

    The first question about an operation and dtype on a device runs its smoke cases, in a process of its own.
    """
    device = call[0].device
    if backend == "torch" or device.type not in DEVICES or os.environ.get(VARIABLE) == "0":
        return None
    dtype = next(value.dtype for value in call if isinstance(value, torch.Tensor) and value.is_floating_point())
    key = op, backend, dtype, device
    if key not in _known:
        _known[key] = _judge(op, backend, NAMES[dtype], device)
    return _known[key]


def _judge(op: str, backend: str, dtype: str, device: torch.device) -> str | None:
    found = [verdict for verdict in recorded(backend, device) if (verdict.op, verdict.dtype) == (op, dtype)]
    reason = None
    if not found:
        try:
            found = verification.verify(backend, device, verification.cases([op], [dtype]), SECONDS)
            store(backend, device, found)
        except (OSError, RuntimeError) as error:  # no process can be started, or the cache cannot be written
            reason = None if found else f"its smoke cases could not be run: {error}"
    if not found and reason is None:
        reason = f"its smoke cases had no result within {SECONDS:.0f} s"
    if (bad := next((verdict for verdict in found if verdict.outcome in BAD), None)) is not None:
        reason = f"verification on this device: {bad.case}, {bad.direction}: {bad.outcome}: {bad.why}"
    if reason is not None:
        warnings.warn(
            f"{op} in {dtype}: auto leaves out the {backend} kernel. {reason}. "
            f"`transformer-kernels verify-device` repeats the check",
            stacklevel=2,
        )
    return reason


def forget() -> None:
    """Ask the files again at the next call."""
    _known.clear()
    fingerprint.cache_clear()
    for operation in dispatch.OPERATIONS.values():
        operation.forget_plans()


def verify_device(device: torch.device, backends: Sequence[str] | None, operations: Sequence[str] | None) -> int:
    """Run all smoke cases on a device, print and keep the verdicts; 1 if a kernel is left out.

    Args:
        device: the device.
        backends: their names; all that are available unless given.
        operations: their names; all unless given.

    Raises:
        BackendUnavailable: the device is a GPU, and there is none.
        ValueError: an operation is unknown.
    """
    if device.type == "cuda" and not torch.cuda.is_available():
        raise BackendUnavailable("verify-device: this PyTorch sees no GPU; --device cpu verifies the CPU kernels")
    status = 0
    for backend in backends or [name for name in dispatch.BACKENDS if name != "torch"]:
        if (reason := dispatch.unavailable(backend, device)) is not None:
            print(f"{backend:<10} not available: {reason}")
            continue
        listed = verification.cases(operations)
        found = verification.verify(backend, device, listed, SECONDS * len(listed), found=_print_bad)
        store(backend, device, found)
        status |= int(any(verdict.outcome in BAD for verdict in found))
    print("\n".join(table(device)))
    return status


def _print_bad(verdict: Verdict) -> None:
    if verdict.outcome in BAD:
        print(
            f"{verdict.backend:<10} {verdict.case}, {verdict.direction}: {verdict.outcome}: {verdict.why}", flush=True
        )


def table(device: torch.device) -> list[str]:
    """A line for each backend and outcome of the verdicts on a device."""
    lines = []
    for backend in dispatch.BACKENDS:
        if backend == "torch" or dispatch.unavailable(backend, device) is not None:
            continue
        verdicts = recorded(backend, device)
        kernels = {(verdict.op, verdict.dtype) for verdict in verdicts}
        bad = sorted({(verdict.op, verdict.dtype, verdict.outcome) for verdict in verdicts if verdict.outcome in BAD})
        state = f"{len(kernels)} kernels and dtypes verified" if kernels else "not verified on this device yet"
        lines.append(f"{backend:<10} {state}" + (f", {len(bad)} left out" if bad else ""))
        lines += [f"{'':<10} {op} in {dtype}: {outcome}" for op, dtype, outcome in bad]
    return lines
