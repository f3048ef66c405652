"""Triton's common code: lazy import with a reason, tables, conversions, dropout."""

import json

import pytest
import torch

from python_ref import ops as reference
from tests.support import fresh
from tests.support.interpreter import hardened
from transformer_kernels.backends import triton as _triton
from transformer_kernels.backends.triton_tiles import (
    TUNED,
    RowTile,
    Tiles,
    column_blocks,
    flat,
    persistent_rows,
    whole_rows,
)

requires_interpreter = pytest.mark.skipif(
    _triton.unavailable(torch.device("cpu")) is not None, reason="needs TRITON_INTERPRET=1 before the process starts"
)

requires_support = pytest.mark.skipif(_triton._load_once()[0] is None, reason="this release of Triton is not supported")


@pytest.mark.parametrize("version", ["3.3.1", "4.0.0"])
def test_an_unsupported_version_states_the_range(version):
    source = (
        f"import torch, triton; triton.__version__ = '{version}'\n"
        "from transformer_kernels.backends import triton as _triton\n"
        "print(_triton.unavailable(torch.device('cpu')))"
    )
    found = fresh.checked(source)
    assert version in found and _triton.SUPPORTED_VERSIONS in found


@requires_support
def test_cpu_tensors_need_the_interpreter():
    source = (
        "import torch; from transformer_kernels.backends import triton as _triton\n"
        "print(_triton.unavailable(torch.device('cpu')))"
    )
    assert "TRITON_INTERPRET=1" in fresh.checked(source, TRITON_INTERPRET=None)
    assert fresh.checked(source, TRITON_INTERPRET="1") == "None"


@requires_support
def test_the_variable_set_after_triton_was_imported_is_refused():
    source = (
        "import os, torch, triton.language; os.environ['TRITON_INTERPRET'] = '1'\n"
        "from transformer_kernels.backends import triton as _triton\n"
        "print(_triton.unavailable(torch.device('cpu')))"
    )
    assert "before the process starts" in fresh.checked(source, TRITON_INTERPRET=None)


def test_tiles_follow_the_rule_or_what_was_tuned_for_the_newest_capability(monkeypatch):
    old, new = (RowTile(rows=1, columns=64, num_warps=warps) for warps in (1, 2))
    monkeypatch.setitem(TUNED, ("sample", (8, 0), 2, 64), (old, "measured"))
    monkeypatch.setitem(TUNED, ("sample", (9, 0), 2, 64), (new, "measured"))
    tiles = Tiles("sample", whole_rows, widest=256)
    assert tiles.find((8, 9), 2, 64) is old
    assert tiles.find((9, 0), 2, 33) is new and tiles.find((12, 0), 2, 64) is new
    assert tiles.find((9, 0), 4, 64) == whole_rows(64, 4, 256)
    assert tiles.find((9, 0), 2, 1) == whole_rows(32, 2, 256)
    assert tiles.find((9, 0), 2, 257) == tiles.find((9, 0), 2, 10**6) == RowTile(1, 8192, 16)
    assert tiles.widths() == [32, 64, 128, 256, 512]


@pytest.mark.parametrize("columns", [2**power for power in range(4, 17)])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_a_rule_gives_every_thread_about_as_much(columns, itemsize):
    for rule in (whole_rows, persistent_rows, column_blocks):
        tile = rule(columns, itemsize, 16384)
        assert 8 <= tile.rows * tile.columns / (32 * tile.num_warps) <= 16
        prefetched = tile.num_stages * 2 * tile.rows * tile.columns * itemsize  # of two inputs, in shared memory
        assert tile.num_stages == 1 or prefetched <= 99 * 1024


def test_what_kernels_cannot_count_is_refused():
    with pytest.raises(ValueError, match="rows of up to 2147418111 elements; got 2147418112"):
        Tiles("rows", whole_rows, 256).find((9, 0), 2, 2147418112)
    assert Tiles("elements", flat, 1).find((9, 0), 2, 2**40) == flat(2, 2, 1)
    for grid in ((2**31,), (1, 65536)):
        with pytest.raises(ValueError, match=r"up to \(2147483647, 65535, 65535\) programs; this needs"):
            _triton.Launch(None, grid, (), (), 4)


