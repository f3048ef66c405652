"""Each Triton kernel family by the PTX of Triton's compiler: forward and backward, on sm_80 and sm_90, with races."""

import pytest
import torch

from tests.support.ptx.cases import CP_ASYNC_PROXY, any_length, example
from tests.support.ptx.worker import in_worker

pytest.importorskip("triton", reason="Triton is not installed")

TARGETS = ("sm_80", "sm_90")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FAMILIES = ("softmax", "add_layer_norm", "gelu", "bias_gelu", "geglu", "cross_entropy", "embedding", "rotary")
"""One operation for each kernel family on rows; the gates run the others, and all on both targets."""
PER_TARGET = pytest.mark.parametrize("target", TARGETS)
PER_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


def assert_clean(outcome):
    assert not outcome.findings, "\n".join(outcome.lines[:20])


@PER_DTYPE
@pytest.mark.parametrize("op", FAMILIES)
def test_matches_reference(op, dtype):
    """Each dtype on one target, which changes from case to case; the gates have the other."""
    target = TARGETS[(FAMILIES.index(op) + DTYPES.index(dtype)) % 2]
    assert_clean(in_worker(example, op, target, dtype, 12, 64, {}))


@PER_TARGET
@PER_DTYPE
def test_short_attention_matches_reference(dtype, target):
    """bfloat16 too: Triton's interpreter has no products of it."""
    outcome = in_worker(example, "attention", target, dtype, 12, 64, {})
    assert outcome.kernels == ["attention_short_forward_kernel", "attention_short_backward_kernel"]
    assert_clean(outcome)


@PER_TARGET
@PER_DTYPE
def test_attention_of_any_length_matches_reference(dtype, target):
    outcome = in_worker(any_length, target, dtype)
    assert len(outcome.kernels) == 3
    if target == "sm_90" and dtype.itemsize == 2:
        assert outcome.findings.keys() == {CP_ASYNC_PROXY}, outcome.lines[:20]
    else:
        assert_clean(outcome)
