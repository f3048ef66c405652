"""A linear layer in every backend that has one: forward and all gradients against the textbook in float64."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
from torch import Tensor

import transformer_kernels as tk
from tests.support.arguments import normal
from tests.support.parity import check_parity

OP = "linear"
ACTIVATIONS = [None, "relu", "gelu", "gelu_tanh"]


@pytest.fixture(params=["as chosen", "PyTorch's products"], autouse=True)
def products(request: pytest.FixtureRequest, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours answer where weights are small; no weight of these tests is large."""
    if request.param == "PyTorch's products":
        if backend != "cpu":
            pytest.skip("only the cpu backend chooses")
        chooser = import_module("transformer_kernels.ops.linear._cpu")
        monkeypatch.setattr(chooser, "LARGEST_WEIGHT", 0)


def make(
    M: int, N: int, K: int, dtype: torch.dtype, device: torch.device, bias: bool = True
) -> dict[str, Tensor | None]:
    return {
        "x": normal(M, K, dtype=dtype, device=device, seed=1),
        "weight": normal(N, K, dtype=dtype, device=device, seed=2),
        "bias": normal(N, dtype=dtype, device=device, seed=3) if bias else None,
    }


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("sizes", [(1, 1, 1), (3, 65, 128), (97, 601, 31), (100, 96, 64), (2100, 130, 17)], ids=str)
def test_matches_reference(
    backend: str, dtype: torch.dtype, device: torch.device, sizes: tuple[int, int, int], activation: str | None
) -> None:
    check_parity("linear", backend, make(*sizes, dtype, device), {"activation": activation})


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5])
def test_few_rows(backend: str, dtype: torch.dtype, device: torch.device, rows: int) -> None:
    """The weight is large enough to be read in streams, which leaves a rest of three columns and, of the depth, two."""
    check_parity("linear", backend, make(rows, 2051, 130, dtype, device), {"activation": None if rows == 1 else "gelu"})


def test_without_a_bias(backend: str, dtype: torch.dtype, device: torch.device) -> None:
    check_parity("linear", backend, make(40, 33, 20, dtype, device, bias=False), {"activation": "relu"})


@pytest.mark.parametrize("wanted", ["x", "weight", "bias"])
def test_only_the_wanted_gradients(backend: str, dtype: torch.dtype, device: torch.device, wanted: str) -> None:
    tensors = make(40, 33, 20, dtype, device)
    for name, tensor in tensors.items():
        tensor.requires_grad_(name == wanted)
    check_parity("linear", backend, tensors, {"activation": "gelu"})


def test_autocast_takes_its_dtype(backend: str, device: torch.device) -> None:
    tensors = make(8, 33, 20, torch.float32, device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        y = tk.linear(**tensors, backend=backend)
    y.float().sum().backward()
    assert y.dtype is torch.bfloat16 and tensors["weight"].grad.dtype is torch.float32


@pytest.mark.parametrize("activation", ["silu", 1, "none"])
def test_an_unknown_activation_is_refused(backend: str, device: torch.device, activation: object) -> None:
    with pytest.raises(ValueError, match="linear: activation must be None, relu, gelu or gelu_tanh; got "):
        tk.linear(**make(2, 3, 4, torch.float32, device), activation=activation, backend=backend)


def test_a_nan_stays_in_its_row(backend: str, device: torch.device) -> None:
    tensors = make(20, 33, 20, torch.float32, device)
    with torch.no_grad():
        tensors["x"][3] = float("nan")
    y = tk.linear(**tensors, activation="relu", backend=backend)
    assert y[3].isnan().all() and torch.isfinite(y[4:]).all() and torch.isfinite(y[:3]).all()
