"""Global memory, which is the memory of the tensors that a launch was given, and the shared memory of its CTAs."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from tests.support.ptx.races import Clock, Shadow
from tests.support.ptx.syntax import SHARED_BASE
from tests.support.ptx.types import Array, Fault
from tests.support.ptx.vector_clocks import VectorClock, VectorShadow

POISON = 0xFF
"""Each byte of memory that nothing was written to: NaN in every floating type."""
GENERIC_SHARED = 0x7F00_0000_0000
"""First generic address of shared memory."""
WIDTHS = (1, 2, 4, 8)
ALIGNMENT = 16
Note = Callable[[str, str], None]
"""Called with the kind of a finding and its message."""

DIFFERENT = "two lanes of one store write different values to the same shared bytes"
OVERWRITTEN = "a write to shared memory that a product or a tensor copy under way reads"
ONE_ULP = "two lanes of one store write values that differ by one ulp to the same shared bytes"
"""Triton's compiler contracts a square and the first sum of a reduction over lanes into fma(a, a, b * b), which the
lane of b computes as fma(b, b, a * a): copies of a sum of squares that several lanes hold may differ by an ulp."""
ZEROS = "two lanes of one store write zeros of both signs to the same shared bytes"
"""Equal numbers, whose signs such a contraction may give."""


def difference(stored: Array, given: Array) -> str:
    """What to report of float32 values that lanes wrote to one place, as words, some of which differ."""
    off = np.abs(stored.astype(np.int64) - given.astype(np.int64))
    off[((stored | given) & 0x7FFF_FFFF) == 0] = 0
    return {0: ZEROS, 1: ONE_ULP}.get(int(off.max()), DIFFERENT)


@dataclass
class Piece:
    """Some bytes that may be accessed, from `start` to `end`; offsets count from `base`, which is aligned."""

    start: int
    end: int
    name: str
    base: int = field(init=False)
    views: dict[int, Array] = field(init=False)
    shadow: Shadow | None = None

    def __post_init__(self) -> None:
        self.base = self.start // ALIGNMENT * ALIGNMENT
        span = -(-(self.end - self.base) // ALIGNMENT) * ALIGNMENT
        flat = np.ctypeslib.as_array((ctypes.c_uint8 * span).from_address(self.base))
        self.views = {width: flat.view(f"u{width}") for width in WIDTHS}


class Global:
    """Pieces in the order of their addresses; an access outside of them is a fault."""

    def __init__(self, pieces: list[tuple[int, int, str]], granule: int, races: bool) -> None:
        """`pieces` are start, end and name; those that overlap become one. Races are known by `granule` bytes."""
        joined: list[list[int]] = []
        names: list[list[str]] = []
        for start, end, name in sorted(pieces):
            if joined and start < joined[-1][1]:
                joined[-1][1] = max(joined[-1][1], end)
                names[-1].append(name)
            else:
                joined.append([start, end])
                names.append([name])
        self.pieces = [Piece(start, end, "/".join(name)) for (start, end), name in zip(joined, names, strict=True)]
        self.starts = np.array([piece.start for piece in self.pieces], np.uint64)
        self.granule = granule
        if races:
            for piece in self.pieces:
                piece.shadow = Shadow(piece.views[1].size // granule)

    def load(self, addresses: Array, lanes: Array, width: int, count: int, clock: Clock, note: Note) -> Array:
        """[count, lanes] words of `width` bytes."""
        result = np.empty((count, len(addresses)), f"u{width}")
        for chosen, offsets, piece in self._split(addresses, width * count):
            index, words = offsets // width, piece.views[width]
            self._note("read", piece, offsets, lanes[chosen], width * count, clock, note)
            for i in range(count):
                result[i, chosen] = words[index + i]
        return result

    def store(self, addresses: Array, lanes: Array, values: list[Array], width: int, clock: Clock, note: Note) -> None:
        for chosen, offsets, piece in self._split(addresses, width * len(values)):
            index, words = offsets // width, piece.views[width]
            self._note("write", piece, offsets, lanes[chosen], width * len(values), clock, note)
            for i, each in enumerate(values):
                words[index + i] = each[chosen]
                if piece.shadow is not None and (words[index + i] != each[chosen]).any():
                    note("race", "two lanes of one store write different values to the same global bytes")

    def atomic(self, address: Array, size: int, clock: Clock, note: Note, lane: int) -> tuple[Array, Array]:
        """The words of a piece and the index in them of one address that a lane changes atomically."""
        ((_, offsets, piece),) = self._split(address, size)
        if piece.shadow is not None:
            places = granules(offsets, size, self.granule)
            if found := piece.shadow.atomic(places, clock.stamp[lane], clock.since[lane]):
                note("race", f"{found} to global memory ({piece.name})")
        return piece.views[size], offsets // size

    def _split(self, addresses: Array, size: int) -> Iterator[tuple[Array | slice, Array, Piece]]:
        """For each piece that is accessed: the lanes that do so, and their offsets."""
        if (addresses % np.uint64(size)).any():
            raise Fault(f"a global access of {size} bytes at an address that is not a multiple of it")
        if not len(addresses):
            return
        low, high = int(addresses.min()), int(addresses.max())
        i = int(np.searchsorted(self.starts, np.uint64(low), "right")) - 1
        if i >= 0 and high + size <= self.pieces[i].end:
            yield slice(None), (addresses - np.uint64(self.pieces[i].base)).astype(np.int64), self.pieces[i]
            return
        which = np.searchsorted(self.starts, addresses, "right").astype(np.int64) - 1
        for i in np.unique(which).tolist():
            lanes = np.nonzero(which == i)[0]
            if i < 0:
                raise Fault(f"global address {low:#x} is in no tensor: {self._nearest(low)}")
            piece = self.pieces[i]
            beyond = addresses[lanes] + np.uint64(size) > np.uint64(piece.end)
            if beyond.any():
                raise Fault(f"{size} bytes: {self._nearest(int(addresses[lanes][beyond][0]))}")
            yield lanes, (addresses[lanes] - np.uint64(piece.base)).astype(np.int64), piece

    def _nearest(self, address: int) -> str:
        if not self.pieces:
            return "no tensors"
        piece = min(self.pieces, key=lambda each: max(each.start - address, address - each.end + 1))
        return f"byte {address - piece.start} of {piece.name}, which has {piece.end - piece.start}"

    def _note(self, kind: str, piece: Piece, offsets: Array, lanes: Array, size: int, clock: Clock, note: Note) -> None:
        if piece.shadow is None:
            return
        places = granules(offsets, size, self.granule)
        each = len(places) // len(lanes)
        note_access = piece.shadow.read if kind == "read" else piece.shadow.write
        if found := note_access(places, np.repeat(lanes, each), clock):
            note("race", f"{found} to global memory ({piece.name})")


def address_of(data: bytes) -> int:
    """The address of a parameter whose address a kernel uses."""
    return int(np.frombuffer(data, np.uint8).ctypes.data)


def granules(offsets: Array, size: int, granule: int) -> Array:
    """The granules of accesses of `size` bytes, one row per access."""
    if size <= granule:
        return offsets // granule
    return (offsets[:, None] // granule + np.arange(size // granule)).reshape(-1)


class Shared:
    """Shared memory of the concurrent CTAs, one row each, initially poisoned."""

    def __init__(self, ctas: int, size: int, threads: int, clock: Clock, granule: int, races: bool) -> None:
        self.size, self.granule, self.clock = size, granule, clock
        stride = -(-(size + ALIGNMENT) // ALIGNMENT) * ALIGNMENT
        flat = np.full(ctas * stride, POISON, np.uint8)
        self.views = {width: flat.view(f"u{width}") for width in WIDTHS}
        self.row = np.repeat(np.arange(ctas, dtype=np.int64) * stride, threads)
        places = ctas * stride // granule
        self.arriving = np.zeros(places, np.int16)
        """Copies by cp.async that are under way to each granule."""
        self.multiplied = np.zeros(places, np.int16)
        """Matrix products and copies from shared memory under way that read each granule."""
        self.unfenced = np.zeros(places, np.int64)
        """The lane + 1 that wrote last and has not called fence.proxy.async since."""
        self.fences = np.zeros(places, np.int64)
        """That fence, as an access of a vector clock: it must come before what the async proxy reads."""
        self.copied = np.zeros(places, bool)
        """Whether it wrote by cp.async."""
        self.opaque = np.zeros(places, bool)
        """Bytes of mbarriers."""
        self.shadow: Shadow | VectorShadow | None = None
        if races:
            self.shadow = VectorShadow(places, clock) if isinstance(clock, VectorClock) else Shadow(places)

    def offsets(self, addresses: Array, lanes: Array, size: int) -> Array:
        at = addresses.astype(np.int64) - SHARED_BASE
        if (at % size).any():
            raise Fault(f"a shared access of {size} bytes at an address that is not a multiple of it")
        if (at < 0).any() or (at + size > self.size).any():
            outside = at[(at < 0) | (at + size > self.size)][0]
            raise Fault(f"{size} bytes at byte {int(outside)} of shared memory, which has {self.size}")
        return at + self.row[lanes]

    def note(self, kind: str, at: Array, lanes: Array, size: int, note: Note) -> None:
        """Check one access: "read", "write", "copy" (cp.async is issued) or "arrive" (its bytes are there)."""
        if not len(lanes):
            return
        places = granules(at, size, self.granule)
        each = len(places) // len(lanes)
        if self.opaque[places].any():
            note("mbarrier", f"a {kind} of an mbarrier by an ordinary instruction")
        if kind != "read":
            self.unfenced[places] = np.repeat(lanes, each) + 1
            self.copied[places] = kind in ("copy", "arrive")
            if self.multiplied[places].any():
                note("wgmma", OVERWRITTEN)
        if kind != "arrive" and self.arriving[places].any():
            note("cp.async", f"a {kind} of bytes that a copy under way writes")
        if self.shadow is not None:
            note_access = self.shadow.read if kind == "read" else self.shadow.write
            if found := note_access(places, np.repeat(lanes, each), self.clock):
                note("race", f"{found} to shared memory")

    def load(self, addresses: Array, lanes: Array, width: int, count: int, note: Note) -> list[Array]:
        at = self.offsets(addresses, lanes, width * count)
        self.note("read", at, lanes, width * count, note)
        index = at // width
        return [self.views[width][index + i] for i in range(count)]

    def store(self, addresses: Array, lanes: Array, values: list[Array], width: int, note: Note) -> None:
        at = self.offsets(addresses, lanes, width * len(values))
        self.note("write", at, lanes, width * len(values), note)
        index, words = at // width, self.views[width]
        for i, each in enumerate(values):
            words[index + i] = each
            if self.shadow is not None and (words[index + i] != each).any():
                note("race", difference(words[index + i], each) if width == 4 else DIFFERENT)

    def fence(self, lanes: Array) -> None:
        """fence.proxy.async: what these lanes wrote is visible to the async proxy."""
        fenced = np.zeros(len(self.row) + 1, bool)
        fenced[lanes + 1] = True
        places = np.nonzero(fenced[self.unfenced])[0]
        if isinstance(self.clock, VectorClock):
            self.fences[places] = self.clock.codes(self.unfenced[places] - 1)
        self.unfenced[places] = 0

    def missing_fence(self, places: Array, lanes: Array) -> Array:
        """Offsets at which the async proxy, started by these lanes, may miss earlier writes."""
        missing = self.unfenced[places] > 0
        if isinstance(self.clock, VectorClock):
            missing |= self.clock.unordered_to_all(self.fences[places], lanes)
        return missing

    def start_product(self, pieces: Array, lanes: Array, note: Note) -> Array:
        """A product of a warp group reads these pieces of 16 bytes; returns their granules."""
        places = granules(pieces, 16, self.granule)
        if isinstance(self.clock, VectorClock) and isinstance(self.shadow, VectorShadow):
            if self.arriving[places].any():
                note("cp.async", "a read of bytes that a copy under way writes")
            if found := self.shadow.multiply(places, lanes, self.clock):
                note("race", f"{found} to shared memory")
        else:
            self.note("read", pieces, np.full(len(pieces), lanes[0]), 16, note)
        self.multiplied[places] += 1
        return places

    def start_store(self, pieces: Array, lane: int, note: Note) -> None:
        """The copy engine reads these pieces of 16 bytes, started by a lane."""
        places = granules(pieces, 16, self.granule)
        if self.missing_fence(places, np.array([lane])).any():
            note("proxy", "a tensor copy reads what ordinary stores wrote without fence.proxy.async")
        self.note("read", pieces, np.full(len(pieces), lane), 16, note)
        self.multiplied[places] += 1

    def finish_store(self, pieces: Array, lane: int, note: Note) -> None:
        self.multiplied[granules(pieces, 16, self.granule)] -= 1
        self.note("read", pieces, np.full(len(pieces), lane), 16, note)

    def finish_product(self, places: Array, lanes: Array) -> None:
        self.multiplied[places] -= 1
        if isinstance(self.clock, VectorClock) and isinstance(self.shadow, VectorShadow):
            self.shadow.finish_multiply(places, lanes, self.clock)

    def start_tensor_copy(self, pieces: Array, lane: int, code: int, note: Note) -> Array:
        """The copy engine will write these pieces of 16 bytes, started by a lane; returns their granules."""
        assert isinstance(self.clock, VectorClock)
        places = granules(pieces, 16, self.granule)
        if self.opaque[places].any():
            note("mbarrier", "a tensor copy to an mbarrier")
        if self.missing_fence(places, np.array([lane])).any():
            note("proxy", "a tensor copy overwrites what ordinary stores wrote without fence.proxy.async")
        if self.multiplied[places].any():
            note("wgmma", OVERWRITTEN)
        if self.arriving[places].any():
            note("cp.async", "a copy of bytes that a copy under way writes")
        shadow, who = self.shadow, np.full(len(places), lane)
        if isinstance(shadow, VectorShadow) and (found := shadow.write(places, who, self.clock, code)):
            note("race", f"{found} to shared memory, by a tensor copy")
        self.arriving[places] += 1
        self.unfenced[places] = self.fences[places] = 0
        return places
