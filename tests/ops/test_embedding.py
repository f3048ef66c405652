"""Token embedding, positions, LayerNorm and dropout in every backend."""

from __future__ import annotations

import itertools
import sys

import pytest
import torch
from torch import Tensor

import transformer_kernels as tk
from tests.support.arguments import normal
from tests.support.operations import backward
from tests.support.parity import check_parity
from transformer_kernels.ops.embedding import EmbeddingCall
from transformer_kernels.ops.embedding._scatter import scattered

OP = "embedding"
VOCABULARY, POSITIONS = 13, 11
CONSTANT_ROW = {"weight": 2.0, "positions": 1.5}
"""PyTorch's LayerNorm backward of rows of one element has rounding errors times 1 / sqrt(eps) instead of 0."""
PARTS = [
    (positions, norm, bias, ids)
    for positions, norm, bias, ids in itertools.product([False, True], repeat=4)
    if (norm or not bias) and (positions or not ids)
]


def make(dtype, device, width, *shape, vocabulary=VOCABULARY, parameters=None):
    """Every tensor argument but position_ids; tokens of the given shape, (3, 5) unless given."""
    shape = shape or (3, 5)
    generator = torch.Generator().manual_seed(0)
    count = max(POSITIONS, shape[1])
    return {
        "tokens": torch.randint(vocabulary, shape, generator=generator).to(device),
        "weight": normal(vocabulary, width, dtype=dtype, device=device, seed=1),
        "positions": normal(count, width, dtype=dtype, device=device, seed=2),
        "norm_weight": normal(width, dtype=parameters or dtype, device=device, seed=3),
        "norm_bias": normal(width, dtype=parameters or dtype, device=device, seed=4),
    }


def positions_of(tokens, dtype=torch.int64):
    """Positions in [0, POSITIONS), some repeated."""
    return ((tokens * 7 + torch.arange(tokens.shape[1], device=tokens.device)) % POSITIONS).to(dtype)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("width", [1, 17, 59, 128, 256, 768, 1000])
def test_matches_reference_over_widths(backend, dtype, device, width, norm):
    exceeds = (backend, dtype, device.type, width, norm) == ("torch", torch.float32, "cpu", 1, True)
    tensors = make(dtype, device, width)
    if not norm:
        tensors["norm_weight"] = tensors["norm_bias"] = None
    options = {"dropout_p": 0.1, "scale": 1.5}
    check_parity(OP, backend, tensors, options, seed=11, excess=CONSTANT_ROW if exceeds else None)


@pytest.mark.parametrize(
    ("width", "norm"),
    [(1025, True), (4097, True), (257, False), (1025, False), (1032, False), (4097, False), (8200, False)],
)
def test_matches_reference_over_wide_rows(backend, dtype, device, width, norm):
    tensors = make(dtype, device, width, 2, 3)
    if not norm:
        tensors["norm_weight"] = tensors["norm_bias"] = None
    check_parity(OP, backend, tensors, {"dropout_p": 0.1})


@pytest.mark.parametrize("shape", [(1, 1), (1, 33), (300, 1), (7, 61), (64, 64)], ids=str)
def test_matches_reference_over_rows(backend, dtype, device, shape):
    check_parity(OP, backend, make(dtype, device, 24, *shape), {"dropout_p": 0.1})


