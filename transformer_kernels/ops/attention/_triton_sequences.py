"""Triton attention: packed sequences. One small kernel writes start and end (2, T) of each token's sequence.

Both are monotonic, so the first and last token of a tile bound the ranges of all its tokens, and nothing is read on the
host. A token after the last sequence has an empty range.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["cu_seqlens_pointer", "entries", "steps", "tokens"])
def attention_sequences_kernel(
    cu_seqlens_pointer,  # (entries,)
    sequences_pointer,  # (2, tokens), int32, contiguous
    entries, steps, tokens,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program owns BLOCK tokens and finds the sequence of each by bisection; `steps` halvings leave one entry."""
    positions = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    low = tl.zeros([BLOCK], tl.int32)  # cu_seqlens[low] <= token < cu_seqlens[high]
    high = low + entries
    for _ in range(steps):
        middle = (low + high) // 2
        reached = tl.load(cu_seqlens_pointer + middle) <= positions
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle)
    start = tl.load(cu_seqlens_pointer + low)
    end = tl.load(cu_seqlens_pointer + tl.minimum(high, entries - 1))
    inside = positions < tokens
    tl.store(sequences_pointer + positions, tl.minimum(tl.maximum(start, 0), tokens), mask=inside)
    tl.store(sequences_pointer + tokens + positions, tl.minimum(tl.maximum(end, 0), tokens), mask=inside)