def test_a_device_with_little_shared_memory_takes_the_oldest_tables(monkeypatch):
    for found, served in (((8, 6), (8, 6)), ((9, 0), (9, 0)), ((10, 0), (10, 0)), ((12, 0), (8, 0)), ((12, 1), (8, 0))):
        monkeypatch.setattr(_triton, "_device_capability", lambda index, found=found: found)
        assert _triton.capability(torch.device("cuda:0")) == served


@requires_support
def test_a_compilation_is_launched_again_only_where_triton_would():
    """The key contains everything that affects compilation; otherwise a wrong kernel would be launched."""
    found = json.loads(fresh.checked(LAUNCHES, TRITON_INTERPRET=None))
    assert found == {case: "compiled" if case in COMPILED else "reused" for case in found} and set(found) > COMPILED


COMPILED = {
    "one more tensor", "another type", "unaligned", "unaligned in a record", "beyond 32 bits", "below 32 bits",
    "an integer for a float", "one", "a float for an integer", "a multiple of 16", "another constant", "warps",
    "stages", "another kernel", "another device", "profiled",
}  # fmt: skip
LAUNCHES = """
import contextlib, json, types
from unittest import mock
import torch, triton
from transformer_kernels.backends import triton as backend

events = []

class Compiled:
    function = packed_metadata = None
    def run(self, *arguments):
        assert arguments[:4] == (7, 1, 1, "stream") and arguments[6:9] == (None,) * 3, arguments
        assert list(arguments[9:]) == wanted, (arguments, wanted)
        events.append("reused")

class Kernel:
    params = [types.SimpleNamespace(do_not_specialize=n == 2) for n in range(6)]
    def __getitem__(self, grid):
        return lambda *arguments, num_warps, num_stages: events.append("compiled") or Compiled()

class Elsewhere:
    def __init__(self, x): self.x, self.device, self.dtype = x, types.SimpleNamespace(type="cpu", index=1), x.dtype
    def data_ptr(self): return self.x.data_ptr()

driver = types.SimpleNamespace(get_current_stream=lambda device: "stream")
drivers = triton.runtime.driver
hook = mock.patch.object(triton.knobs.runtime, "launch_enter_hook", print)
x, kernel = torch.zeros(32, dtype=torch.float16), Kernel()
same = {"kernel": kernel, "pointers": (x, None), "numbers": (3, 33, 0.5), "constants": ("a",), "num_warps": 4}
cases = {
    "first": {}, "reused": {}, "aligned": {"pointers": (x[8:], None)}, "another number": {"numbers": (1, 49, 0.25)},
    "a record": {"pointers": ((x, None),)}, "unaligned in a record": {"pointers": ((x[1:], None),)},
    "one more tensor": {"pointers": (x, x)}, "another type": {"pointers": (x.float(), None)},
    "unaligned": {"pointers": (x[1:], None)}, "beyond 32 bits": {"numbers": (1 << 31, 33, 0.5)},
    "below 32 bits": {"numbers": (-(1 << 31) - 1, 33, 0.5)}, "an integer for a float": {"numbers": (3, 33, 1)},
    "one": {"numbers": (3, 1, 0.5)}, "a multiple of 16": {"numbers": (3, 48, 0.5)},
    "a float for an integer": {"numbers": (3.0, 33, 0.5)},
    "another constant": {"constants": ("b",)}, "warps": {"num_warps": 8}, "stages": {"num_stages": 2},
    "another kernel": {"kernel": Kernel()}, "another device": {"pointers": (Elsewhere(x), None)}, "profiled": {},
}
outcomes = {}
address = lambda p: tuple(map(address, p)) if isinstance(p, tuple) else None if p is None else p.data_ptr()
with mock.patch.object(drivers, "_active" if hasattr(drivers, "_active") else "active", driver):
    for name, other in cases.items():
        chosen = same | other
        pointers = chosen.pop("pointers")
        wanted = [*address(pointers), *chosen["numbers"], *chosen["constants"]]
        events.clear()
        with hook if name == "profiled" else contextlib.nullcontext():
            backend.Launch(chosen.pop("kernel"), (7,), **chosen)(*pointers)
        outcomes[name] = events[0]
del outcomes["first"]
print(json.dumps(outcomes))
"""


