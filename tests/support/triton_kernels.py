"""Kernels for tests only; imported if Triton is installed."""

import triton
import triton.language as tl

from transformer_kernels.backends.triton_language import from_fp32, philox_words, to_fp32
from transformer_kernels.ops.attention._triton_masks import real_keys
from transformer_kernels.ops.attention._triton_scores import Extras, Stage, StageNumbers


@triton.jit
def round_trip_kernel(x, rounded, read, BLOCK: tl.constexpr):
    """fp32 -> bf16 -> fp32 with the conversions of all kernels."""
    lanes = tl.arange(0, BLOCK)
    tl.store(rounded + lanes, from_fp32(tl.load(x + lanes), tl.bfloat16))
    tl.store(read + lanes, to_fp32(tl.load(rounded + lanes)))


@triton.jit
def philox_kernel(seed, counter, words):
    """The four words of the counter (counter[0], counter[1], counter[2], 0) as int64."""
    group, row, head = tl.load(counter), tl.load(counter + 1), tl.load(counter + 2)
    word_0, word_1, word_2, word_3 = philox_words(tl.load(seed), group, row, head)
    tl.store(words, word_0.to(tl.int64))
    tl.store(words + 1, word_1.to(tl.int64))
    tl.store(words + 2, word_2.to(tl.int64))
    tl.store(words + 3, word_3.to(tl.int64))


@triton.jit
def overrun_kernel(y, BLOCK: tl.constexpr):
    """A kernel with a bug: it writes one element out of bounds."""
    lanes = tl.arange(0, BLOCK)
    tl.store(y + lanes, lanes.to(tl.float32), mask=lanes < BLOCK - 1)


@triton.jit
def running_total_kernel(total, order):
    """A kernel with a bug: its result depends on the order of programs."""
    program = tl.program_id(0)
    tl.store(order + program, tl.load(total))
    tl.store(total, tl.load(total) + 1.0)


@triton.jit
def real_keys_kernel(padding, found, start, end, length, CHUNK: tl.constexpr):
    """`real_keys` for the keys [start, end) of one sequence."""
    stage = Stage(Extras(padding, None, None, None, None, None), StageNumbers(0, 0, 1, length, 0, 0, 0, 0, 0, 0, 0))
    first_real, end_real, contiguous = real_keys(stage, start, end, CHUNK)
    tl.store(found, first_real)
    tl.store(found + 1, end_real)
    tl.store(found + 2, contiguous.to(tl.int32))
