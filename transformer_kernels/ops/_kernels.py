"""The interfaces between an operation, its calls (`Call`, `record`) and a backend's kernels (`Kernels`)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor

from transformer_kernels.backends import Machine

if TYPE_CHECKING:
    from transformer_kernels.ops._crossovers import Native

Grads = tuple[Any, ...]
"""The incoming gradients of a backward pass; with several outputs, None for an output without one."""

Wanted = tuple[bool, ...]
"""Which of the differentiable fields' gradients are wanted."""

C = TypeVar("C")


class Call:
    """The methods of a call that its operation uses, with their defaults."""

    check_when_run: ClassVar[Callable[[Any], None] | None] = None
    """(call) -> None: checks the values of a traced call, which has none before it runs."""

    as_run: ClassVar[Callable[[Any, str | None], Any] | None] = None
    """(call, backend) -> the call with the structure of its masks' current values, or itself. None: the operation has
    no masks. A recorded step calls it in each replay; other calls read masks when they are validated."""

    gradient_layout: ClassVar[Callable[[Tensor], Tensor]] = Tensor.contiguous
    """The layout in which kernels read the gradient of the first output."""

    def fake(self) -> Any:
        """Fake results for tracing: empty tensors, None for an absent one."""
        raise NotImplementedError

    def in_pytorch(self, outputs: int) -> tuple[Tensor, ...]:
        """The first public outputs by PyTorch's differentiable operators. They define all derivatives except the first
        gradients, which kernels compute."""
        raise NotImplementedError

    tangents: ClassVar[Callable[..., tuple[Tensor, ...]] | None] = None
    """(call, kernels, result, the tangent or None of each differentiable field) -> the tangents of the public outputs,
    by a backend's kernels. None: `in_pytorch` is differentiated."""

    def has_tangents(self, given: tuple[Tensor | None, ...]) -> bool:
        """Whether `tangents` supports the call and these tangents."""
        return True

    def second_order(self, result: Any, grads: Grads, wanted: Wanted) -> tuple[Tensor | None, ...] | None:
        """The gradients, differentiable, from a call without its `dropped` fields; None: `in_pytorch` is
        differentiated, with the kept results in place of these fields."""
        return None

    def folded(self) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
        """(fields, broadcast fields) whose first axis, the batch or the rows, can hold the samples of vmap: each index
        of it is computed independently. In broadcast fields it may be 1. None: PyTorch's operators compute the call
        under transforms of torch.func."""
        return None

    def is_empty(self) -> bool:
        """Whether there is nothing to launch; such calls run in PyTorch."""
        return not self[0].numel()  # type: ignore[index]

    def may_be_composed(self) -> bool:
        """Whether a backend may leave the call to other operators (`Kernels.composed`)."""
        return False

    def drops(self) -> bool:
        """Whether backward of this call does without the operation's `dropped` fields."""
        return True

    def described(self) -> tuple[str, ...]:
        """Tensor fields of which backward reads shape and dtype only: they may be written to before it."""
        return ()

    def native(self) -> Native | None:
        """PyTorch's own function that computes the same, if there is one."""
        return None

    def empty_gradients(self) -> tuple[Tensor | None, ...] | None:
        """Empty tensors laid out as the gradients are; None: contiguous ones."""
        return None


def record(cls: type[C]) -> type[C]:
    """Give a NamedTuple, which cannot have a base class, the defaults of `Call`."""
    for name, default in vars(Call).items():
        if not name.startswith("__") and name not in vars(cls):
            setattr(cls, name, default)
    return cls


class Kernels:
    """A backend's kernels for calls of one layout, constructed from the first such call.

    For backward, `call` and `result` hold None in the fields that are not kept; `grads` are the gradients of the
    public outputs, the first one in the layout of `Call.gradient_layout`.
    """

    machine: Any = None
    """The `Machine` of compiled kernels."""
    backend: Any = None
    """The backend whose kernels an `Adapter` calls."""
    forward_with_gradient: Any = None
    """(call) -> (result, the gradient of a loss) or None, with `scale_gradient(gradient, dloss)`, which multiplies the
    gradient in place; for the gradient of an intermediate result also `below(call, gradient, wanted)` -> gradients."""
    scale_gradient: Any = None
    below: Any = None
    composed: Any = None
    """Decomposition: (call, backend, whether autograd records it) -> the output if other operators compute the call
    (autograd then records these), None if `forward` computes it."""

    @classmethod
    def unsupported(cls, call: Any) -> str | None:
        """Why the backend does not support a call; None if it does."""
        return None

    @classmethod
    def of(cls, call: Any) -> Kernels:
        """The kernels for calls of this layout."""
        return cls(call)

    def __init__(self, call: Any) -> None:
        """Compute what depends on the layout alone."""

    def forward(self, call: Any) -> Any:
        """All results."""
        raise NotImplementedError

    def forward_recorded(self, call: Any) -> Any:
        """`forward` where one output is returned, with what backward needs."""
        return self.forward(call)

    def forward_alone(self, call: Any) -> Any:
        """`forward` where one output is returned and there is no backward."""
        return self.forward(call)

    def forward_tangent(self, call: Any, tangents: Any) -> tuple[Any, tuple[Tensor, ...]] | None:
        """The results, and tangents of the public ones, from the tangents of the differentiable fields (None: zero).

        None: `Call.tangents` computes the tangents from the results of `forward`.
        """
        return None

    def backward(self, call: Any, result: Any, grads: Grads, wanted: Wanted) -> tuple[Tensor | None, ...]:
        """The gradients of the differentiable fields; trailing ones that are never wanted may be left out."""
        raise NotImplementedError


class Compiled(Kernels):
    """Kernels of a compiled module. CPU and CUDA share one source; `on(machine)` returns the class for one of them."""

    machine: Machine

    @classmethod
    @functools.cache
    def on(cls, machine: Any) -> type[Compiled]:
        """The class for this machine."""
        return type(cls.__name__, (cls,), {"machine": machine, "__module__": cls.__module__})

    def __init__(self, call: Any) -> None:
        x = call[0]
        self._machine, self._device, self._dtype = self.machine, x.device, self.machine.DTYPE_CODES[x.dtype]

    def _are_float32(self, *parameters: Any) -> list[bool]:
        """Whether the machine's kernels read each of these parameters, or None, in float32."""
        read = map(self._machine.parameter, parameters)
        return [parameter is not None and parameter.dtype is torch.float32 for parameter in read]

    def _bind(self, kernel: str, **fields: Any) -> Any:
        """`Machine.bind` with the fields that follow the dtype in the kernel's structure."""
        return self._machine.bind(kernel, self._device, dtype=self._dtype, **fields)


class Adapter(Kernels):
    """Kernels of an operation that call the kernels of another one, `inner`, of the same backend."""

    inner: ClassVar[Any]
    backend: str
    _made: Any = None

    @classmethod
    @functools.cache
    def on(cls, inner: type[Kernels], backend: str) -> type[Adapter]:
        """The class that calls these kernels of a backend."""
        return type(cls.__name__, (cls,), {"inner": inner, "backend": backend, "__module__": cls.__module__})

    @classmethod
    def unsupported(cls, call: Any) -> str | None:
        """Why the inner kernels do not support the call."""
        reason: str | None = cls.inner.unsupported(call)
        return reason

    def made(self, kernels: Any, call: Any) -> Any:
        """The inner kernels, constructed from their first call, which is not known before this call runs."""
        if self._made is None:
            self._made = kernels.of(call)
        return self._made
