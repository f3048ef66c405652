"""What the gated activations share: the checks, the halves of a packed projection, calls of compiled kernels."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from transformer_kernels import _autograd, _checks
from transformer_kernels.backends import address


def checked(op: str, gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The two tensors, contiguous and of one shape and dtype; of the packed one the width is even."""
    _checks.tensor(op, "gate", gate)
    _checks.at_least_1d(op, gate)
    if up is None:
        if gate.shape[-1] % 2:
            raise ValueError(f"{op}: without up, the width of gate must be even; got {tuple(gate.shape)}")
    else:
        _checks.tensor(op, "up", up)
        if _autograd.autocast_dtype(gate) is not None:
            gate, up = _autograd.promoted(gate, up)
        if up.shape != gate.shape:
            raise ValueError(f"{op}: up must have the shape of gate {tuple(gate.shape)}; got {tuple(up.shape)}")
        if up.dtype is not gate.dtype:
            raise TypeError(f"{op}: gate and up must have one dtype; got {gate.dtype} and {up.dtype}")
        _checks.same_device(op, gate, up=up)
    _autograd.refuse_transforms(op, gate, up)
    return gate.contiguous(), None if up is None else up.contiguous()


def halves(gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    """gate and up (..., N): the tensors themselves, or views of the packed one."""
    if up is not None:
        return gate, up
    first, second = gate.chunk(2, dim=-1)
    return first, second


def output_like(gate: Tensor, up: Tensor | None) -> Tensor:
    """An empty result (..., N)."""
    return torch.empty_like(gate) if up is not None else gate.new_empty(*gate.shape[:-1], gate.shape[-1] // 2)


def gradients_like(gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor | None, tuple[Tensor, Tensor]]:
    """Empty gradients of the two arguments, and what of them is that of gate and of up (..., N)."""
    dgate, dup = torch.empty_like(gate), None if up is None else torch.empty_like(up)
    return dgate, dup, halves(dgate, dup)


def compiled_forward(kernel: Callable[..., None], gate: Tensor, up: Tensor | None) -> Tensor:
    """activation(gate) * up by a kernel that takes the addresses of gate, up and y, and the rows and columns of y."""
    y = output_like(gate, up)
    columns = y.shape[-1]
    kernel(gate.data_ptr(), address(up), y.data_ptr(), y.numel() // columns, columns)
    return y


def compiled_backward(
    kernel: Callable[..., None], dy: Tensor, gate: Tensor, up: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """(dgate, dup) by a kernel that takes the addresses of dy, gate, up, dgate and dup, and the rows and columns of dy.

    dup is None where gate holds both, and then so does dgate.
    """
    dgate, dup, _ = gradients_like(gate, up)
    columns = dy.shape[-1]
    addresses = dy.data_ptr(), gate.data_ptr(), address(up), dgate.data_ptr(), address(dup)
    kernel(*addresses, dy.numel() // columns, columns)
    return dgate, dup
