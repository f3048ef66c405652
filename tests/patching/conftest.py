"""Tests of this folder change the table of crossovers: what is decided by one reaches no other."""

import pytest

from transformer_kernels.backends import cpu


@pytest.fixture(autouse=True)
def undecided():
    for forget in cpu.dependents:
        forget()
    yield
    for forget in cpu.dependents:
        forget()
