"""Rotary positions in C++ for the CPU: csrc/cpu/rows/rotary.cpp."""

from functools import partial

from transformer_kernels.backends.cpu import DTYPE_CODES, load
from transformer_kernels.ops.rotary._compiled import rotation

rotate = rotation(lambda q: partial(load().rotary, DTYPE_CODES[q.dtype]))
