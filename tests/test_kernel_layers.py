"""The package `kernels` with layers of this installation: kernelized models have the same results."""

import copy

import pytest
import torch

from transformer_kernels import kernel_layers

kernels = pytest.importorskip("kernels", reason="the package kernels is not installed (extra `test`)")


@pytest.fixture(autouse=True)
def named(monkeypatch):
    """Removes the names that a test registered for classes."""
    given, name = [], kernels.replace_kernel_forward_from_hub
    monkeypatch.setattr(kernels, name.__name__, lambda kind, *rest: given.append(kind) or name(kind, *rest))
    kernel_layers.name_layers()
    yield
    for kind in given:
        del kind.kernel_layer_name, kind.kernel_condition


def kernelized(model, mode=None):
    mode = mode or kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE
    with kernels.use_kernel_mapping(kernel_layers.mapping(), inherit_mapping=False):
        return kernels.kernelize(copy.deepcopy(model), mode=mode, device="cpu", use_fallback=False)


def replaced(model):
    return {type(module).__name__ for module in model.modules() if "forward" in vars(module)}


def assert_same(eager, ours, *inputs):
    outputs = [model(*inputs) for model in (eager, ours)]
    outputs = [out if isinstance(out, torch.Tensor) else out.logits for out in outputs]
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-4, atol=1e-5)
    for out in outputs:
        out.square().sum().backward()
    for (name, mine), theirs in zip(ours.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(
            mine.grad, theirs.grad, rtol=1e-3, atol=1e-4, msg=lambda text, n=name: f"{n}: {text}"
        )


LAYERS = {
    "layer_norm": lambda: torch.nn.LayerNorm(12),
    "layer_norm_of_two_axes": lambda: torch.nn.LayerNorm((3, 12), bias=False),
    "layer_norm_without_weight": lambda: torch.nn.LayerNorm(12, elementwise_affine=False),
    "rms_norm": lambda: torch.nn.RMSNorm(12),
    "rms_norm_without_weight": lambda: torch.nn.RMSNorm(12, eps=0.1, elementwise_affine=False),
    "gelu": lambda: torch.nn.GELU(),
    "gelu_tanh": lambda: torch.nn.GELU("tanh"),
}


@pytest.mark.parametrize("layer", LAYERS)
def test_layers_of_torch(layer, monkeypatch):
    torch.manual_seed(0)
    eager = torch.nn.Sequential(torch.nn.Linear(12, 12), LAYERS[layer]())
    ours = kernelized(eager)
    assert replaced(ours) == {type(eager[1]).__name__}
    assert_same(eager, ours, torch.randn(2, 3, 12))
    with monkeypatch.context() as patched:
        patched.setenv("TRANSFORMER_KERNELS_BACKEND", "nonsense")
        with pytest.raises(ValueError, match="nonsense"):
            ours(torch.randn(2, 3, 12))


class OwnNorm(torch.nn.LayerNorm):
    def forward(self, input):
        return 2 * super().forward(input)


def test_what_computes_something_else_is_left():
    eager = torch.nn.Sequential(OwnNorm(4), torch.nn.RMSNorm((2, 4)), torch.nn.GELU())
    assert replaced(kernelized(eager)) == {"GELU"}


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama", "qwen3"])
def test_models_of_transformers(family):
    from tests.support import transformers_models as models

    eager = models.make(family)
    kernel_layers.name_layers()  # of the classes that are imported by now
    ours = kernelized(eager)
    expected = {"bert": {"LayerNorm", "GELUActivation"}, "gpt2": {"LayerNorm", "NewGELUActivation"}}
    named = family.capitalize()
    assert replaced(ours) == expected.get(family, {f"{named}RMSNorm", f"{named}MLP"})
    assert_same(eager, ours, models.inputs(family, None)["input_ids"])


def test_every_mode_is_served():
    mode = kernels.Mode
    for wanted in (mode.INFERENCE, mode.TRAINING, mode.INFERENCE | mode.TORCH_COMPILE):
        assert replaced(kernelized(torch.nn.Sequential(torch.nn.GELU()), wanted)) == {"GELU"}
    compiled = torch.compile(kernelized(torch.nn.Sequential(torch.nn.LayerNorm(4))), backend="eager", fullgraph=True)
    assert compiled(torch.ones(2, 4)).shape == (2, 4)
