"""Each Triton kernel family by the PTX of Triton's compiler: forward and backward, on sm_80 and sm_90, with races."""

import pytest
import torch

from tests.support.arguments import normal
from tests.support.ptx.cases import CP_ASYNC_PROXY, any_length, example, parity
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


@pytest.mark.parametrize(
    ("queries", "keys", "width", "dtype"),
    [(40, 40, 16, torch.float16), (40, 40, 64, torch.bfloat16), (150, 150, 64, torch.float16)],
    ids=str,
)
def test_padding_with_dropout_matches_reference(queries, keys, width, dtype):
    """A mask of bytes and one of joined halves: by both Triton once sized the operands of a product beyond their tile.

    The kernels for any length and for few keys, in steps of 16 keys, the smallest."""
    shapes = {"q": queries, "k": keys, "v": keys}
    tensors = {
        name: normal(1, 1, length, width, dtype=dtype, device="cpu", seed=i)
        for i, (name, length) in enumerate(shapes.items())
    }
    tensors["key_padding_mask"] = torch.arange(keys)[None] % 7 != 1
    outcome = in_worker(parity, "attention", "sm_80", tensors, {"causal": True, "dropout_p": 0.25})
    assert_clean(outcome)
