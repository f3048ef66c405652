"""Selection of the backend: precedence of settings, errors without fallback, and explain."""

import inspect
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import transformer_kernels as tk
from python_ref import ops as reference
from tests.support import fresh
from transformer_kernels.backends import build, dispatch
from transformer_kernels.ops._kernels import Kernels

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def no_default(monkeypatch, unplanned):
    monkeypatch.delenv("TRANSFORMER_KERNELS_BACKEND", raising=False)
    monkeypatch.setattr(dispatch, "_default", None)


def test_strength_of_the_ways_to_ask(monkeypatch):
    assert tk.get_backend() == "auto"
    monkeypatch.setenv("TRANSFORMER_KERNELS_BACKEND", "cuda")
    assert tk.get_backend() == "cuda"
    tk.set_backend("triton")
    assert tk.get_backend() == "triton"
    with tk.use_backend("torch"):
        assert tk.get_backend() == "torch"
        with tk.use_backend("cuda"):
            assert tk.get_backend() == "cuda"
            assert dispatch.requested("triton") == "triton"
        assert tk.get_backend() == "torch"
    tk.set_backend(None)
    assert tk.get_backend() == "cuda"


def test_use_backend_is_left_after_an_error():
    with pytest.raises(KeyError), tk.use_backend("torch"):
        raise KeyError
    assert tk.get_backend() == "auto"


def test_use_backend_belongs_to_its_thread():
    seen = []
    with tk.use_backend("torch"):
        thread = threading.Thread(target=lambda: seen.append(tk.get_backend()))
        thread.start()
        thread.join()
    assert seen == ["auto"]


@pytest.mark.parametrize("ask", [tk.set_backend, tk.bind, lambda name: tk.gelu(torch.ones(3), backend=name)])
def test_an_unknown_backend_is_named_with_the_known_ones(ask):
    with pytest.raises(ValueError, match=r"backend must be one of torch, cpu, triton, cuda, auto.*; got 'tritn'"):
        ask("tritn")


def test_an_unknown_backend_in_the_environment(monkeypatch):
    monkeypatch.setenv("TRANSFORMER_KERNELS_BACKEND", "rocm")
    with pytest.raises(ValueError, match="'rocm'"):
        tk.gelu(torch.ones(3))


def test_a_named_backend_never_falls_back_and_auto_is_quiet():
    as_installed = dict.fromkeys(("TRITON_INTERPRET", "TRANSFORMER_KERNELS_EMULATE"))
    result = fresh.python(
        "import torch, transformer_kernels as tk\n"
        "tk.gelu(torch.ones(3)); print(tk.explain('gelu', torch.ones(3)))\n"
        "for name in ('triton', 'cuda'):\n"
        "    try: tk.gelu(torch.ones(3), backend=name)\n"
        "    except tk.BackendUnavailable as error: print('refused:', error)",
        **as_installed,
    )
    assert result.returncode == 0 and result.stderr == ""
    for name in ("triton", "cuda"):
        assert f"refused: gelu: backend '{name}' is not available: " in result.stdout
    built = dispatch.unavailable("cpu", torch.device("cpu")) is None
    assert f"requested auto, selected {'cpu' if built else 'torch'}" in result.stdout


def test_float64_is_for_torch_only(device):
    x = torch.ones(3, dtype=torch.float64, device=device)
    if dispatch.unavailable("triton", device) is not None:
        pytest.skip("needs Triton, at least its interpreter")
    with pytest.raises(tk.UnsupportedByBackend, match="float64 is computed by backend='torch' only"):
        tk.gelu(x, backend="triton")


def test_explain_tells_who_and_why(monkeypatch):
    monkeypatch.setattr(dispatch, "unavailable", lambda name, device: "no such device" if name == "cuda" else None)
    x = torch.ones(4, 8, dtype=torch.float64)
    explanation = tk.explain("layer_norm", x, x[0])
    assert (explanation.operation, explanation.requested, explanation.chosen) == ("layer_norm", "auto", "torch")
    assert explanation.reasons["cuda"] == "no such device" and "float64" in explanation.reasons["triton"]
    assert tk.explain(tk.layer_norm, x, x[0], backend="cuda").chosen is None
    assert "selected none" in str(tk.explain("layer_norm", x, x[0], backend="cuda"))
    assert "torch.func are by PyTorch's operators; cuda has neither" in str(
        tk.explain("layer_norm", x, x[0], backend="cuda")
    )
    assert str(explanation).endswith("forward-mode AD and torch.func are by PyTorch's operators")


