"""The device's arithmetic, compiled from the emulation of csrc."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shlex
import subprocess
from pathlib import Path

import numpy as np

from tests.support.ptx.types import Array
from transformer_kernels.backends import build

SOURCE = Path(__file__).with_name("hardware.cpp")
FLAGS = "-std=c++17 -O2 -frounding-math -fPIC -shared"
FUNCTIONS = ("ex2", "lg2", "rcp", "rsqrt", "sqrt", "tanh", "sin", "cos")
ROUNDINGS = ("rn", "rm", "rp", "rz")
OPERANDS = ("f16", "bf16", "tf32")
"""In the order of emulation::Operand."""


@functools.cache
def _library() -> ctypes.CDLL:
    emulation = build.CSRC / "emulation"
    sources = [
        SOURCE,
        *(emulation / name for name in ("tensor_core.cpp", "tensor_core.h", "approximations.h", "half_types.h")),
    ]
    compiler = build.find_host_compiler()
    text = "".join(path.read_text() for path in sources) + FLAGS + compiler
    folder = build.cache_folder() / "tests"
    path = folder / f"ptx-hardware-{hashlib.sha256(text.encode()).hexdigest()[:16]}.so"
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        temporary = f"{path}.{os.getpid()}"
        inputs = [f"-I{build.CSRC}", str(SOURCE), str(emulation / "tensor_core.cpp")]
        command = [*shlex.split(compiler), *FLAGS.split(), *inputs, "-o", temporary]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            raise RuntimeError(f"{shlex.join(command)}\n{result.stderr[-3000:]}")
        os.replace(temporary, path)
    return ctypes.CDLL(str(path))


def _pointer(values: Array) -> ctypes.c_void_p:
    return ctypes.c_void_p(values.__array_interface__["data"][0])


def _pointers(arrays: list[Array]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(arrays))(*(each.ctypes.data for each in arrays))


def _floats(values: Array, shape: tuple[int, ...]) -> Array:
    if isinstance(values, np.ndarray) and values.shape == shape and values.flags.c_contiguous:
        return values
    return np.ascontiguousarray(np.broadcast_to(values, shape), np.float32)


def mma(architecture: int, kind: str, depth: int, a: list[Array], b: list[Array], c: list[Array]) -> list[Array]:
    """Registers of the sum; each array has the 32 words of every warp."""
    d = [np.empty_like(each) for each in c]
    arguments = (architecture, OPERANDS.index(kind), depth, len(c[0]) // 32)
    _library().ptx_mma(*arguments, _pointers(a), _pointers(b), _pointers(c), _pointers(d))
    return d


def wgmma(architecture: int, kind: str, a: Array, b: Array, c: Array) -> Array:
    """c [tiles, 64, N] + a [tiles, 64, K] b [tiles, K, N], in fp32 with values of the type."""
    tiles, depth, columns = b.shape
    a, b, d = (np.ascontiguousarray(each, np.float32) for each in (a, b, c))
    d = d.copy() if d is c else d
    arguments = (architecture, OPERANDS.index(kind), columns, depth, tiles)
    _library().ptx_wgmma(*arguments, _pointer(a), _pointer(b), _pointer(d))
    return d


def approximate(function: str, x: Array, ftz: bool) -> Array:
    """`ex2.approx` and the like: within the ISA's error, up or down by the operand's bits."""
    shape = np.shape(x)
    x = _floats(x, shape)
    result = np.empty(shape, np.float32)
    count = ctypes.c_int64(x.size)
    _library().ptx_approximate(FUNCTIONS.index(function), int(ftz), count, _pointer(x), _pointer(result))
    return result


def divide(a: Array, b: Array, full: bool) -> Array:
    """`div.full.f32` or `div.approx.f32`."""
    shape = np.broadcast_shapes(np.shape(a), np.shape(b))
    a, b = _floats(a, shape), _floats(b, shape)
    result = np.empty(shape, np.float32)
    _library().ptx_divide(int(full), ctypes.c_int64(result.size), _pointer(a), _pointer(b), _pointer(result))
    return result


def fma(a: Array, b: Array, c: Array, rounding: str = "rn") -> Array:
    """a b + c in fp32, rounded once."""
    shape = np.broadcast_shapes(np.shape(a), np.shape(b), np.shape(c))
    given = [_floats(each, shape) for each in (a, b, c)]
    result = np.empty(shape, np.float32)
    pointers = [_pointer(each) for each in (*given, result)]
    _library().ptx_fma(ROUNDINGS.index(rounding), ctypes.c_int64(result.size), *pointers)
    return result
