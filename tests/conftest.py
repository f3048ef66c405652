"""Without a GPU, kernels run on CPU tensors: Triton's interpreted, CUDA's emulated. Both are chosen before import.

Every test and every fixture starts from the same random numbers, whatever ran before it.
"""

import gc
import os
import random
import sys
import zlib
from pathlib import Path

import numpy
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    os.environ.setdefault("TRANSFORMER_KERNELS_EMULATE", "1")

if "PYTEST_XDIST_WORKER" in os.environ:  # workers share the cores
    os.environ.setdefault("TRANSFORMER_KERNELS_EMULATE_THREADS", "1")
    torch.set_num_threads(1)

import pytest

CHECKOUT = Path(__file__).resolve().parents[1]


def pytest_collection_modifyitems(config, items):
    if torch.cuda.is_available():
        return
    reason = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):  # not a keyword, which would match a folder of that name
            item.add_marker(reason)


def pytest_collection_finish():
    """Exclude the collected tests from garbage collection, which some libraries run in every call."""
    gc.collect()
    gc.freeze()


def _seed(seed):
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef):
    """A fixture of a module is made by the first test that asks for it: its numbers are those of its name."""
    _seed(zlib.crc32(fixturedef.argname.encode()))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call():
    _seed(0)
    cpu = sys.modules.get("transformer_kernels.backends.cpu")
    if cpu is not None and cpu.is_reproducible():  # as a run with --reproducible leaves the process
        cpu.reproduce(False)


@pytest.fixture
def device():
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


class _Forgotten(dict):
    """Keeps nothing."""

    def __setitem__(self, key, value):
        pass


@pytest.fixture
def unplanned():
    """Every call is validated and dispatched as the first one of its layout is: for tests that replace what does so."""
    from tests.support.operations import without_plans

    with without_plans(_Forgotten):
        yield


@pytest.fixture
def data_folder():
    """The folder containing tinyshakespeare, imdb and gpt2_bpe."""
    folder = Path(os.environ.get("TRANSFORMER_KERNELS_DATA") or CHECKOUT.parent / "shared" / "data")
    if not folder.is_dir():
        pytest.skip("no real data: set TRANSFORMER_KERNELS_DATA to a folder with tinyshakespeare, imdb and gpt2_bpe")
    return folder
