"""Which operator makes the first value that is not finite: a step, run again with every operator checked."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from transformer_kernels.verification.layers import Layers

UNWRITTEN = ("empty", "new_empty")
"""Operators whose results are not written yet."""
FINITE, INFINITE, NAN = range(3)


@dataclass(frozen=True)
class NonFinite:
    """The first value that is not finite.

    Attributes:
        operator: of PyTorch ("aten::log") or of this package ("transformer_kernels::attention").
        layer: the path of its module; "" outside of modules.
        direction: "forward" or "backward".
        row: the index of the value in all axes but the last.
        inputs_finite: whether the operator got finite values only, and so made it.
    """

    operator: str
    layer: str
    direction: str
    row: tuple[int, ...]
    inputs_finite: bool

    def __str__(self) -> str:
        where = f" in {self.layer}" if self.layer else ""
        inputs = "its inputs are finite" if self.inputs_finite else "an input is not finite either"
        return f"not finite: {self.operator}{where}, {self.direction}, row {self.row}; {inputs}"


def first_non_finite(step: Callable[[], Any], layers: Layers | None = None) -> NonFinite | None:
    """Run a step and name the operator that makes its first non-finite value; None if all stay finite.

    An infinity that was given (a mask's -inf) is not counted until an operator makes NaN of it. Compiled code is run as
    it was before compilation, which names its modules; if all stay finite there, the step is run again, compiled.

    Args:
        step: forward and backward; its writes are not undone, and an exception that it raises ends it.
        layers: of a certificate.

    Returns:
        the first `NonFinite`; of a NaN that the step was given, the first operator that passes it on.

    Examples:
        >>> x = torch.tensor([[1.0], [0.0]], requires_grad=True)
        >>> print(first_non_finite(lambda: x.sqrt().sum().backward()))
        not finite: aten::div, backward, row (1,); its inputs are finite
    """
    found = None
    with nullcontext(layers) if layers is not None else Layers() as layers:
        if "torch._dynamo" in sys.modules:
            with torch.compiler.set_stance("force_eager"):
                found = _found(step, layers)
        return found or _found(step, layers)


def _found(step: Callable[[], Any], layers: Layers) -> NonFinite | None:
    with _Finder(layers) as finder:
        try:
            step()
        except Exception:
            if finder.found is None:
                raise
    return finder.found


class _Finder(TorchDispatchMode):
    """Looks at what goes into and comes out of every operator until it has found one."""

    def __init__(self, layers: Layers) -> None:
        super().__init__()
        self._layers = layers
        self.found: NonFinite | None = None

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.found is not None:
            return function(*args, **(kwargs or {}))
        given = _worst((args, kwargs))
        result = function(*args, **(kwargs or {}))
        name = function._schema.name
        if name.partition("::")[2].startswith(UNWRITTEN):
            return result
        came_out = _worst(result)
        if came_out > given or came_out == NAN:
            layer, is_backward = self._layers.current()
            direction = "backward" if is_backward else "forward"
            self.found = NonFinite(name, layer, direction, _row(result), given == FINITE)
        return result


def _worst(values: Any) -> int:
    """NAN if there is one, INFINITE with an infinity, else FINITE."""
    worst = FINITE
    for leaf in pytree.tree_leaves(values):
        if isinstance(leaf, float) and not math.isfinite(leaf):
            worst = max(worst, NAN if math.isnan(leaf) else INFINITE)
        elif isinstance(leaf, Tensor) and leaf.is_floating_point() and not bool(torch.isfinite(leaf).all()):
            worst = max(worst, NAN if bool(torch.isnan(leaf).any()) else INFINITE)
    return worst


def _row(result: Any) -> tuple[int, ...]:
    """The index of the first non-finite value, NaN before infinities, in all axes but the last."""
    tensors = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    for unusual in (torch.isnan, lambda x: ~torch.isfinite(x)):
        for tensor in tensors:
            if bool((found := unusual(tensor)).any()):
                return tuple(torch.nonzero(found)[0].tolist()[: max(tensor.dim() - 1, 0)])
    return ()
