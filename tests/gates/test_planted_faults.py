"""Planted faults are found and located by a certificate: of each call, and of samples in a longer run."""

import pytest
import torch

from tests.support.day import EVERY
from tests.support.parity import require
from tests.support.planted_faults import FAULTS, RUNS, SAMPLED_STEPS, Fault, search

QUICK = {
    "logarithm of the sum of a row",
    "layer's weight, bit 22",
    "saved gate, bit 22",
    "gradient before the optimizer, bit 20",
    "a weight is NaN",
    "a layer's gradients are skipped",
    "tokens are not copied",
    "a seed is not drawn",
}
"""Names of the faults that are planted in every run of the tests: one of each mechanism."""


def cases():
    others = [fault for fault in FAULTS if fault.name not in QUICK]
    slow = [pytest.param(fault, marks=pytest.mark.slow, id=fault.name) for fault in others[::EVERY]]
    return [pytest.param(fault, id=fault.name) for fault in FAULTS if fault.name in QUICK] + slow


@pytest.fixture(autouse=True)
def on_the_cpu(device):
    require("attention", "cpu", device, torch.float32)


@pytest.mark.parametrize("fault", cases())
def test_a_fault_is_located(fault):
    outcome = search(fault)
    assert outcome.located is not bool(fault.missed), str(outcome.certificate)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [pytest.param(fault, id=fault.name) for fault in FAULTS if not fault.missed][::EVERY])
def test_a_fault_is_located_by_samples(fault):
    """With the default share of the time, by a clock of its own."""
    outcome = search(fault, share=0.03, steps=SAMPLED_STEPS)
    assert outcome.located, str(outcome.certificate)


@pytest.mark.parametrize("recorded", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("run", RUNS)
def test_a_run_without_a_fault_has_no_finding(run, recorded):
    outcome = search(Fault("", run, lambda run, monkeypatch: None, "", "", "", recorded=recorded))
    assert not outcome.found and outcome.certificate.largest_share < 0.9, str(outcome.certificate)


def test_most_faults_are_located():
    """19 of 20, of which each is planted above."""
    assert sum(not fault.missed for fault in FAULTS) >= 0.95 * len(FAULTS)
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) and {fault.name for fault in FAULTS} >= QUICK
