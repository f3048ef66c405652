"""Patched modules accept what the original ones do: tensors that no kernel reads, and transforms, run the original."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, jvp, vmap
from torch.nn import functional as F

import transformer_kernels as tk
from tests.support import transformers_models as models
from transformer_kernels.backends.errors import UnsupportedByBackend
from transformer_kernels.patching import _products, _recognised, _rerouted, _torch, _transformers
from transformer_kernels.patching._output import OutputLayer

transformers = pytest.importorskip("transformers")

WIDTH = 32


class Self(nn.Module):
    """A module of several arguments as one of x alone."""

    def __init__(self, inner, call):
        super().__init__()
        self.inner, self.call = inner, call

    def forward(self, x):
        return self.call(self.inner, x)


class Rerouted(nn.Module):
    """A hand-written forward, whose call of torch is rerouted."""

    def __init__(self, function):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.function = function

    def forward(self, x):
        raise NotImplementedError


class ReroutedLayerNorm(Rerouted):
    def forward(self, x):
        return F.layer_norm(x, (WIDTH,), self.weight)


class ReroutedRMSNorm(Rerouted):
    def forward(self, x):
        return F.rms_norm(x, (WIDTH,), self.weight)


class ReroutedAttention(Rerouted):
    def forward(self, x):
        return F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])[:, 0]


def attended(layer, x):
    return layer(x, x, x, need_weights=False)[0]


def encoder(**options):
    return nn.TransformerEncoderLayer(WIDTH, 4, 48, 0.0, batch_first=True, **options)


def decoder():
    return nn.TransformerDecoderLayer(WIDTH, 4, 48, 0.0, batch_first=True)


TORCH = {
    "LayerNorm": lambda: nn.LayerNorm(WIDTH),
    "RMSNorm": lambda: nn.RMSNorm(WIDTH),
    "GELU": nn.GELU,
    "Softmax": lambda: nn.Softmax(-1),
    "MultiHeadAttention": lambda: Self(nn.MultiheadAttention(WIDTH, 4, batch_first=True), attended),
    "TransformerEncoder": lambda: nn.TransformerEncoder(encoder(), 1, enable_nested_tensor=False),
    "TransformerEncoderLayer": encoder,
    "TransformerDecoderLayer": lambda: Self(decoder(), lambda layer, x: layer(x, x)),
    "ReroutedLayerNorm": lambda: ReroutedLayerNorm(None),
    "ReroutedRMSNorm": lambda: ReroutedRMSNorm(None),
    "ReroutedAttention": lambda: ReroutedAttention(None),
}


class Tagged(torch.Tensor):
    """A subclass without behaviour of its own, which results keep."""


class Wrapped(torch.Tensor):
    """A wrapper subclass, as DTensor and torchao's quantised tensors are: without memory of its own."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, requires_grad=False)

    def __init__(self, inner):
        self.inner = inner

    def __tensor_flatten__(self):
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        opened, options = torch.utils._pytree.tree_map_only(Wrapped, lambda x: x.inner, (args, kwargs or {}))
        result = function(*opened, **options)
        return Wrapped(result) if function is torch.ops.aten.detach.default else result  # as Parameter requires


def parts(layout):
    torch.manual_seed(1)
    return torch.nested.nested_tensor([torch.randn(5, WIDTH), torch.randn(9, WIDTH)], layout=layout)


def negated(x):
    """The negative of -x as a view."""
    return torch.view_as_complex(torch.stack([x, -x], -1)).conj().imag


KINDS = {
    "jagged": lambda module, x: module(parts(torch.jagged)),
    "nested": lambda module, x: module(parts(torch.strided)),
    "tagged": lambda module, x: module(x.as_subclass(Tagged)),
    "wrapped": lambda module, x: module(Wrapped(x)),
    "negated": lambda module, x: module(negated(x)),
    "sparse": lambda module, x: module(x.to_sparse()),
    "empty": lambda module, x: module(x[:0]),
    "vmap": lambda module, x: vmap(module)(torch.stack([x, x + 1])),
    "jvp": lambda module, x: jvp(module, (x,), (x.cos(),))[1],
    "grad": lambda module, x: grad(lambda y: module(y).square().sum())(x),
}


