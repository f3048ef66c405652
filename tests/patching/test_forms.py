"""Models are patched by the code of their forwards: every family is exact, and code that differs is not recognised."""

from __future__ import annotations

import copy
import hashlib
import importlib
import inspect
import itertools
import linecache
import re
import sys
import textwrap
import types

import pytest
import torch

import transformer_kernels as tk
from tests.support import transformers_models as models
from tests.support.arguments import DTYPES
from tests.support.transformers_models import one_thread  # noqa: F401  # a fixture of every test here
from transformer_kernels.patching import _forms, _recognised

transformers = pytest.importorskip("transformers")

SMALL = models.DECODER | {"attention_dropout": 0.0}
WIDE = SMALL | {"head_dim": 8}
GEMMA = WIDE | {"query_pre_attn_scalar": 8, "sliding_window": 5}
GRANITE = {"attention_multiplier": 0.3, "residual_multiplier": 0.7, "embedding_multiplier": 2.0, "logits_scaling": 3.0}
FAMILIES = {  # the sizes, and the classes that are left
    "Gemma": (WIDE, set()),
    "Gemma2": (GEMMA, set()),
    "Gemma3": (GEMMA, set()),
    "Phi3": (SMALL, set()),
    "Olmo": (SMALL, {"OlmoLayerNorm"}),
    "Olmo2": (SMALL, set()),
    "SmolLM3": (SMALL | {"no_rope_layers": [1, 0]}, set()),
    "Granite": (SMALL | GRANITE, set()),
    "Cohere": (SMALL | {"use_qk_norm": True}, {"CohereLayerNorm"}),
    "Cohere2": (WIDE | {"sliding_window": 5}, set()),
    "Glm": (WIDE, set()),
    "Glm4": (WIDE, set()),
    "Helium": (WIDE, set()),
    "GPTNeoX": (models.ENCODER | {"attention_dropout": 0.0}, set()),
    "StableLm": (SMALL, set()),
    "Starcoder2": (SMALL, set()),
    "Ministral": (WIDE | {"sliding_window": 5}, set()),
}
ROTATED = ("Cohere", "Gemma2", "Glm", "GPTNeoX", "Helium", "Olmo2", "Phi3", "StableLm")


def pair(family, dtype=torch.float32):
    """The model with random weights, and a patched copy with its report."""
    kind = getattr(transformers, f"{family}ForCausalLM")
    torch.manual_seed(0)
    config = kind.config_class(**{**FAMILIES[family][0], **models.TOKENS})
    eager = kind._from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in eager.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    eager = eager.to(dtype).train()
    ours = copy.deepcopy(eager)
    return eager, ours, tk.patch(ours)


