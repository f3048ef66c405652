"""compare: which of kernels and PyTorch is closer to float64, and the first module at which they part."""

import threading

import pytest
import torch

import transformer_kernels as tk
from tests.support.parity import require
from transformer_kernels.ops.norm import LAYER_NORM

BERT = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}


def encoder():
    torch.manual_seed(0)
    return torch.nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), torch.randn(4, 64, 64)


def own_model():
    torch.manual_seed(0)
    return tk.build("char_gpt", layers=2, width=64, heads=2), torch.randint(65, (4, 64))


def own_modules():
    torch.manual_seed(0)
    return torch.nn.Sequential(tk.nn.LayerNorm(64), torch.nn.Linear(64, 64), tk.nn.GELU()), torch.randn(64, 64)


def by_hand():
    class Gate(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up = torch.nn.Linear(64, 256)

        def forward(self, x):
            return torch.nn.functional.gelu(self.up(x))

    torch.manual_seed(0)
    return Gate(), torch.randn(4, 64, 64)


def of_transformers():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    model = transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=99, **BERT))
    return model, {"input_ids": torch.randint(99, (4, 32)), "labels": torch.tensor([0, 1, 1, 0])}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("make", [encoder, own_model, own_modules, by_hand, of_transformers])
def test_rounding_is_no_difference(make, dtype):
    """Each module and each parameter has a row, and no model parts; the model itself is not changed."""
    model, batch = make()
    model = model.to(dtype)
    batch = batch.to(dtype) if isinstance(batch, torch.Tensor) and batch.is_floating_point() else batch
    before = {name: value.clone() for name, value in model.state_dict().items()}
    comparison = tk.compare(model, batch)
    assert comparison.first is None, repr(comparison)
    gradients = {row.name for row in comparison.rows if row.kind == "gradient"}
    assert gradients == {name for name, each in model.named_parameters()}
    assert any(row.name == "(the model)" for row in comparison.rows)
    assert all(row.pytorch > 0.0 for row in comparison.rows if row.name.endswith("weight") and row.kind == "gradient")
    assert model.training and all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(each.grad is None for each in model.parameters())


@pytest.mark.parametrize("make", [encoder, own_model])
def test_the_kernels_run(make, device):
    """Else both sides would be PyTorch."""
    require("layer_norm", "cpu", device, torch.float32)
    with tk.use_backend("cpu"):
        rows = tk.compare(*make()).rows
    assert any(row.closer != "equal" for row in rows)


@pytest.mark.parametrize("patched", [False, True])
def test_a_wrong_kernel_is_located(patched, monkeypatch, device):
    """The second norm of the layer is wrong by a thousandth; everything before it is right."""
    require("layer_norm", "cpu", device, torch.float32)
    model, batch = encoder()
    model.norm2.eps = 1e-6  # another layout than norm1
    if patched:
        tk.patch(model, "cpu")
    kernels = tk.backends.dispatch.kernels_of(LAYER_NORM, "cpu")
    right = kernels.forward_recorded

    def wrong(self, call):
        result = right(self, call)
        return result if call.eps == 1e-5 else result._replace(y=result.y * 1.001)

    monkeypatch.setattr(kernels, "forward_recorded", wrong)
    LAYER_NORM.forget_plans()
    with tk.use_backend("cpu"):
        comparison = tk.compare(model, batch)
    LAYER_NORM.forget_plans()
    assert comparison.first.name == "norm2" and comparison.first.kind == "output"
    assert comparison.first.closer == "PyTorch" and comparison.first.share > 100
    assert "beyond rounding: first at norm2 (output" in str(comparison)


def test_the_table_is_at_most_twenty_rows():
    model, batch = own_model()
    lines = repr(tk.compare(model, batch)).splitlines()
    assert lines[0].split() == [
        "module",
        "or",
        "parameter",
        "of",
        "kernels",
        "PyTorch",
        "closer",
        "of",
        "the",
        "budget",
    ]
    assert len(lines) <= 23 and "more" in lines[-2] and "closer to float64: kernels" in lines[-1]


def test_a_loss_of_ones_own():
    model, batch = encoder()
    comparison = tk.compare(model, batch, loss=lambda y: y[:, 0].square().mean())
    assert comparison.first is None and any(row.kind == "gradient" for row in comparison.rows)


def test_invalid_arguments():
    with pytest.raises(TypeError, match=r"compare: model must be a torch.nn.Module; got int"):
        tk.compare(1, torch.randn(2))
    with pytest.raises(TypeError, match="no tensor of floating point; got Tensor"):
        tk.compare(torch.nn.Identity(), torch.arange(3))


class Around(torch.nn.Module):
    """A linear layer and a norm, and what is done before and after them."""

    def __init__(self, before=lambda x: x, after=lambda x: x):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.norm = torch.nn.Linear(64, 64), torch.nn.LayerNorm(64)
        self.before, self.after = before, after

    def forward(self, x):
        return self.after(self.norm(self.linear(self.before(x))))


def test_a_model_that_writes_to_its_batch():
    x = torch.randn(4, 64)
    kept = x.clone()
    comparison = tk.compare(Around(lambda x: x.mul_(100.0)), x)
    assert comparison.first is None and torch.equal(x, kept)


def test_infinities_that_both_have_are_no_difference():
    assert tk.compare(Around(after=lambda x: x / 0), torch.randn(4, 64)).first is None


@pytest.mark.parametrize("model", [Around().requires_grad_(False), torch.nn.GELU()])
def test_without_gradients_the_outputs_are_compared(model):
    rows = tk.compare(model, torch.randn(4, 64)).rows
    assert rows and {row.kind for row in rows} == {"output"}


def test_a_batch_that_was_computed_with_gradients():
    assert tk.compare(Around(), torch.randn(4, 64, requires_grad=True) * 2.0).first is None


def test_within_inference_mode():
    with torch.inference_mode():
        assert {row.kind for row in tk.compare(Around(), torch.randn(4, 64)).rows} == {"output", "gradient"}


@pytest.mark.parametrize("result", [None, 1.0, torch.ones(2)], ids=["None", "a number", "a vector"])
def test_a_loss_that_is_no_scalar(result):
    with pytest.raises(TypeError, match="compare: loss must return a scalar tensor"):
        tk.compare(Around(), torch.randn(4, 64), loss=lambda output: result)


def test_models_that_cannot_be_compared():
    locked = Around()
    locked.lock = threading.Lock()
    with pytest.raises(TypeError, match="compare: the model cannot be copied: cannot pickle"):
        tk.compare(locked, torch.randn(4, 64))
    with pytest.raises(ValueError, match="compare: the model does not run in float64"):
        tk.compare(Around(torch.Tensor.float), torch.randn(4, 64))
