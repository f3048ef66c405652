"""The calls whose launches represent all launches of the row kernels: every tile and variant.

Public calls on CPU tensors, forward and backward. A tile covers the widths between two powers of two, so powers of two
cover all tiles; launches common to several calls are compiled once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import transformer_kernels as tk
from benchmarks.compilers.launches import Launch
from transformer_kernels.backends import dispatch
from transformer_kernels.ops.loss._calls import RowLoss

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
WIDTHS = tuple(2**power for power in range(4, 17))
WIDTHS_OF_VARIANTS = (128, 1024, 8192, 65536)
WIDTHS_OF_OPTIONS = (1024, 65536)
"""For options with little effect on a kernel: a row in registers, and a row in two passes."""
ROWS = 2

Arguments = dict[str, Any]
Make = Callable[[torch.dtype, int, int], dict[str, Arguments]]
"""(dtype, rows, width) -> arguments of each variant."""


def _like(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=dtype, requires_grad=True)


def _softmax(dtype: torch.dtype, rows: int, width: int) -> dict[str, Arguments]:
    x = _like(dtype, rows, width)
    mask = torch.ones(x.shape, dtype=torch.bool)
    return {"": {"x": x}, " mask": {"x": x, "mask": mask}, " causal": {"x": x, "causal": True}}


def _gelu(dtype: torch.dtype, rows: int, width: int) -> dict[str, Arguments]:
    x = _like(dtype, rows, width)
    return {f" {approximate}": {"x": x, "approximate": approximate} for approximate in ("none", "tanh")}


def _bias_gelu(dtype: torch.dtype, rows: int, width: int) -> dict[str, Arguments]:
    return {label: {**given, "bias": _like(dtype, width)} for label, given in _gelu(dtype, rows, width).items()}


def _bias_relu(dtype: torch.dtype, rows: int, width: int) -> dict[str, Arguments]:
    return {"": {"x": _like(dtype, rows, width), "bias": _like(dtype, width)}}


def _layer_norm(dtype: torch.dtype, rows: int, width: int) -> dict[str, Arguments]:
    return {"": {"x": _like(dtype, rows, width), "weight": _like(dtype, width), "bias": _like(dtype, width)}}


def _add_layer_norm(dtype: torch.dtype, rows: int, width: int) -> dict[str, Arguments]:
    given = {**_layer_norm(dtype, rows, width)[""], "residual": _like(dtype, rows, width)}
    return {"": given, " dropout": {**given, "dropout_p": 0.1}}


def _cross_entropy(dtype: torch.dtype, rows: int, width: int) -> dict[str, Arguments]:
    given = {"logits": _like(dtype, rows, width), "targets": torch.zeros(rows, dtype=torch.int64)}
    every = {"weight": torch.ones(width), "z_loss": 0.1, "softcap": 30.0, "label_smoothing": 0.1}
    options = {" options": {**given, **every}} if dtype is torch.bfloat16 and width in WIDTHS_OF_OPTIONS else {}
    return {"": given, " smooth": {**given, "label_smoothing": 0.1}, " sum": {**given, "reduction": "sum"}, **options}


def _in_place(dtype: torch.dtype, rows: int, width: int) -> dict[str, Arguments]:
    given = {"logits": torch.zeros(rows, width, dtype=dtype), "targets": torch.zeros(rows, dtype=torch.int64)}
    padded = {**given, "logits": given["logits"][:, :-1]}
    smooth = {" in place smooth": {**padded, "options": RowLoss(-100, 0.1)}}
    if dtype is torch.bfloat16 and width in WIDTHS_OF_OPTIONS:
        smooth[" in place options"] = {**padded, "options": RowLoss(-100, 0.1, torch.ones(width), 0.1, 30.0)}
    return {" in place": given, " in place padded": padded, **smooth}


def _embedding(dtype: torch.dtype, rows: int, width: int) -> dict[str, Arguments]:
    tokens = torch.arange(rows)[None]
    given = {"tokens": tokens, "weight": _like(dtype, rows, width), "positions": _like(dtype, rows, width)}
    norm = {"norm_weight": _like(dtype, width), "norm_bias": _like(dtype, width), "position_ids": tokens}
    dropped = {**given, "dropout_p": 0.1}
    return {" dropout": dropped} | ({" norm": {**dropped, **norm}} if width <= 8192 else {})


def _rms_norm(dtype: torch.dtype, rows: int, width: int) -> dict[str, Arguments]:
    return {"": {"x": _like(dtype, rows, width), "weight": _like(dtype, width)}}


def _add_rms_norm(dtype: torch.dtype, rows: int, width: int) -> dict[str, Arguments]:
    given = {**_rms_norm(dtype, rows, width)[""], "residual": _like(dtype, rows, width)}
    return {"": given, " dropout": {**given, "dropout_p": 0.1}}


def _swiglu(dtype: torch.dtype, rows: int, width: int) -> dict[str, Arguments]:
    return {
        "": {"gate": _like(dtype, rows, width), "up": _like(dtype, rows, width)},
        " packed": {"gate": _like(dtype, rows, 2 * width)},
    }


def _geglu(dtype: torch.dtype, rows: int, width: int) -> dict[str, Arguments]:
    given = _swiglu(dtype, rows, width).items()
    return {
        f"{label} {approximate}": {**arguments, "approximate": approximate}
        for label, arguments in given
        for approximate in ("none", "tanh")
    }


def _rotary(dtype: torch.dtype, rows: int, width: int) -> dict[str, Arguments]:
    """Heads of `width` columns, all rotated."""
    cos, sin = (torch.ones(rows, width // 2) for _ in range(2))
    heads = {"q": _like(dtype, 1, 4, rows, width), "k": _like(dtype, 1, 2, rows, width), "cos": cos, "sin": sin}
    return {"": heads, " interleaved": {**heads, "interleaved": True}} if width <= 256 else {}


CALLS: dict[str, tuple[Make, ...]] = {
    "softmax": (_softmax,),
    "layer_norm": (_layer_norm,),
    "add_layer_norm": (_add_layer_norm,),
    "gelu": (_gelu,),
    "bias_gelu": (_bias_gelu,),
    "bias_relu": (_bias_relu,),
    "cross_entropy": (_cross_entropy, _in_place),
    "embedding": (_embedding,),
    "rms_norm": (_rms_norm,),
    "add_rms_norm": (_add_rms_norm,),
    "swiglu": (_swiglu,),
    "geglu": (_geglu,),
    "rotary": (_rotary,),
}
"""The arguments of each operation with its own kernels, by variant."""

EVERYWHERE = {"", " none", " tanh", " dropout", " norm", " in place", " in place padded"}
"""The variants that every width is compiled for; the others are compiled at `WIDTHS_OF_VARIANTS`."""


def calls(operation: str) -> Iterator[tuple[str, Callable[[], object]]]:
    """Labels, and forward and backward passes, for `launches.record`."""
    for make in CALLS[operation]:
        for element, dtype in DTYPES.items():
            for width in WIDTHS:
                for variant, arguments in make(dtype, ROWS, width).items():
                    if variant in EVERYWHERE or width in WIDTHS_OF_VARIANTS:
                        label = f"{operation}{variant} {element} {width}"
                        yield label, functools.partial(run, operation, make, arguments)


def run(operation: str, make: Make, arguments: Arguments, backend: str = "triton") -> None:
    """Forward and backward through the public function; the in-place kernels of cross_entropy directly."""
    if make is _in_place:
        kernels = dispatch.family("transformer_kernels.ops.loss", "triton")
        kernels.row_losses(**{"options": RowLoss(-100, 0.0), **arguments}, in_place=True)
        return
    outputs = getattr(tk, operation)(**arguments, backend=backend)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    leaves = [each for each in arguments.values() if isinstance(each, Tensor) and each.requires_grad]
    torch.autograd.grad(outputs, leaves, [torch.zeros_like(output) for output in outputs])


REDUCTIONS = ("sum_partials_kernel", "sum_losses_kernel")
"""Kernels with negligible traffic, for which the access width is irrelevant."""


def gates(launch: Launch) -> frozenset[str]:
    """The gates of a launch; all rows above are aligned."""
    found = {"no_spills"}
    if launch.kernel_name not in REDUCTIONS:
        found.add("wide_loads")
        if launch.constant("GRADIENT") is not False:  # cross-entropy without a gradient writes a few numbers per row
            found.add("wide_stores")
    return frozenset(found)