@pytest.mark.parametrize("padding", [None, "left"])
@pytest.mark.parametrize("family", FAMILIES)
def test_forward_and_gradients_match_eager(family, padding):
    eager, ours, report = pair(family)
    assert {row.kind for row in report.left} == FAMILIES[family][1]
    assert {row.operation for row in report.patched} >= {"rotary, attention"}
    batch = models.inputs("llama", padding)
    outcomes = [models.run("llama", model, batch) for model in (ours, eager)]
    for name, value in outcomes[1].items():
        size = value.abs().max().item()
        torch.testing.assert_close(
            outcomes[0][name], value, rtol=1e-4, atol=1e-5 * max(size, 0.1), msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.parametrize("family", ROTATED)
def test_bfloat16_matches_eager(family):
    eager, ours, _ = pair(family, torch.bfloat16)
    batch = models.inputs("llama")
    exact = models.run("llama", pair(family)[0], batch)
    mine, theirs = (models.run("llama", model, batch) for model in (ours, eager))
    assert mine["logits"].dtype is torch.bfloat16
    errors = [(outcome["logits"] - exact["logits"]).abs().max() for outcome in (mine, theirs)]
    assert errors[0] <= 2 * errors[1]


@pytest.mark.parametrize("family", ["Gemma2", "Cohere", "GPTNeoX"])
def test_generation_matches_eager(family):
    eager, ours, _ = pair(family)
    batch = models.inputs("llama", "left", labels=False)
    options = {"max_new_tokens": 6, "do_sample": False}
    assert torch.equal(ours.eval().generate(**batch, **options), eager.eval().generate(**batch, **options))


def test_unpatched_models_are_what_they_were():
    eager, ours, _ = pair("Gemma2")
    tk.unpatch(ours)
    batch = models.inputs("llama")
    assert [type(module) for module in ours.modules()] == [type(module) for module in eager.modules()]
    assert torch.equal(ours(**batch).logits, eager(**batch).logits)


def altered(change):
    """The layers of Llama, and the functions that they call, with changed source."""
    names = ("rotate_half", "apply_rotary_pos_emb", "LlamaRMSNorm", "LlamaMLP", "LlamaDecoderLayer")
    llama = importlib.import_module(LLAMA)
    source = "\n\n".join(inspect.getsource(_forms._function_in(getattr(llama, name))) for name in names)
    assert change(source) != source
    return made_of(change(source), vars(llama))


def made_of(source, scope=None):
    """A module with this source."""
    name = f"made_of_{hashlib.sha256(source.encode()).hexdigest()[:12]}"
    module = types.ModuleType(name)
    vars(module).update((scope or {}) | {"__name__": name, "__file__": f"<{name}>"})
    linecache.cache[module.__file__] = (len(source), None, source.splitlines(keepends=True), module.__file__)
    sys.modules[name] = module  # where inspect looks for the file of a class
    exec(compile(source, module.__file__, "exec"), vars(module))
    return module


LLAMA = "transformers.models.llama.modeling_llama"


def layer_of_a_function(func):
    """As the package `kernels` wraps a function that it may replace."""

    class Func(torch.nn.Module):
        def forward(self, *args, **kwargs):
            return func(*args, **kwargs)

    return Func()


def test_function_behind_a_layer_is_recognised_unless_its_forward_was_replaced():
    function = importlib.import_module(LLAMA).rotate_half
    layer, replaced = layer_of_a_function(function), layer_of_a_function(function)
    replaced.forward = lambda x: x
    assert _forms.fingerprint(layer) == _forms.fingerprint(function) is not None
    assert _forms.fingerprint(replaced) is None


ALTERED = {  # a change of the source, and the classes whose forms it changes
    "norm": ("* torch.rsqrt(", "/ torch.sqrt(", "LlamaRMSNorm"),
    "order": ("self.weight * hidden_states.to(input_dtype)", "(self.weight * hidden_states).to(input_dtype)", None),
    "exponent": (".pow(2).mean(-1", ".pow(3).mean(-1", "LlamaRMSNorm"),
    "axis": (".mean(-1, keepdim=True)", ".mean(-2, keepdim=True)", "LlamaRMSNorm"),
    "gate": (
        "self.act_fn(self.gate_proj(x)) * self.up_proj(x)",
        "self.act_fn(self.up_proj(x)) * self.gate_proj(x)",
        "LlamaMLP",
    ),
    "residual": (
        "hidden_states = residual + hidden_states",
        "hidden_states = residual - hidden_states",
        "LlamaDecoderLayer",
    ),
    "half": ("torch.cat((-x2, x1), dim=-1)", "torch.cat((x2, -x1), dim=-1)", "LlamaAttention"),
    "rotation": ("(q * cos) + (rotate_half(q) * sin)", "(q * sin) + (rotate_half(q) * cos)", "LlamaAttention"),
}


@pytest.mark.parametrize("name", ALTERED)
def test_changed_code_is_not_recognised(name):
    before, after, kind = ALTERED[name]
    module = altered(lambda source: source.replace(before, after))
    if kind is None:  # the form of another family
        assert _recognised.replacement_of(module.LlamaRMSNorm) is _recognised.RoundedRMSNorm
    elif kind == "LlamaAttention":
        same = altered(lambda source: source + "\n")
        assert str(_forms.fingerprint(same.apply_rotary_pos_emb)) in _recognised.ROTATIONS
        assert str(_forms.fingerprint(module.apply_rotary_pos_emb)) not in _recognised.ROTATIONS
    else:
        assert _recognised.replacement_of(getattr(module, kind)) is None
    kinds = {"LlamaRMSNorm", "LlamaMLP", "LlamaDecoderLayer"} - {kind, None if kind else "LlamaRMSNorm"}
    assert all(_recognised.replacement_of(getattr(module, each)) is not None for each in kinds)


def test_names_comments_and_annotations_do_not_matter():
    note = "def forward(self, x):\n        # a note"

    def renamed(source):
        source = re.sub(r"\bvariance\b", "mean_square", source).replace("past_key_values", "memory")
        return source.replace("def forward(self, x):", note).replace("hidden_states: torch.Tensor,", "hidden_states,")

    module = altered(renamed)
    assert _recognised.replacement_of(module.LlamaRMSNorm) is _recognised.RMSNorm
    assert _recognised.replacement_of(module.LlamaMLP) is _recognised.GatedMLP
    assert _recognised.replacement_of(module.LlamaDecoderLayer) is _recognised.DecoderLayer


TABLES = {
    "halves": ("torch.cat((freqs, freqs), dim=-1)", "halves"),
    "pairs": ("torch.repeat_interleave(freqs, 2, dim=-1)", "pairs"),
    "two": ("torch.cat((freqs, 2 * freqs), dim=-1)", None),
    "three": ("torch.cat((freqs, freqs, freqs), dim=-1)", None),
    "axis": ("torch.cat((freqs, freqs), dim=-2)", None),
}


@pytest.mark.parametrize("name", TABLES)
def test_layouts_of_tables(name):
    expression, layout = TABLES[name]
    source = f"""
    import torch
    class Rotary(torch.nn.Module):
        def forward(self, x, positions):
            freqs = positions[..., None].float() * self.inv_freq
            emb = {expression}
            cos = emb.cos() * self.attention_scaling
            sin = emb.sin() * self.attention_scaling
            return cos.to(dtype=x.dtype), sin.to(dtype=x.dtype)
    """
    source = textwrap.dedent(source)
    assert _forms.table_layout(made_of(source).Rotary) == layout
    for before, after in (
        ("emb.sin()", "freqs.sin()"),
        ("sin.to(dtype", "sin[..., ::2].to(dtype"),
        (".sin()", ".tan()"),
    ):
        changed = made_of(source.replace(before, after))
        assert _forms.table_layout(changed.Rotary) is None


def test_tables_of_another_layout_leave_the_rotation_to_the_model():
    _, ours, _ = pair("StableLm")
    tk.unpatch(ours)
    ours.model.other = type("OtherRotaryEmbedding", (torch.nn.Module,), {})()
    report = tk.patch(ours)
    operation = {row.operation for row in report.patched if row.kind == "StableLmAttention"}
    assert operation == {"attention"}


def test_rms_norm_of_torch():
    eager = torch.nn.Sequential(torch.nn.RMSNorm(12), torch.nn.RMSNorm(12, eps=0.1, elementwise_affine=False))
    ours = copy.deepcopy(eager)
    assert [row.operation for row in tk.patch(ours).rows] == ["rms_norm"] * 2
    several = torch.nn.RMSNorm((3, 12))
    assert tk.patch(several).left[0].reason == "it is over several axes"
    for dtype in (torch.float16, torch.bfloat16, torch.float32):  # with squares near the eps of 16 bits
        x = (0.1 * torch.randn(5, 12)).to(dtype).requires_grad_()
        outcomes = [model(x) for model in (ours, eager)]
        torch.testing.assert_close(*outcomes)
    gradients = [torch.autograd.grad(out.square().sum(), x)[0] for out in outcomes]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize(("stream", "stored"), list(itertools.product(DTYPES, repeat=2)), ids=str)
@pytest.mark.parametrize("kind", ["llama.LlamaRMSNorm", "t5.T5LayerNorm", "gemma.GemmaRMSNorm", "olmo2.Olmo2RMSNorm"])
def test_norms_of_any_two_dtypes(kind, stream, stored):
    model, _, name = kind.partition(".")
    eager = getattr(importlib.import_module(f"transformers.models.{model}.modeling_{model}"), name)(12)
    eager.weight.data = torch.rand(12).add(0.5).to(stored)
    ours = copy.deepcopy(eager)
    assert tk.patch(ours).patched
    x = torch.randn(5, 12).to(stream)
    tolerance = max(torch.finfo(each).eps for each in (stream, stored))
    torch.testing.assert_close(ours(x), eager(x), rtol=4 * tolerance, atol=tolerance)


def test_an_old_release_is_refused_before_anything_changes(monkeypatch):
    model = models.make("llama")
    kinds = [type(module) for module in model.modules()]
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "4.57.6")
    sentence = "needs transformers 5.10 or newer, and 4.57.6 is installed: pip install -U transformers"
    with pytest.raises(ImportError, match=re.escape(sentence)):
        tk.patch(model)
    assert [type(module) for module in model.modules()] == kinds
    assert model.config._attn_implementation == "eager"


class _Recursive(torch.nn.Module):
    def forward(self, x, depth=2):
        return x if depth == 0 else self.again(x, depth)

    def again(self, x, depth):
        return _Recursive.forward(self, x, depth - 1) if depth % 2 else self.again(x, depth - 1)


def _countdown(x, depth):
    return x if depth == 0 else _countdown(x, depth - 1)


def test_code_that_calls_itself_has_a_fingerprint():
    """Following its calls ended in a RecursionError."""
    assert _forms.forward_fingerprint(_Recursive) is not None
    assert _forms.fingerprint(_countdown) is not None
    assert not tk.patch(_Recursive()).patched