@pytest.mark.parametrize(("positions", "norm", "bias", "ids"), PARTS)
def test_every_combination_of_parts(backend, device, positions, norm, bias, ids):
    tensors = make(torch.float32, device, 40)
    if ids:
        tensors["position_ids"] = positions_of(tensors["tokens"])
    for name, there in (("positions", positions), ("norm_weight", norm), ("norm_bias", bias)):
        if not there:
            tensors[name] = None
    for dropout_p in (0.0, 0.3):
        check_parity(OP, backend, tensors, {"scale": -0.7, "eps": 1e-3, "dropout_p": dropout_p}, seed=4)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("dropout_p", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("width", [17, 34, 128])
def test_dropout_is_the_reference_mask(backend, dtype, device, width, dropout_p, norm):
    tensors = make(dtype, device, width, 3, 7)
    if not norm:
        tensors["norm_weight"] = tensors["norm_bias"] = None
    check_parity(OP, backend, tensors, {"dropout_p": dropout_p}, seed=5)


def test_int32_ids(backend, device):
    tensors = make(torch.float32, device, 24)
    wide = tk.embedding(**tensors, position_ids=positions_of(tensors["tokens"]), backend=backend)
    tensors["tokens"] = tensors["tokens"].int()
    narrow = tk.embedding(**tensors, position_ids=positions_of(tensors["tokens"], torch.int32), backend=backend)
    assert torch.equal(wide, narrow)
    check_parity(OP, backend, tensors | {"position_ids": positions_of(tensors["tokens"], torch.int32)})


@pytest.mark.parametrize("scale", [1.0, 11.3])
@pytest.mark.parametrize("vocabulary", [1, 2, 1000])
def test_repeated_and_absent_tokens(backend, dtype, device, vocabulary, scale):
    tensors = make(dtype, device, 24, 8, 40, vocabulary=vocabulary)
    check_parity(OP, backend, tensors, {"scale": scale})
    weight = tensors["weight"].detach().requires_grad_()
    tk.embedding(**tensors | {"weight": weight}, backend=backend).square().sum().backward()
    absent = torch.ones(vocabulary, dtype=torch.bool).index_fill(0, tensors["tokens"].flatten().cpu(), False)
    assert not weight.grad.cpu()[absent].any()


def test_float32_norm_parameters(backend, dtype, device):
    own, wide = (make(dtype, device, 96, 9, 9, parameters=each) for each in (dtype, torch.float32))
    for names in (("norm_weight", "norm_bias"), ("norm_weight",), ("norm_bias",)):
        check_parity(OP, backend, own | {name: wide[name] for name in names}, {"dropout_p": 0.1})


def test_a_mean_of_a_million_keeps_its_digits(backend, device):
    if backend == "torch":
        pytest.skip("PyTorch's LayerNorm rounds x * rstd and mean * rstd separately; see test_layer_norm")
    tensors = make(torch.float32, device, 128)
    tensors["weight"] = (tensors["weight"].detach() + 1e6).requires_grad_()
    check_parity(OP, backend, tensors)


@pytest.mark.parametrize("stray", [-1, VOCABULARY])
def test_an_unknown_id_is_an_index_error_on_the_cpu(backend, device, stray):
    if device.type != "cpu":
        pytest.skip("ids are not validated on a GPU")
    tensors = make(torch.float32, device, 24)
    tensors["tokens"][1, 2] = stray
    with pytest.raises(IndexError, match=rf"embedding: tokens must be in \[0, {VOCABULARY}\); got ids from"):
        tk.embedding(**tensors, backend=backend)
    positions = torch.zeros_like(tensors["tokens"]).clamp_(0, 0)
    positions[0, 0] = POSITIONS
    tensors["tokens"][1, 2] = 0
    with pytest.raises(IndexError, match=rf"embedding: position_ids must be in \[0, {POSITIONS}\); got ids from 0 to"):
        tk.embedding(**tensors, position_ids=positions, backend=backend)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(
    ("token", "position"), [(-1, 2), (VOCABULARY, 2), (2**40, 2), (3, -5), (3, POSITIONS), (3, 2**40), (-1, -1)]
)
def test_a_kernel_reads_nothing_for_an_unknown_id(backend, device, token, position, norm, monkeypatch):
    """As on a GPU: the row is NaN, other rows are unchanged, and the id has no gradient."""
    if backend == "torch":
        pytest.skip("PyTorch validates ids itself")
    from transformer_kernels.backends import dispatch

    tensors = make(torch.float32, device, 24)
    tensors = {name: value.detach() for name, value in tensors.items()}
    if not norm:
        tensors["norm_weight"] = tensors["norm_bias"] = None
    ids = positions_of(tensors["tokens"])
    whole = tk.embedding(**tensors, position_ids=ids, backend=backend)
    tensors["tokens"][1, 2], ids[1, 2] = token, position
    order = (tensors["weight"], tensors["tokens"], tensors["positions"], ids, tensors["norm_weight"])
    call = EmbeddingCall(*order, tensors["norm_bias"], None, 1.0, 1e-5, 0.0)
    module = dispatch.kernels_of(dispatch.OPERATIONS[OP], backend)
    result = module.of(call).forward(call)
    y = result.y.clone()
    assert y[1, 2].isnan().all()
    y[1, 2] = whole[1, 2]
    assert torch.equal(y, whole)
    owner = module if hasattr(module, "table_gradients") else sys.modules[module.__module__]
    monkeypatch.setattr(owner, "table_gradients", lambda *given: (given[-2], None))
    ds, *_ = backward(module, call, result, torch.ones_like(y))
    assert ds[1, 2].isnan().all() == norm and ds[0].isfinite().all()


def test_wider_rows_than_triton_holds_are_refused_with_the_reason(device):
    tokens, weight = torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, 8193)
    norm = torch.ones(8193)
    reason = tk.explain("embedding", tokens, weight, None, norm).reasons["triton"]
    assert "rows of 8193 columns with LayerNorm" in reason or "Triton" in reason or "triton" in reason
    assert "8193" not in tk.explain("embedding", tokens, weight).reasons["triton"]


@pytest.mark.parametrize("count", [3, 40])
def test_ids_without_a_row_are_left_out_of_the_sums(count):
    """As on a GPU, where such ids are replaced before PyTorch's sum; with few and many rows."""
    ds, ids = torch.randn(2, 5, 8), torch.tensor([[0, 2, -1, 2, 1], [-1, 0, 0, 1, 2]])
    want = torch.zeros(count, 8)
    for row, token in zip(ds.flatten(0, 1), ids.flatten(), strict=True):
        if token >= 0:
            want[token] += 2.5 * row
    torch.testing.assert_close(scattered(ds, ids, count, 2.5), want)


def test_autocast_leaves_the_dtype_of_the_weight(backend, device):
    tensors = make(torch.float32, device, 24)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        assert tk.embedding(**tensors, backend=backend).dtype is torch.float32
    tensors = make(torch.float16, device, 24, parameters=torch.float32)
    assert tk.embedding(**tensors, backend=backend).dtype is torch.float16


def test_the_backward_pass_keeps_nothing_of_the_size_of_the_result(backend, device):
    tensors = make(torch.float32, device, 24, 7, 9)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        tk.embedding(**tensors, dropout_p=0.1, backend=backend)
    fresh = [x for x in saved if not any(x is value for value in tensors.values())]
    assert sum(x.numel() for x in fresh) <= 2 * 7 * 9 + 1, "mean, rstd and the seed"
