"""Vector clocks: happens-before where parts of a CTA synchronize, at named barriers and mbarriers.

The vector of a thread has, for each other thread and for the copies that each mbarrier counts, the latest clock whose
accesses are ordered before this thread's next one. An arrival releases the vector, a wait acquires it.
"""

from __future__ import annotations

import numpy as np

from tests.support.ptx.races import Clock
from tests.support.ptx.types import Array

WHO_BITS = 11
WHO = (1 << WHO_BITS) - 1
MAX_BARRIERS = 256
"""Mbarriers of one CTA. The copies that one counts are an agent of their own, numbered after the threads."""
OWN = np.iinfo(np.int32).max
SEVERAL = 32
"""Instead of a lane: several lanes of a warp, each of which must be known."""
LANES = np.arange(32)


class VectorClock(Clock):
    """The vector clocks of one CTA: those of its warps, and those of its threads."""

    def __init__(self, cta: int, threads: int) -> None:
        super().__init__(np.asarray([cta]), threads)
        self.now = np.ones(threads // 32, np.int32)
        """Of a warp's threads; an access has its value, and each release increments it."""
        self.known = np.zeros((threads, threads + MAX_BARRIERS), np.int32)
        everyone = np.arange(threads)
        self.known[everyone, everyone] = OWN
        self.everyone = everyone

    def codes(self, lanes: Array) -> Array:
        """Accesses by these lanes now, as one number each."""
        return self.now[lanes // 32].astype(np.int64) << WHO_BITS | lanes

    def release(self, lanes: Array) -> Array:
        """The clock of these lanes, including their own accesses."""
        vector: Array = self.known[lanes].max(0)
        vector[lanes] = self.now[lanes // 32]
        self.now[np.unique(lanes // 32)] += 1
        return vector

    def acquire(self, lanes: Array, vector: Array) -> None:
        self.known[lanes] = np.maximum(self.known[lanes], vector)

    def barrier(self, lanes: Array | slice = slice(None)) -> None:
        super().barrier(lanes)
        members = self.everyone[lanes]
        self.acquire(members, self.release(members))

    def warp_barrier(self, lanes: Array | slice = slice(None)) -> None:
        super().warp_barrier(lanes)
        members = self.everyone[lanes]
        for warp in np.unique(members // 32):
            own = members[members // 32 == warp]
            self.acquire(own, self.release(own))

    def unordered(self, codes: Array, lanes: Array) -> Array:
        """Which accesses nothing orders before the next ones of these lanes."""
        return (codes > 0) & ((codes >> WHO_BITS) > self.known[lanes, codes & WHO])

    def unordered_to_all(self, codes: Array, lanes: Array) -> Array:
        """The accesses that are not ordered before one of these lanes."""
        return (codes > 0) & ((codes >> WHO_BITS) > self.known[lanes].min(0)[codes & WHO])

    def unordered_reads(self, reads: Array, warps: Array, lanes: Array) -> Array:
        """The same for the reads of warps: 64 clocks and a lane each."""
        who, clocks = reads & 63, reads >> 6
        result = (reads > 0) & (clocks > self.known[lanes, warps * 32 + np.minimum(who, 31)])
        several = np.nonzero((who == SEVERAL) & (reads > 0))[0]
        if len(several):
            members = warps[several, None] * 32 + LANES
            result[several] = clocks[several] > self.known[lanes[several, None], members].min(1)
        return result

    def who(self, codes: Array, lanes: Array) -> str:
        """Who made accesses that race with those of these lanes."""
        agents = codes & WHO
        if (agents >= self.threads).any():
            return "a tensor copy"
        return "another warp" if (agents // 32 != lanes // 32).any() else "another lane"


class VectorShadow:
    """The last write of each granule, and the last read of it by each warp."""

    def __init__(self, granules: int, clock: VectorClock) -> None:
        self.writer = np.zeros(granules, np.int64)
        self.readers = np.zeros((clock.threads // 32, granules), np.int32)

    def read(self, at: Array, lanes: Array, clock: Clock) -> str:
        """Note reads, each by a lane; returns what they race with, or nothing."""
        assert isinstance(clock, VectorClock)
        writers, warps = self.writer[at], lanes // 32
        found = clock.unordered(writers, lanes)
        before, now = self.readers[warps, at], clock.now[warps]
        joined = clock.unordered_reads(before, warps, lanes)
        new = now * 64 + np.where(joined, SEVERAL, lanes % 32).astype(np.int32)
        self.readers[warps, at] = new
        if (crowded := self.readers[warps, at] != new).any():  # several lanes read one granule in one instruction
            self.readers[warps[crowded], at[crowded]] = now[crowded] * 64 + SEVERAL
        return f"a read after {clock.who(writers[found], lanes[found])}'s write" if found.any() else ""

    def write(self, at: Array, lanes: Array, clock: Clock, code: int | None = None) -> str:
        """Note writes, each by a lane, or by an agent that this lane starts."""
        assert isinstance(clock, VectorClock)
        result, before = "", self.writer[at]
        if (found := clock.unordered(before, lanes)).any():
            result = f"a write after {clock.who(before[found], lanes[found])}'s write"
        for warp in np.nonzero(self.readers[:, at].any(1))[0]:
            found = clock.unordered_reads(self.readers[warp, at], np.full(len(at), warp), lanes)
            if found.any() and not result:
                other = "another warp" if (lanes[found] // 32 != warp).any() else "another lane"
                result = f"a write after {other}'s read"
        self.writer[at] = clock.codes(lanes) if code is None else code
        self.readers[:, at] = 0
        return result

    def multiply(self, at: Array, lanes: Array, clock: VectorClock) -> str:
        """A product of these lanes begins to read."""
        found = clock.unordered_to_all(self.writer[at], lanes)
        return f"a product after {clock.who(self.writer[at][found], lanes[:1])}'s write" if found.any() else ""

    def finish_multiply(self, at: Array, lanes: Array, clock: VectorClock) -> None:
        """Record a read that is ordered before all later accesses of these lanes."""
        for warp in np.unique(lanes // 32):
            self.readers[warp, at] = clock.now[warp] * 64 + SEVERAL
