"""Rotary positions in CUDA C++: csrc/ops/rotary.cuh."""

from functools import partial

from transformer_kernels.backends.cuda import DTYPE_CODES, load, stream_of
from transformer_kernels.ops.rotary._compiled import rotation

rotate = rotation(lambda q: partial(load().rotary, DTYPE_CODES[q.dtype], *stream_of(q)))
