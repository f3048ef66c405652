"""Bugs planted in PTX are found: by a report, by a fault, or by a result outside of its budget."""

import pytest

from tests.support.day import in_turn
from tests.support.ptx.bugs import survey
from tests.support.ptx.worker import in_worker

pytest.importorskip("triton", reason="Triton is not installed")

NOT_FOUND = {
    "layer_norm sm_80: without bar.sync, 12 of 15": "before a store to the bytes that the same thread has read alone",
    "layer_norm sm_80: store 16 bytes further, 10 of 18": "of columns behind the last: no thread executes it",
    "layer_norm sm_80: product that is a sum, 11 of 20": "of columns behind the last: the result is not stored",
    "attention sm_80: without bar.sync, 1 of 18": "between copies to tiles that nothing has read",
    "attention sm_80: without bar.sync, 4 of 18": "another barrier follows before the next access",
    "attention sm_80: without commit_group, 1 of 6": "its copies join the next group, and both have the same wait",
    "attention sm_80: tail of a copy not masked, 1 of 2": "of a second block of keys: in bounds even if not used",
    "attention sm_90: without bar.sync, 1 of 16": "between copies to tiles that nothing has read",
    "attention sm_90: without bar.sync, 3 of 16": "the only readers of the tile, a product's, have been waited for",
    "attention sm_90: without bar.sync, 4 of 16": "another barrier follows before the next access",
    "attention sm_90: without commit_group, 1 of 6": "its copies join the next group, and both have the same wait",
    "attention sm_90: tail of a copy not masked, 1 of 2": "of a second block of keys: in bounds even if not used",
    "attention sm_90: without fence.proxy.async, 3 of 3": "it orders only what cp.async wrote: the expected report",
    "attention sm_90: without wgmma wait, 2 of 4": "the causal block follows, and waits before the sums are read",
    "attention sm_90: wgmma without commit, 2 of 4": "its products join the next group, and both have the same wait",
}
"""Bugs that change nothing in their call, and why; all others are found."""


def check(call, least):
    verdicts = in_worker(survey, call)
    unseen = {name for name, verdict in verdicts.items() if not verdict}
    explained = {name for name in NOT_FOUND if name.startswith(f"{call}:")}
    assert unseen == explained, f"unexplained {sorted(unseen - explained)}; found now {sorted(explained - unseen)}"
    assert len(verdicts.keys() - unseen) >= least


def test_bugs_of_layer_norm_are_found():
    """Deleted barriers show as races alone: the results stay right."""
    check("layer_norm sm_80", 20)


@pytest.mark.slow
@pytest.mark.parametrize("target", in_turn(["sm_80", "sm_90"]))
def test_bugs_of_attention_are_found(target):
    check(f"attention {target}", 40)
