"""The output of `transformer-kernels info`."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version

import torch

from transformer_kernels.backends import cpu as _cpu
from transformer_kernels.backends import cuda as _cuda
from transformer_kernels.backends import triton as _triton
from transformer_kernels.backends.dispatch import AUTO_ORDER, AUTO_ORDER_ELSEWHERE, BACKENDS, unavailable
from transformer_kernels.verification import trust

PACKAGES = (
    "numpy",
    "tiktoken",
    "tqdm",
    "safetensors",
    "scikit-learn",
    "PyYAML",
    "tensorboard",
    "pyarrow",
    "matplotlib",
)


def describe_installation() -> str:
    """Versions, devices, and the backends, with the reasons why some are unavailable."""
    sections = [_versions(), _devices(), _backends()]
    return "\n\n".join("\n".join([title, *(f"  {line}" for line in lines)]) for title, lines in sections if lines)


def _versions() -> tuple[str, list[str]]:
    lines = [
        f"{'python':<20} {platform.python_version()} on {platform.system()} {platform.machine()}",
        f"{'torch':<20} {torch.__version__}, CUDA {torch.version.cuda or 'none'}",
        f"{'triton':<20} {_installed('triton')} (supported: {_triton.SUPPORTED_VERSIONS})",
        *(f"{package:<20} {_installed(package)}" for package in PACKAGES),
    ]
    return "versions", lines


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _devices() -> tuple[str, list[str]]:
    reason = _cpu.unavailable(torch.device("cpu"))
    used = _cpu.describe() if reason is None else "dropout in tensor algebra (slow)"
    lines = [f"cpu: {os.cpu_count()} cores, PyTorch uses {torch.get_num_threads()} threads; {used}"]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        lines.append(
            f"cuda:{index}: {properties.name}, sm_{properties.major}{properties.minor}, "
            f"{properties.total_memory / 2**30:.0f} GiB, {properties.multi_processor_count} multiprocessors"
        )
    if not torch.cuda.is_available():
        lines.append("no GPU that PyTorch can use: backend='auto' runs on the CPU")
    return "devices", lines


def _backends() -> tuple[str, list[str]]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    reasons = {backend: unavailable(backend, device) for backend in BACKENDS}
    lines = [f"{backend:<10} {reason or 'available'}" for backend, reason in reasons.items()]
    order = AUTO_ORDER.get(device.type, AUTO_ORDER_ELSEWHERE)
    note = _cuda.build_note().splitlines()
    lines += [f"{'':<10} CUDA extension: {note[0]}"] if note else []
    lines += [f"{'auto':<10} tries {', then '.join(order)}"]
    return f"backends on {device.type}", lines + (trust.table(device) if device.type == "cuda" else [])
