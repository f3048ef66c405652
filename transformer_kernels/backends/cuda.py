"""The compiled CUDA kernels, loaded once; a failure to load is cached.

With TRANSFORMER_KERNELS_EMULATE=1 the same kernel sources, built for the CPU, are loaded and run on CPU tensors.
TRANSFORMER_KERNELS_EMULATE_SANITIZER=address or thread selects an instrumented build.
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import os
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from transformer_kernels.backends import Backend, register
from transformer_kernels.backends import build as _build
from transformer_kernels.backends.errors import BackendUnavailable

DTYPE_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # csrc/cuda/dtype.h
BLOCKS_PER_MULTIPROCESSOR = 4
ROWS_PER_THREAD_GROUP = 4
COLUMN_TILE_ROWS = 8  # rows per tile in csrc/cuda/kernels/bias_activation_forward.cuh
MAX_COLUMNS_PER_WARP = 1024  # csrc/cuda/kernels/row.cuh: up to this width a block has four rows, above it one
PACKAGE = Path(__file__).resolve().parents[1]
HASH_FILE = "_kernels_source_hash.txt"

_lock = threading.Lock()
_module: Any = None
_failure: BackendUnavailable | None = None
_device_reasons: dict[torch.device, str | None] = {}


def emulating() -> bool:
    """Whether this process runs the CUDA kernels on the CPU."""
    return os.environ.get("TRANSFORMER_KERNELS_EMULATE", "") == "1"


def load() -> Any:
    """The compiled module; raises BackendUnavailable, with the cause chained, if it cannot be loaded."""
    global _module, _failure
    if _module is not None:
        return _module
    with _lock:
        if _module is None and _failure is None:
            try:
                _module = _load_emulated() if emulating() else _load_built()
            except BackendUnavailable as error:
                _failure = error
    if _failure is not None:
        raise BackendUnavailable(str(_failure)) from _failure.__cause__
    return _module


def unavailable(device: torch.device) -> str | None:
    """Why the CUDA kernels cannot run on tensors of this device, with the remedy, or None."""
    if device not in _device_reasons:
        _device_reasons[device] = _why_unavailable(device)
    return _device_reasons[device]


def _why_unavailable(device: torch.device) -> str | None:
    if device.type == "cpu" and not emulating():
        return (
            "the tensors are on the CPU; move them to a GPU, or set TRANSFORMER_KERNELS_EMULATE=1 to run the kernels "
            "on the CPU (slow, for tests)"
        )
    if device.type == "cuda" and emulating():
        return "TRANSFORMER_KERNELS_EMULATE=1 is set, which runs CPU tensors only; unset it to use the GPU"
    if device.type not in ("cpu", "cuda"):
        return f"no kernels for {device.type} tensors; move them to a CUDA device"
    try:
        module = load()
    except BackendUnavailable as error:
        return str(error)
    if device.type == "cpu":
        return None
    problem = module.device_problem(device.index or 0)
    if problem:
        return (
            f"{problem}; the extension was built for {module.architectures}: reinstall with "
            "TRANSFORMER_KERNELS_CUDA_ARCHS naming this GPU"
            if "kernel image" in problem
            else problem
        )
    return None


def cause() -> BaseException | None:
    """The error that prevented loading, to be chained."""
    return None if _failure is None else _failure.__cause__


def bind(kernel: str, device: torch.device, **fields: Any) -> Any:
    """A kernel with these fields, launched on the stream that is current at each call."""
    index = device.index
    if device.type != "cuda":
        return getattr(load(), kernel)(**fields, device=0, stream=0)
    launch, current_stream = getattr(load(), kernel)(**fields, device=index), torch._C._cuda_getCurrentRawStream
    return lambda *tensors: launch(*tensors, current_stream(index))


def parameter(parameter: torch.Tensor | None) -> torch.Tensor | None:
    """The parameter itself: kernels read it in its own dtype."""
    return parameter


def index(ids: torch.Tensor | None) -> torch.Tensor | None:
    """The indices themselves, int32 or int64."""
    return ids


def allocator(device: torch.device) -> Any:
    """`torch.empty_strided` on this device."""
    return lambda sizes, strides, dtype: torch.empty_strided(sizes, strides, dtype=dtype, device=device)


def sum_like(parameter: torch.Tensor, wanted: bool) -> torch.Tensor | None:
    """Memory for a parameter's gradient, which is computed wanted or not."""
    return torch.empty_like(parameter, memory_format=torch.contiguous_format)


