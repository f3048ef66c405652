"""Rotary positions in csrc: cpu/rows/rotary.cpp and cuda/launchers/rotary.cu, which take calls/rotary.h."""

from __future__ import annotations

from transformer_kernels.backends import address
from transformer_kernels.ops._kernels import Compiled
from transformer_kernels.ops.rotary import Heads, RotaryCall, RotaryKernels

NO_STRIDES = (0, 0, 0)


class Kernels(RotaryKernels, Compiled):
    """The rotation by the compiled kernel of one machine."""

    def rotate(self, call: RotaryCall, heads: Heads, out: Heads, *, inverse: bool) -> None:
        """Rotate heads by the angles of the call, or by their negatives, into `out`, which may be the same heads."""
        cos, sin, machine = call.cos.float(), call.sin.float(), self.machine
        q, k = heads
        batch, count, length, width = q.shape
        half = cos.shape[-1]
        device, stream = machine.stream_of(q)
        machine.load().rotary(
            dtype=machine.DTYPE_CODES[q.dtype],
            q=q.data_ptr(),
            k=address(k),
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            q_out=out.q.data_ptr(),
            k_out=address(out.k),
            batch=batch,
            heads=count,
            kv_heads=0 if k is None else k.shape[1],
            length=length,
            width=width,
            half=half,
            q_strides=q.stride()[:3],
            k_strides=NO_STRIDES if k is None else k.stride()[:3],
            q_out_strides=out.q.stride()[:3],
            k_out_strides=NO_STRIDES if out.k is None else out.k.stride()[:3],
            table_stride=0 if len(cos) == 1 else length * half,
            interleaved=call.interleaved,
            sign=-1.0 if inverse else 1.0,
            device=device,
            stream=stream,
        )
