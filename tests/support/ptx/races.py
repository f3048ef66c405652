"""Races by happens-before: the last writer and reader of each byte, and whether a barrier separates accesses.

A stamp is a thread with the barriers that its CTA and its warp have passed. Accesses of two CTAs of one launch are
never ordered; those of two warps are by a barrier of the CTA; those of two lanes of a warp also by `bar.warp.sync`.
"""

from __future__ import annotations

import numpy as np

from tests.support.ptx.types import Array

CTA_SHIFT, EPOCH_SHIFT, WARP_EPOCH_SHIFT = 42, 22, 11
"""A stamp: the CTA + 1, barriers passed by the CTA, barriers passed by the warp since, who."""
WHO = (1 << WARP_EPOCH_SHIFT) - 1
SEVERAL_LANES, SEVERAL_WARPS = 1024, 2047
"""Instead of a thread: lanes of one warp (to which the warp is added), or of several."""
SEVERAL_CTAS = np.int64((1 << 20) << CTA_SHIFT)

ATOMIC = SEVERAL_CTAS + 1


class Clock:
    """The current stamp of every thread."""

    def __init__(self, ctas: Array, threads: int) -> None:
        lanes = np.arange(len(ctas) * threads)
        self.threads = threads
        self.cta = np.repeat(np.asarray(ctas, np.int64), threads) + 1
        self.thread = (lanes % threads).astype(np.int64)
        self.epoch = np.zeros(len(lanes), np.int64)
        self.warp_epoch = np.zeros(len(lanes), np.int64)
        self._update()

    def barrier(self, lanes: Array | slice = slice(None)) -> None:
        self.epoch[lanes] += 1
        self.warp_epoch[lanes] = 0
        self._update()

    def warp_barrier(self, lanes: Array | slice = slice(None)) -> None:
        self.warp_epoch[lanes] = np.minimum(self.warp_epoch[lanes] + 1, WHO)
        self._update()

    def _update(self) -> None:
        self.since = (self.cta << CTA_SHIFT) | (self.epoch << EPOCH_SHIFT)
        self.stamp = self.since | (self.warp_epoch << WARP_EPOCH_SHIFT) | self.thread


class Shadow:
    """The last write and the last reads of each granule of a memory."""

    def __init__(self, granules: int) -> None:
        self.writer = np.zeros(granules, np.int64)
        self.reader = np.zeros(granules, np.int64)

    def read(self, at: Array, lanes: Array, clock: Clock) -> str:
        """Note reads, each by a lane; returns what they race with, or nothing."""
        stamps, since = clock.stamp[lanes], clock.since[lanes]
        found = _conflict(self.writer[at], stamps, since)
        before = self.reader[at]
        unordered = (before != stamps) & (before > 0) & ((before >= since) | _other_cta(before, stamps))
        self.reader[at] = new = np.where(unordered, _joined(before, stamps), stamps) if unordered.any() else stamps
        while (crowded := (after := self.reader[at]) != new).any():  # several lanes read one granule in one instruction
            joined = np.where(crowded, _joined(after, new), after)
            if not (more := joined != after).any():
                break
            self.reader[at[more]] = joined[more]
        return f"a read after {found}'s write" if found else ""

    def write(self, at: Array, lanes: Array, clock: Clock) -> str:
        """Note writes, each by a lane; returns what they race with, or nothing."""
        stamps, since = clock.stamp[lanes], clock.since[lanes]
        written = _conflict(self.writer[at], stamps, since)
        read = _conflict(self.reader[at], stamps, since)
        self.writer[at] = stamps
        if not written and _conflict(self.writer[at], stamps, since) == "another CTA":
            written = "another CTA"  # in the same instruction; warps may store one value twice
        return f"a write after {written}'s write" if written else f"a write after {read}'s read" if read else ""

    def atomic(self, at: Array, stamp: Array, since: Array) -> str:
        """Note an atomic access by one thread; returns the plain access that it races with, or nothing."""
        stamps, sinces = np.full(len(at), stamp), np.full(len(at), since)
        plain = self.writer[at] != ATOMIC
        found = _conflict(self.writer[at][plain], stamps[plain], sinces[plain])
        found = found or _conflict(self.reader[at], stamps, sinces)
        self.writer[at] = ATOMIC
        return f"an atomic access after {found}'s plain one" if found else ""


def _other_cta(a: Array, b: Array) -> Array:
    return (a >> CTA_SHIFT) != (b >> CTA_SHIFT)


def _warp(stamps: Array) -> Array:
    """-1 for several warps."""
    who = stamps & WHO
    warp = np.where(who >= SEVERAL_LANES, who - SEVERAL_LANES, who // 32)
    return np.where(who == SEVERAL_WARPS, -1, warp)


def _joined(a: Array, b: Array) -> Array:
    """One stamp for two of which no barrier orders either: what races with one of them races with it."""
    warp = _warp(a)
    one_warp = (warp == _warp(b)) & (warp >= 0)
    later = np.maximum(a >> WARP_EPOCH_SHIFT, b >> WARP_EPOCH_SHIFT)
    lanes = np.where(a == b, a, later << WARP_EPOCH_SHIFT | (SEVERAL_LANES + warp))
    in_warp = np.where(a >> WARP_EPOCH_SHIFT == b >> WARP_EPOCH_SHIFT, lanes, np.maximum(a, b))
    in_cta = np.where(one_warp, in_warp, (np.maximum(a, b) >> EPOCH_SHIFT << EPOCH_SHIFT) | WHO)
    return np.where(_other_cta(a, b), SEVERAL_CTAS, in_cta)


def _conflict(before: Array, stamps: Array, since: Array) -> str:
    """The thread of an access that is not ordered before these."""
    suspect = (before != stamps) & (before > 0) & ((before >= since) | _other_cta(before, stamps))
    if not suspect.any():
        return ""
    before, stamps = before[suspect], stamps[suspect]
    if _other_cta(before, stamps).any():
        return "another CTA"
    if (_warp(before) != _warp(stamps)).any():
        return "another warp"
    same_epoch = before >> WARP_EPOCH_SHIFT == stamps >> WARP_EPOCH_SHIFT
    return "another lane" if (same_epoch & (before & WHO != stamps & WHO)).any() else ""