def test_float32_products_follow_either_setting():
    matmul = torch.backends.cuda.matmul
    if not hasattr(matmul, "fp32_precision"):
        pytest.skip("this torch has one setting")
    before = matmul.fp32_precision
    try:
        for setting, wanted in (("tf32", "tf32"), ("ieee", "ieee"), ("none", "ieee")):
            matmul.fp32_precision = setting
            assert _triton.fp32_precision() == wanted
    finally:
        matmul.fp32_precision = before


def test_a_vector_needs_every_size_to_be_a_multiple():
    assert _triton.vector_width(2, 768, 16) == 8
    assert _triton.vector_width(4, 768, 20) == 4
    assert _triton.vector_width(2, 768, 20) == 1


@requires_interpreter
def test_dropout_keeps_what_the_reference_keeps():
    from transformer_kernels.ops.norm import NormCall
    from transformer_kernels.ops.norm import _triton as norm

    seed = torch.tensor([2**63 - 12345678901])
    x, weight = torch.ones(6, 37), torch.ones(37)
    call = NormCall(x, torch.zeros_like(x), weight, None, seed, 1e-5, 0.3, centred=True)
    summed = norm.Kernels(call).forward(call).summed
    assert torch.equal(summed != 0, reference.dropout_keep(seed, 1, 6, 37, 0.3)[0])


@requires_interpreter
def test_philox_matches_random123():
    """Random123's known result for the zero counter and key, and the reference for others."""
    from tests.support.triton_kernels import philox_kernel

    for seed, counter in ((0, (0, 0, 0)), (2**63 - 1, (2**32 - 1, 7, 2**31)), (1, (5, 2**32 - 1, 3))):
        words = torch.zeros(4, dtype=torch.int64)
        philox_kernel[(1,)](torch.tensor([seed]), torch.tensor(counter), words)
        group, row, head = torch.tensor(counter)
        wanted = reference.philox4x32(torch.tensor([seed]), (group, row, head, torch.tensor(0)))
        assert words.tolist() == torch.cat(wanted).tolist()
        if seed == 0:
            assert words.tolist() == [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]


SPECIAL = [0.0, -0.0, 1e-40, -1e-45, 3.4e38, torch.inf, -torch.inf, torch.nan, 1.00390625, 1.01171875]


@requires_interpreter
def test_bfloat16_is_rounded_to_nearest_even_and_read_exactly():
    from tests.support.triton_kernels import round_trip_kernel

    x = torch.randn(512, generator=torch.Generator().manual_seed(0))
    x[: len(SPECIAL)] = torch.tensor(SPECIAL)
    rounded, read = torch.empty(512, dtype=torch.bfloat16), torch.empty(512)
    round_trip_kernel[(1,)](x, rounded, read, 512)
    torch.testing.assert_close(rounded, x.bfloat16(), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(read, rounded.float(), rtol=0, atol=0, equal_nan=True)


@requires_interpreter
def test_a_write_past_the_end_is_found():
    from tests.support.triton_kernels import overrun_kernel

    with pytest.raises(AssertionError, match=r"wrote after a buffer of 6 .* at \[0\]"), hardened(0):
        overrun_kernel[(1,)](torch.empty(6), 8)


@requires_interpreter
def test_what_is_not_written_is_nan_and_what_is_read_beyond_too():
    with hardened(0) as buffers:
        y = torch.empty(2, 3).add_(1.0)
        assert torch.isnan(y).all()
        assert torch.isnan(buffers[0].storage).all()


@requires_interpreter
def test_programs_run_in_the_order_of_the_seed():
    from tests.support.triton_kernels import running_total_kernel

    def order(seed):
        found = torch.zeros(16)
        with hardened(seed):
            running_total_kernel[(16,)](torch.zeros(1), found)
        return found.tolist()

    assert order(1) == order(1) != order(2)
    assert sorted(order(1)) == sorted(order(2)) == list(range(16))
