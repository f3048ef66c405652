"""What the compiled kernels of rotary are called with, on the CPU and on GPUs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from transformer_kernels._autograd import Grads, Wanted
from transformer_kernels.backends import address
from transformer_kernels.ops.rotary import RotaryCall, RotaryResult

Forward = Callable[[RotaryCall], RotaryResult]
Backward = Callable[[RotaryCall, RotaryResult, Grads, Wanted], tuple[Tensor, Tensor | None]]


def passes(kernel_for: Callable[[Tensor], Callable[..., None]]) -> tuple[Forward, Backward]:
    """A backend's forward and backward, by the kernel that `kernel_for` gives for the dtype and place of a tensor."""

    def forward(call: RotaryCall) -> RotaryResult:
        q, k = _rotated(kernel_for(call.q), call, call.q, call.k, 1.0)
        assert k is not None
        return RotaryResult(q, k)

    def backward(call: RotaryCall, result: RotaryResult, grads: Grads, wanted: Wanted) -> tuple[Tensor, Tensor | None]:
        dq, dk = grads
        return _rotated(kernel_for(dq), call, dq, dk, -1.0)

    return forward, backward


def _rotated(
    kernel: Callable[..., None], call: RotaryCall, q: Tensor, k: Tensor | None, sign: float
) -> tuple[Tensor, Tensor | None]:
    """q and k turned by the angles of the call, or back where sign is -1, in new contiguous tensors."""
    cos, sin = call.cos.float(), call.sin.float()
    batch, heads, length, width = q.shape
    half = cos.shape[-1]
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    k_out = None if k is None else torch.empty(k.shape, dtype=k.dtype, device=k.device)
    kernel(
        q.data_ptr(),
        address(k),
        cos.data_ptr(),
        sin.data_ptr(),
        q_out.data_ptr(),
        address(k_out),
        batch,
        heads,
        0 if k is None else k.shape[1],
        length,
        width,
        half,
        *q.stride()[:3],
        *((0, 0, 0) if k is None else k.stride()[:3]),
        0 if len(cos) == 1 else length * half,
        call.interleaved,
        sign,
    )
    return q_out, k_out