def outcome(module, call, x):
    """The plain values of a call and the class of the result, or the kind of its error."""
    try:
        result = call(module, x)
    except Exception as error:
        return type(error).__name__
    kind = type(result)
    if result.is_nested:
        result = result.values() if result.layout is torch.jagged else result.to_padded_tensor(0.0)
    return kind, result.detach().as_subclass(torch.Tensor)


def assert_same(ours, theirs, x, call):
    expected, got = outcome(theirs, call, x), outcome(ours, call, x)
    if isinstance(expected, str):
        return expected
    assert not isinstance(got, str), got
    assert got[0] is expected[0]
    torch.testing.assert_close(got[1], expected[1], rtol=1e-5, atol=1e-5)
    return None


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("name", TORCH)
def test_modules_of_torch(name, mode):
    theirs = TORCH[name]().train(mode == "train")
    tk.patch(ours := copy.deepcopy(theirs))
    x = torch.randn(3, 7, WIDTH)
    with torch.set_grad_enabled(mode == "train"):
        raised = {kind: assert_same(ours, theirs, x, call) for kind, call in KINDS.items()}
    assert {kind for kind, error in raised.items() if error is None} >= {"tagged", "negated", "empty", "vmap", "grad"}


@pytest.mark.parametrize("name", TORCH)
def test_compiled(name):
    """Dynamo sees plain tensors under vmap."""
    theirs = TORCH[name]()
    tk.patch(ours := copy.deepcopy(theirs))
    torch._dynamo.reset()
    call = lambda module, x: torch.compile(vmap(module), backend="eager")(torch.stack([x, x + 1]))  # noqa: E731
    assert assert_same(ours, theirs, torch.randn(3, 7, WIDTH), call) is None


def mixins():
    """The names of all classes that replace a class of modules, but for whole models."""
    found = [*_torch.REPLACEMENTS.values(), *_transformers.REPLACEMENTS.values(), *_recognised.FORMS.values()]
    found += [*_rerouted.MIXINS.values(), _recognised.RotaryAttention, _products.Linear, OutputLayer]
    return {kind.__name__ for kind in found} - {"LabelsOutside", "LabelsShiftedIn"}


class NormedMLP(nn.Module):
    """timm's."""

    def __init__(self):
        super().__init__()
        self.fc1, self.act, self.drop1, self.norm = nn.Linear(WIDTH, 48), nn.GELU(), nn.Dropout(0.0), nn.Identity()
        self.fc2, self.drop2 = nn.Linear(48, WIDTH), nn.Dropout(0.0)

    def forward(self, x):
        x = self.fc1(x)
        x = self.act(x)
        x = self.drop1(x)
        x = self.norm(x)
        x = self.fc2(x)
        x = self.drop2(x)
        return x


def of_form(name):
    """A model of a family that has no sizes in tests/support."""
    kind = getattr(transformers, f"{name}ForCausalLM")
    torch.manual_seed(0)
    config = kind.config_class(**models.DECODER, **models.TOKENS)
    return kind._from_config(config, attn_implementation="eager")


SOURCES = {
    **{name: lambda name=name: (models.make(name), models.inputs(name)) for name in models.FAMILIES},
    **{
        name: lambda name=name: (of_form(name), models.inputs("llama"))
        for name in ("Olmo2", "Gemma", "Cohere", "Phi3", "GPTNeoX", "Arcee")
    },
    "timm": lambda: (NormedMLP(), {"x": torch.randn(3, 7, WIDTH)}),
}


def calls(source):
    """By the name of its replacement: an original module, the patched one, and the arguments of a call."""
    theirs, batch = SOURCES[source]()
    theirs.eval()
    if hasattr(theirs, "config"):
        theirs.config.use_cache = False
    given = {}
    hooks = [
        module.register_forward_pre_hook(
            lambda _, args, kwargs, name=name: given.setdefault(name, (args, kwargs)) and None, with_kwargs=True
        )
        for name, module in theirs.named_modules()
    ]
    theirs(**batch)
    for hook in hooks:
        hook.remove()
    tk.patch(ours := copy.deepcopy(theirs))
    found = {}
    for name, module in ours.named_modules():
        kind = getattr(type(module), "_mixin", type(None)).__name__
        if kind in mixins() and name in given:
            found.setdefault(kind, (theirs.get_submodule(name), module, *given[name]))
    return found


