"""attention_weights against the reference, and against attention."""

import pytest
import torch

import transformer_kernels as tk
from tests.support.arguments import DTYPES, dtype_id, normal
from tests.support.parity import backend_fixture, check_parity

OP = "attention_weights"
PADDED = torch.tensor([[True] * 9, [False, True, True, False, True, True, False, False, False]])
SEQUENCES = torch.tensor([0, 4, 4, 7], dtype=torch.int32)
backend = backend_fixture(*tk.BACKENDS, op="softmax")


@pytest.fixture(params=DTYPES, ids=dtype_id)
def dtype(request):
    return request.param


def make(dtype, device, queries=7, keys=9, batch=2):
    return {
        "q": normal(batch, 4, queries, 16, dtype=dtype, device=device, seed=1),
        "k": normal(batch, 2, keys, 16, dtype=dtype, device=device, seed=2),
    }


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"window": 3},
        {"causal": True, "window": 2, "scale": 0.7, "softcap": 0.8},
        {"window": (1, 3)},
        {"window": (None, 2), "alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 1.0])},
    ],
    ids=["all", "causal", "window", "both, capped", "window to both sides", "window after, slopes"],
)
def test_matches_reference(backend, dtype, device, options):
    check_parity(OP, backend, make(dtype, device), options)
    check_parity(OP, backend, {**make(dtype, device), "key_padding_mask": PADDED.to(device)}, options)


def test_bias_has_a_gradient(backend, device):
    for shape in ((4, 7, 9), (2, 1, 7, 1), (9,)):
        bias = normal(*shape, dtype=torch.float32, device=device, seed=3)
        check_parity(OP, backend, {**make(torch.float32, device), "attn_bias": bias}, {"causal": True})


def test_gradients_do_not_depend_on_the_rounding_of_the_weights(backend, dtype, device):
    """The weights of a row sum to 1, whatever they are: a constant incoming gradient gives 0."""
    inputs = {name: x.requires_grad_() for name, x in make(dtype, device).items()}
    tk.attention_weights(**inputs, backend=backend).sum().backward()
    assert all(x.grad is not None and float(x.grad.abs().max()) < 1e-5 for x in inputs.values())


def test_a_query_whose_bias_hides_every_key_has_no_weights(backend, device):
    bias = normal(7, 9, dtype=torch.float32, device=device, seed=3).detach().clone()
    bias[2], bias[4, :5] = -torch.inf, -torch.inf
    for options in ({}, {"causal": True}):
        check_parity(OP, backend, {**make(torch.float32, device), "attn_bias": bias}, options)


def test_packed_sequences(backend, device):
    tensors = make(torch.float32, device, 8, 8, batch=1)
    check_parity(OP, backend, {**tensors, "cu_seqlens": SEQUENCES.to(device)}, {"causal": True})
    slopes = torch.tensor([0.5, 0.25, 0.125, 1.0], device=device)
    tensors = make(torch.float32, device, 8, 12, batch=1)
    packing = {"cu_seqlens": SEQUENCES.to(device), "cu_seqlens_k": torch.tensor([0, 6, 7, 11], device=device).int()}
    for options in ({}, {"causal": True}, {"window": (2, 1), "softcap": 0.8}):
        check_parity(OP, backend, {**tensors, **packing, "alibi_slopes": slopes}, options)


@pytest.mark.parametrize("packed", [False, True], ids=["padding", "behind the last sequence"])
def test_nan_that_is_never_read_does_not_get_out(backend, device, packed):
    tensors = make(torch.float32, device, 9, batch=1 if packed else 2)
    with torch.no_grad():
        tensors["k"][-1, :, 7:] = torch.nan
        if packed:
            tensors["q"][:, :, 7:] = torch.nan
    hidden = {"cu_seqlens": SEQUENCES.to(device)} if packed else {"key_padding_mask": PADDED.to(device)}
    weights = tk.attention_weights(**tensors, **hidden, backend=backend)
    weights.square().sum().backward()
    assert torch.isfinite(weights).all()
    assert torch.isfinite(tensors["q"].grad).all() and torch.isfinite(tensors["k"].grad).all()
    assert not tensors["k"].grad[-1, :, 7:].any()


def test_scores_are_float32_also_under_autocast(device):
    tensors = make(torch.float32, device)
    with torch.autocast(device.type, torch.bfloat16):
        weights = tk.attention_weights(**tensors, backend="torch")
    low = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    assert weights.dtype is torch.bfloat16
    assert torch.equal(weights, tk.attention_weights(**low, backend="torch"))


def test_errors_name_attention():
    with pytest.raises(ValueError, match="k must have the head dimension of q"):
        tk.attention_weights(torch.ones(1, 1, 2, 8), torch.ones(1, 1, 2, 4))


@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
def test_sinks(backend, dtype, device, masked):
    """A row of weights sums to 1 minus that of the sink; a fully masked row is 0."""
    tensors = make(dtype, device)
    tensors["sinks"] = torch.tensor([0.5, -torch.inf, 1e4, -2.0], dtype=torch.float32, device=device).requires_grad_()
    if masked:
        tensors["key_padding_mask"] = PADDED.to(device)
    check_parity(OP, backend, tensors, {"causal": True, "window": 2} if masked else {"softcap": 0.8})
