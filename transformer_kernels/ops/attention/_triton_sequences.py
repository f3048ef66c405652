"""Triton attention: packed sequences. One small kernel finds the sequence of every token; the others look it up.

What it finds are starts and ends (2, T): the first token of each token's sequence, and one past the last. They rise
with the tokens, so the first and the last token of a tile tell what any and what all of them see, and nothing is read
on the host. A token behind the last sequence has a sequence without tokens.
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
    low = tl.zeros([BLOCK], tl.int32)  # the entry here is not beyond the token, that at `high` is
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