def test_explain_checks_its_arguments():
    with pytest.raises(ValueError, match="operation must be one of add_layer_norm, "):
        tk.explain("relu", torch.ones(3))
    with pytest.raises(TypeError, match="gelu: x must be a tensor"):
        tk.explain("gelu", 3)


def test_auto_takes_the_first_that_supports_the_call(monkeypatch):
    monkeypatch.setitem(dispatch.AUTO_ORDER, "cpu", ("cuda", "triton", "torch"))
    monkeypatch.setattr(dispatch, "unavailable", lambda name, device: "none here" if name == "cuda" else None)
    refused = {"triton": "not this call"}
    monkeypatch.setattr(dispatch, "_refusal", lambda op, name, arguments: refused.get(name))
    monkeypatch.setattr(dispatch, "distrusted", None)
    operation = SimpleNamespace(name="gelu")
    name, refusals = dispatch._automatic(operation, (torch.ones(3), "none"), torch.device("cpu"))
    assert name == "torch" and refusals == {"cuda": "none here", "triton": "not this call"}


def test_bound_operations_have_the_signatures_of_the_reference():
    bound = tk.bind("torch")
    for name in dispatch.OPERATIONS:
        ours, theirs = (inspect.signature(getattr(each, name)).parameters for each in (bound, reference))
        assert list(ours) == list(theirs)
        for own, other in zip(ours.values(), theirs.values(), strict=True):
            assert (own.kind, own.default) == (other.kind, other.default), name
        public = inspect.signature(getattr(tk, name))
        assert [*ours, "backend"] == list(public.parameters)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_sum_with_dropout_draws_the_mask_of_the_reference(dtype):
    x, residual, dy = torch.randn(3, 2, 33, 70).unbind()
    found = []
    for bound in (tk.bind(), reference):
        leaves = x.to(dtype).requires_grad_(), residual.clone().requires_grad_()
        torch.manual_seed(2)
        with torch.autocast("cpu", dtype, enabled=dtype is torch.bfloat16):
            y = bound.add_dropped(*leaves, 0.3)
        assert y.dtype is torch.float32
        found.append([y.detach(), *torch.autograd.grad(y, leaves, dy)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=4 * torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps)


def test_bound_operations_use_their_backend(monkeypatch):
    import copy
    import pickle

    bound = tk.bind("cuda")
    for each in (bound, copy.deepcopy(bound), pickle.loads(pickle.dumps(bound))):
        assert each == bound and repr(each) == "transformer_kernels.bind('cuda')"
    assert bound not in (tk.bind("torch"), tk.bind(), "cuda") and len({bound, tk.bind("cuda"), tk.bind()}) == 2
    monkeypatch.setattr(dispatch, "unavailable", lambda name, device: "switched off" if name == "cuda" else None)
    with pytest.raises(tk.BackendUnavailable, match="switched off"), tk.use_backend("torch"):
        bound.gelu(torch.ones(3))
    with tk.use_backend("torch"):
        assert tk.bind().gelu(torch.zeros(3)).eq(0).all()
    assert tk.bind("reference") is reference


def test_the_named_backend_computes(monkeypatch):
    """Not another backend with the same results."""

    class Sevens(Kernels):
        def forward(self, call):
            return torch.full_like(call.x, 7.0)

    monkeypatch.setattr(dispatch, "unavailable", lambda *_: None)
    monkeypatch.setitem(dispatch._kernels, ("gelu", "cuda"), Sevens)
    assert tk.gelu(torch.ones(2), backend="cuda").tolist() == [7.0, 7.0]


def test_kernels_that_do_not_build_are_no_reason_to_skip_their_tests():
    """Parity tests skip a backend that cannot run here; with a compiler, the sources must build."""
    try:
        build.find_host_compiler()
    except build.CompilerMissing as error:
        pytest.skip(str(error))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for backend in ("cpu", "cuda") if device.type == "cpu" else ("cuda",):
        assert dispatch.unavailable(backend, device) is None
