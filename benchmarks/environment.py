"""The environment of a measurement."""

from __future__ import annotations

import datetime
import hashlib
import os
import platform
import re
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from transformer_kernels import __version__
from transformer_kernels.backends import cpu

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("benchmarks/*.py", "csrc/**/*", "python_ref/**/*.py", "transformer_kernels/**/*.py")
PEER_PACKAGES = ("liger_kernel", "quack-kernels")


def environment(device: torch.device) -> dict[str, Any]:
    """The environment of every row, and details that a record stores once."""
    return {
        "device": device_name(device),
        "device_type": device.type,
        "capability": list(torch.cuda.get_device_capability(device)) if device.type == "cuda" else None,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "triton": installed("triton"),
        "cuda": torch.version.cuda,
        "driver": driver_version() if device.type == "cuda" else None,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "transformer_kernels": __version__,
        "peers": {package: installed(package) for package in PEER_PACKAGES},
        "commit": commit(),
        "sources": source_hash(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


STAMP = ("device", "torch", "triton", "driver", "commit", "date")
"""The part of the environment that each row contains."""


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).name
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    described = dict(re.findall(r"^(cpu family|model|model name)\s*:\s*(.+)", text, re.MULTILINE))
    name = described.get("model name") or platform.processor() or "CPU"
    name = re.sub(r"\((R|TM)\)|\b(CPU|Processor)\b|@.*", " ", name)
    if not re.search(r"\d", name) and len(described) == 3:  # virtual machines name no model: "AMD EPYC"
        name += f" {described['cpu family']}-{described['model']}"
    level = "" if cpu.unavailable(device) else f" {cpu.load().instruction_set()},"
    return f"{' '.join(name.split()) or 'CPU'},{level} {torch.get_num_threads()} threads"


def folder_name(environment: dict[str, Any]) -> str:
    """The folder of a device's record in benchmarks/results."""
    return re.sub(r"[^a-z0-9]+", "-", environment["device"].lower()).strip("-")


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def driver_version() -> str | None:
    return _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "-i", "0")


def commit() -> str | None:
    """The commit of the checkout, with a + if sources differ from it; None without git."""
    head = _output("git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD")
    if head is None:
        return None
    changed = _output("git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no")
    return head + "+" if changed else head


def source_hash() -> str:
    """SHA-256 over all sources that compute or measure: compares checkouts without git."""
    digest = hashlib.sha256()
    for pattern in SOURCES:
        for path in sorted(ROOT.glob(pattern)):
            if path.suffix in (".py", ".h", ".cuh", ".cu", ".cpp"):
                digest.update(f"{path.relative_to(ROOT).as_posix()}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _output(*command: str) -> str | None:
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip().splitlines()[0] if result.returncode == 0 and result.stdout.strip() else None
