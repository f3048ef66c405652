"""What the compiled kernels of rotary are called with, on the CPU and on GPUs."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from transformer_kernels.backends import address
from transformer_kernels.ops.rotary import Heads, RotaryCall, Rotate


def rotation(kernel_for: Callable[[Tensor], Callable[..., None]]) -> Rotate:
    """A backend's `rotate`, by the kernel that `kernel_for` gives for the dtype and place of a tensor."""

    def rotate(call: RotaryCall, heads: Heads, out: Heads, *, back: bool) -> None:
        cos, sin = call.cos.float(), call.sin.float()
        q, k = heads
        batch, count, length, width = q.shape
        half = cos.shape[-1]
        kernel_for(q)(
            q.data_ptr(),
            address(k),
            cos.data_ptr(),
            sin.data_ptr(),
            out.q.data_ptr(),
            address(out.k),
            batch,
            count,
            0 if k is None else k.shape[1],
            length,
            width,
            half,
            *heads.strides(),
            *out.strides(),
            0 if len(cos) == 1 else length * half,
            call.interleaved,
            -1.0 if back else 1.0,
        )

    return rotate