def workspace(like: torch.Tensor) -> torch.Tensor:
    """Memory for an intermediate result with the shape and dtype of a tensor."""
    return torch.empty_like(like)


def partials(x: torch.Tensor, rows: int, columns: int, sums: int, by_columns: bool = False) -> tuple[torch.Tensor, int]:
    """Memory for the partial sums of a kernel over whole rows, or over tiles of columns, and its number of rows.

    Each block writes one row. A block has at least four rows per group of threads, which limits the traffic of partial
    rows, and blocks are at most as many as run concurrently. Sums are bitwise equal on equal devices only.
    """
    rows_per_block = COLUMN_TILE_ROWS if by_columns else 4 if columns <= MAX_COLUMNS_PER_WARP else 1
    blocks = -(-rows // (ROWS_PER_THREAD_GROUP * rows_per_block))
    count = min(blocks, BLOCKS_PER_MULTIPROCESSOR * _multiprocessors(x.device.index or 0))
    return x.new_empty((sums, count, columns), dtype=torch.float32), count


@functools.cache
def _multiprocessors(device_index: int) -> int:
    return load().multiprocessors(device_index)


def _load_emulated() -> Any:
    sanitizer = os.environ.get("TRANSFORMER_KERNELS_EMULATE_SANITIZER", "")
    try:
        path = _build.build_emulated(sanitizer)
        return _import_from(path)
    except (OSError, ImportError, ValueError, _build.BuildError) as error:
        raise BackendUnavailable(f"the emulated CUDA kernels could not be built: {error}") from error


def _load_built() -> Any:
    path = _built_file()
    if path is None:
        raise BackendUnavailable(f"the CUDA extension is not built: {build_note() or _build.NO_NVCC}")
    try:
        module = _import_from(path)
    except (OSError, ImportError) as error:
        raise BackendUnavailable(
            f"the CUDA extension {path.name} does not load ({error}): it is broken or was built for another Python; "
            "reinstall with pip install --force-reinstall --no-deps ."
        ) from error
    _refuse_stale(module, path)
    return module


def build_note() -> str:
    """The installation's note: the GPU architectures built, or why none was; empty without a note."""
    note = PACKAGE / _build.BUILD_NOTE
    return note.read_text().strip() if note.is_file() else ""


def _built_file() -> Path | None:
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = PACKAGE / f"_kernels{suffix}"
        if path.is_file():
            return path
    return None


def _import_from(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("transformer_kernels._kernels", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not an extension module")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _refuse_stale(module: Any, path: Path) -> None:
    """Raise if the hash in the file differs from the hash of the checkout's sources or of the installation."""
    recorded = path.with_name(HASH_FILE)
    if _build.CSRC.is_dir():
        expected = _build.source_hash()
    elif recorded.is_file():
        expected = recorded.read_text().strip()
    else:
        return
    found = getattr(module, "source_hash", "none")
    if found != expected:
        cause = ImportError(f"{path}: built from sources {found[:16]}, expected {expected[:16]}")
        raise BackendUnavailable(
            f"the CUDA extension {path.name} was built from other sources ({found[:16]}, expected {expected[:16]}): "
            "rebuild it with python setup.py build_ext --inplace, or reinstall with pip install ."
        ) from cause


def _refused_dtype(device: torch.device, dtype: torch.dtype) -> str | None:
    if dtype is not torch.bfloat16 or (found := load().architecture(device.index or 0)) >= 80:
        return None
    return (
        f"bfloat16 needs compute capability 8.0 or newer (Ampere); this GPU has {found // 10}.{found % 10}: use "
        "float16 or float32, or backend='torch'"
    )


register(Backend("cuda", {"cuda": 1}, unavailable, cause, sys.modules[__name__], _refused_dtype))
