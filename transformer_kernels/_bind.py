"""The operations bound to one backend, and the preset models built on them."""

from __future__ import annotations

import functools
import inspect
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor

from transformer_kernels import ops
from transformer_kernels.backends import cpu
from transformer_kernels.backends.dispatch import OPERATIONS, requested

if TYPE_CHECKING:
    from python_ref.layers import Transformer


class BoundOperations:
    """The operations under the names and signatures of `python_ref.ops`, run by one backend.

    Two objects are equal if their backends are; copying and pickling keep only the backend's name.
    """

    def __init__(self, backend: str | None) -> None:
        self.backend = None if backend is None else requested(backend)
        for name in OPERATIONS:
            setattr(self, name, _without_backend(getattr(ops, name), self.backend))

    def add_dropped(self, x: Tensor, residual: Tensor, p: float) -> Tensor:
        """dropout(x) + residual, as `add_rms_norm` computes it, whose norm is not used."""
        if p == 0.0 or cpu.is_reproducible():  # which draws dropout's masks of its own
            return residual + F.dropout(x, p)
        weight = residual.new_ones(x.shape[-1])
        return ops.add_rms_norm(x, residual, weight, dropout_p=p, backend=self.backend)[1]

    def __repr__(self) -> str:
        return f"transformer_kernels.bind({self.backend!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BoundOperations) and self.backend == other.backend

    def __hash__(self) -> int:
        return hash(self.backend)

    def __reduce__(self) -> Any:
        return BoundOperations, (self.backend,)


def _without_backend(operation: Any, backend: str | None) -> Any:
    bound = functools.partial(operation, backend=backend)
    signature = inspect.signature(operation)
    parameters = [parameter for name, parameter in signature.parameters.items() if name != "backend"]
    bound.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    functools.update_wrapper(
        bound, operation, assigned=("__module__", "__name__", "__qualname__", "__doc__"), updated=()
    )
    del bound.__wrapped__  # type: ignore[attr-defined]
    return bound


def bind(backend: str | None = None) -> BoundOperations | ModuleType:
    """The operations for a model: `python_ref.build("char_gpt", ops=transformer_kernels.bind("triton"))`.

    Args:
        backend: "torch", "cpu", "triton", "cuda", "auto", "reference" (returns `python_ref.ops` itself), or None to
            follow `set_backend`, `use_backend` and the environment at each call.

    Returns:
        an object with every operation as a function, under its name in `python_ref.ops`.

    Raises:
        ValueError: the name is unknown.
    """
    if backend == "reference":
        from python_ref import ops as reference

        return reference
    return BoundOperations(backend)


def build(name: str, backend: str | None = None, **overrides: Any) -> Transformer:
    """Build a preset model with newly initialised weights; `backend` runs its operations.

    The model definition is `python_ref.build(name, ops=...)`. Only the operations differ, so state dicts are
    interchangeable between backends.

    Args:
        name: one of `python_ref.PRESETS`.
        backend: "torch", "cpu", "triton", "cuda", "auto", "reference", or None to follow `set_backend`, `use_backend`
            and the environment at each call.
        overrides: fields of the preset's configuration, such as `dropout=0.0` or `vocab_size=96`.

    Returns:
        the model: `python_ref.GPT`, `python_ref.BERTClassifier` or another class; see its `forward`.

    Raises:
        ValueError: no such preset or backend, or the value of a field is invalid.
        TypeError: no such field.

    Examples:
        >>> model = build("char_gpt", backend="torch", layers=2, dropout=0.0)
        >>> model(torch.randint(65, (1, 16))).shape  # logits
        torch.Size([1, 16, 65])
    """
    from python_ref import build

    return build(name, ops=bind(backend), **overrides)
