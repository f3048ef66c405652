"""Each test of an operation runs in every backend and dtype that can run here."""

import itertools
import zlib
from collections import Counter

import pytest
import torch

import transformer_kernels as tk
from tests.support import interpreter
from tests.support.arguments import DTYPES, dtype_id
from tests.support.day import EVERY, turn
from tests.support.parity import backend_fixture, require, tested_operation
from transformer_kernels.ops.attention import AttentionCall
from transformer_kernels.ops.attention.packed import PackedAttentionCall

EXECUTED_SLOWLY = ("triton", "cuda")
"""Backends whose kernels are interpreted or emulated where there is no GPU."""
CASES_IN_ONE_DTYPE = 8
"""Number of cases per test that always run in them."""
PARTS = min(4, EVERY)
"""With TRANSFORMER_KERNELS_GATES_EVERY one in so many of the other cases runs on a day."""


@pytest.hookimpl(tryfirst=True)  # in the order of the files
def pytest_collection_modifyitems(items):
    """Without a GPU an interpreted or emulated kernel runs each case of a grid in one dtype; the gates run the others.

    The dtype alternates between cases, so that the quick suite covers every case and every dtype of a grid (the
    interpreter has no bfloat16 products). After the eighth case of a test, every second one runs in the gates only.
    With TRANSFORMER_KERNELS_GATES_EVERY the gates run a part of these cases, another one on another day.
    """
    if torch.cuda.is_available():
        return
    other_day = pytest.mark.skip(reason=f"one part in {PARTS} of these cases runs on a day")
    this_part, others = turn(PARTS), itertools.count()
    cases: dict[tuple[str, str], int] = {}
    counts: Counter[tuple[str, str]] = Counter()
    for item in items:
        parameters = dict(item.callspec.params) if hasattr(item, "callspec") else {}
        dtype = parameters.pop("dtype", None)
        if dtype not in DTYPES or parameters.get("backend") not in EXECUTED_SLOWLY:
            continue
        function = item.nodeid.split("[", 1)[0]
        case = function, repr(sorted(parameters.items(), key=lambda pair: pair[0]))
        if case not in cases:
            counts[function, parameters["backend"]] += 1
            cases[case] = counts[function, parameters["backend"]]
        number = cases[case]
        beyond = number > CASES_IN_ONE_DTYPE
        executed = DTYPES[:2] if parameters["backend"] == "triton" and "attention" in function else DTYPES
        executed = executed[1:] if "::test_float32_" in function else executed  # of parameters beside a 16-bit x
        if executed[(number // 2 if beyond else number) % len(executed)] is not dtype or (beyond and number % 2):
            item.add_marker(pytest.mark.slow)
            if next(others) % PARTS != this_part:
                item.add_marker(other_day)


backend = backend_fixture(*tk.BACKENDS)


@pytest.fixture(params=DTYPES, ids=dtype_id)
def dtype(request, backend, device):
    require(tested_operation(request), backend, device, request.param)
    return request.param


@pytest.fixture(autouse=True)
def _hardened_interpreter(request, device):
    """Guard bands, poisoned outputs and shuffled programs around every interpreted Triton kernel."""
    parameters = getattr(request.node, "callspec", None)
    if device.type != "cpu" or parameters is None or parameters.params.get("backend") != "triton":
        yield
        return
    interpreter.quicken()
    with interpreter.hardened(seed=zlib.crc32(request.node.nodeid.encode())):
        yield


@pytest.fixture(autouse=True)
def _threads(request):
    """The CPU kernels run in three threads, each of which owns a range of rows, in bfloat16 in one."""
    before, case = torch.get_num_threads(), getattr(request.node, "callspec", None)
    if case is not None and case.params.get("backend") == "cpu":
        torch.set_num_threads(1 if case.params.get("dtype") is torch.bfloat16 else 3)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def triton_attention(backend):
    """Attention's Triton module, imported after the check that the Triton backend runs here."""
    assert backend == "triton"
    from transformer_kernels.ops.attention import _triton as module

    return module


@pytest.fixture
def long_path(triton_attention, monkeypatch, unplanned):
    """Short sequences use Triton's kernels for any length, with small tiles so that every loop runs."""
    tiles = triton_attention.tiles
    monkeypatch.setattr(tiles, "SHORT_QUERIES", 0)
    tile = tiles.Tile(queries=32, keys=32, masked=16, num_warps=4, num_stages=1)
    monkeypatch.setattr(tiles, "find", lambda *_: tile)


@pytest.fixture
def kernels_alone(monkeypatch):
    """PyTorch's operators do not compute attention."""

    def refused(*_):
        raise AssertionError("computed by PyTorch's operators")

    for call in (AttentionCall, PackedAttentionCall):
        monkeypatch.setattr(call, "in_pytorch", refused)