class OfOne:
    """A module as a function of its first tensor."""

    def __init__(self, module, args, kwargs):
        self.module, self.args, self.kwargs = module, args, kwargs
        self.name = None if args else next(name for name, x in kwargs.items() if isinstance(x, torch.Tensor))
        self.x = (args[0] if args else kwargs[self.name]).detach()

    def __call__(self, x):
        changed = {} if self.name is None else {self.name: x}
        out = self.module(*((x, *self.args[1:]) if self.args else ()), **{**self.kwargs, **changed})
        return out[0] if isinstance(out, tuple) else out


ANYWHERE = ("tagged", "wrapped", "negated", "vmap", "jvp", "grad")
"""Kinds of calls that do not change the shape."""


@pytest.mark.parametrize("source", SOURCES)
def test_modules_inside_models(source):
    for name, (theirs, ours, args, kwargs) in calls(source).items():
        pair = OfOne(ours, args, kwargs), OfOne(theirs, args, kwargs)
        x = pair[0].x
        kinds = [kind for kind in ANYWHERE if x.is_floating_point() or kind in ("tagged", "vmap")]
        raised = {kind: assert_same(*pair, x, KINDS[kind]) for kind in kinds}
        assert None in raised.values(), f"{name}: {raised}"


def test_no_class_is_left_out():
    inside = {name for source in SOURCES for name in calls(source)}
    assert mixins() <= inside | set(TORCH)


@pytest.mark.parametrize("transform", ["grad", "jvp"])
@pytest.mark.parametrize("family", models.FAMILIES)
def test_models_of_transformers_under_transforms(family, transform):
    theirs, batch = models.make(family).eval(), models.inputs(family)
    ours = copy.deepcopy(theirs)
    tk.patch(ours)

    def called(model):
        parameters = dict(model.named_parameters())
        if transform == "grad":
            return grad(lambda given: functional_call(model, given, (), batch).loss)(parameters)
        tangents = {name: torch.ones_like(value) for name, value in parameters.items()}
        forward = lambda given: functional_call(model, given, (), batch).logits  # noqa: E731
        return {"logits": jvp(forward, (parameters,), (tangents,))[1]}

    expected, got = called(theirs), called(ours)
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=1e-4, atol=1e-5 * max(value.abs().max().item(), 1.0))


@pytest.mark.parametrize("kind", ["jagged", "tagged", "vmap"])
@pytest.mark.parametrize("name", ["LayerNorm", "TransformerEncoderLayer"])
def test_a_named_backend_refuses(name, kind):
    tk.patch(module := TORCH[name](), backend="torch")
    with pytest.raises(UnsupportedByBackend, match=r"backend 'torch' does not compute this call.*tk.unpatch\(model\)"):
        KINDS[kind](module, torch.randn(3, 7, WIDTH))


def quantised(module):
    """The weight of each linear layer replaced by a wrapper subclass, as torchao's quantize_ does."""
    for part in module.modules():
        if isinstance(part, nn.Linear):
            part.weight = nn.Parameter(Wrapped(part.weight.detach()), requires_grad=False)
    return module


@pytest.mark.parametrize("order", ["patched before", "patched after"])
@pytest.mark.parametrize("family", ["bert", "distilbert", "gpt2", "llama", "t5", "vit", "encoder layer"])
def test_weights_of_a_subclass(family, order):
    """They are used as the original module does, in training too."""
    if family == "encoder layer":
        theirs, batch = encoder(), {"src": torch.randn(2, 7, WIDTH)}
    else:
        theirs, batch = models.make(family), models.inputs(family)
    ours = copy.deepcopy(theirs)
    if order == "patched before":
        tk.patch(ours)
    theirs, ours = quantised(theirs), quantised(ours)
    if order == "patched after":
        tk.patch(ours)
    expected, got = theirs(**batch), ours(**batch)
    if family != "encoder layer":
        expected, got = expected.logits, got.logits
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_quantize_dynamic():
    """It finds linear layers by their exact class: it quantises those of torch.nn, and says so of those of models."""
    quantise = torch.ao.quantization.quantize_dynamic
    tk.patch(layer := encoder())
    assert "Dynamic" in type(quantise(layer, {nn.Linear}, torch.qint8).linear1).__module__.title()
    tk.patch(model := models.make("llama"))
    with pytest.raises(RuntimeError, match=r"quantization: a patched Linear would not be quantised; call tk.unpatch"):
        quantise(model, {nn.Linear}, torch.qint8)
    tk.unpatch(model)
    assert "dynamic" in type(quantise(model, {nn.Linear}, torch.qint8).lm_head).__module__
