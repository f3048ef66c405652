"""Rotary positions in csrc: cpu/rows/rotary.cpp and cuda/launchers/rotary.cu, which take calls/rotary.h."""

from __future__ import annotations

from typing import Any

import torch

from transformer_kernels.ops._kernels import Compiled
from transformer_kernels.ops.rotary import Heads, RotaryCall, RotaryKernels


class Kernels(RotaryKernels, Compiled):
    """The rotation by the compiled kernel of one machine."""

    def rotate(self, call: RotaryCall, heads: Heads, out: Heads, *, inverse: bool) -> None:
        if call.cos.dtype is not torch.float32:
            call = call._replace(cos=call.cos.float(), sin=call.sin.float())
        super().rotate(call, heads, out, inverse=inverse)

    def bound(self, call: RotaryCall, heads: Heads, out: Heads, inverse: bool) -> Any:
        batch, count, length, width = heads.q.shape
        half, strides = call.cos.shape[-1], (*heads.strides(), *out.strides())
        return self._bind(
            "rotary",
            batch=batch,
            heads=count,
            kv_heads=0 if heads.k is None else heads.k.shape[1],
            length=length,
            width=width,
            half=half,
            q_strides=strides[:3],
            k_strides=strides[3:6],
            q_out_strides=strides[6:9],
            k_out_strides=strides[9:],
            table_stride=0 if len(call.cos) == 1 else length * half,
            interleaved=call.interleaved,
            sign=-1.0 if inverse else 1.0,
        )
