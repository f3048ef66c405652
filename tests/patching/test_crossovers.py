"""With "auto" on a CPU, inference below the measured sizes is PyTorch's; everything else stays this package's."""

from __future__ import annotations

import copy
import inspect
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import transformer_kernels as tk
from benchmarks import crossovers
from tests.support import transformers_models as models
from tests.support.operations import dispatched
from tests.support.transformers_models import one_thread  # noqa: F401  # a fixture of every test here
from transformer_kernels import huggingface
from transformer_kernels.backends import cpu, dispatch
from transformer_kernels.ops import _crossovers
from transformer_kernels.ops._crossover_table import REROUTED
from transformer_kernels.patching import _recognised, _rerouted, _torch, _torch_calls, _transformers

pytest.importorskip("transformers")

FEW_TOKENS = ("bert", "distilbert", "gpt2", "llama", "qwen2", "vit")  # Mistral's window and the bias of T5 stay ours


@pytest.fixture
def computed(monkeypatch, unplanned):
    """The operations that this package computed."""
    return dispatched(monkeypatch)


def set_table(monkeypatch, entries):
    """Replace entries of the instruction set in use, and forget what was decided by the others."""
    changed = {**_crossovers.TABLE[_crossovers.level()], **entries}
    monkeypatch.setitem(_crossovers.TABLE, _crossovers.level(), changed)
    forget()


def forget():
    """What was decided by another table or instruction set."""
    for clear in cpu.dependents:
        clear()


def patched(family, backend=None):
    ours = copy.deepcopy(models.make(family)).eval()
    tk.patch(ours, backend=backend)
    return ours


@pytest.mark.parametrize("family", FEW_TOKENS)
def test_inference_of_few_tokens_is_pytorchs(family, computed, monkeypatch):
    set_table(monkeypatch, dict.fromkeys(_crossovers.TABLE["avx2"], (_crossovers.NEVER, _crossovers.NEVER)))
    plain = models.make(family, attention="sdpa").eval()
    ours = copy.deepcopy(plain)
    tk.patch(ours)
    batch = models.inputs(family, None)
    with torch.no_grad():
        out = ours(**batch).logits
        known = {"cross_entropy", "rms_norm"}  # transformers' RMSNorm is eight calls of torch
        assert not [name for name in computed if name not in known and "gelu" not in name]
        torch.testing.assert_close(out, plain(**batch).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
def test_a_named_backend_computes_all_of_it(family, backend, computed):
    if (reason := dispatch.unavailable(backend, torch.device("cpu"))) is not None:
        pytest.skip(reason)
    ours, batch = patched(family, backend), models.inputs(family, None)
    with torch.no_grad():
        ours(**batch)
    assert {"attention"} | ({"add_rms_norm", "rotary"} if family == "llama" else {"add_layer_norm"}) <= set(computed)


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
def test_training_is_this_packages_where_the_table_says(family, computed, monkeypatch):
    set_table(monkeypatch, dict.fromkeys(_crossovers.TABLE["avx2"], (_crossovers.NEVER, 0)))
    ours, batch = patched(family), models.inputs(family, None)
    ours(**batch)
    assert "attention" in computed and {"layer_norm", "rms_norm", "add_layer_norm"} & set(computed)


def test_large_inference_is_this_packages(computed, monkeypatch):
    set_table(monkeypatch, dict.fromkeys(_crossovers.TABLE["avx2"], (0, 0)))
    ours, batch = patched("bert"), models.inputs("bert", None)
    with torch.no_grad():
        ours(**batch)
    assert {"attention", "add_layer_norm", "gelu"} <= set(computed)


@pytest.mark.parametrize("queries", [1, 3, 5])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [2, 4])
@pytest.mark.parametrize("biased", [False, True])
def test_small_attention_means_the_same(queries, causal, heads, biased, monkeypatch):
    set_table(monkeypatch, {("attention", 4): (_crossovers.NEVER, _crossovers.NEVER)})
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(2, 4, queries, 8, generator=generator)
    k, v = torch.randn(2, 2, heads, 5, 8, generator=generator).unbind(0)
    bias = torch.randn(1, 4, queries, 5, generator=generator) if biased else None
    with torch.no_grad():
        found = tk.attention(q, k, v, causal=causal, attn_bias=bias, scale=0.3)
        plan = next(iter(dispatch.OPERATIONS["attention"].plans.values()))
        assert (plan.native is None) == (biased or (causal and queries == 3))
        expected = tk.attention(q, k, v, causal=causal, attn_bias=bias, scale=0.3, backend="torch")
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_what_a_layer_asks_for_is_not_lost(computed, monkeypatch):
    set_table(monkeypatch, {("attention", 4): (1 << 16, 1 << 16)})
    q, k, v = (torch.randn(1, 2, 4, 8) for _ in range(3))
    layer = SimpleNamespace(is_causal=False)
    options = [{"sliding_window": 2}, {"softcap": 5.0}, {"s_aux": torch.zeros(2)}, {"dropout": 0.5}]
    with torch.no_grad():
        huggingface.attention_forward(layer, q, k, v)
        assert not computed
        for count, each in enumerate(options, start=1):
            huggingface.attention_forward(layer, q, k, v, **each)
            assert computed == ["attention"] * count, each
        out, weights = huggingface.attention_forward(layer, q, k, v, output_attentions=True)
    assert computed[-1] == "attention_weights"
    torch.testing.assert_close(weights @ v, out.transpose(1, 2), rtol=1e-5, atol=1e-6)


def test_each_instruction_set_has_a_table_of_its_own(monkeypatch, unplanned):
    x = torch.randn(1 << 13)
    limits = {"avx2": (0, 0), "avx512": (1 << 13, 1 << 14), "amx": (1 << 14, 1 << 13)}
    for name, limit in limits.items():
        monkeypatch.setitem(_crossovers.TABLE[name], ("gelu", 4), limit)
    sets = {"plain": "avx2", "avx2": "avx2", "avx512": "avx512", "avx512_bf16": "avx512", "amx": "amx"}
    for instruction_set, name in sets.items():
        module = SimpleNamespace(instruction_set=lambda found=instruction_set: found)
        monkeypatch.setattr(_crossovers, "compiled", lambda found=module: found)
        forget()
        assert _crossovers.level() == name and _crossovers.crossover("gelu", 4) == limits[name]
        assert _crossovers.is_small("gelu", x, None, recorded=False) == (name == "amx")
        assert _crossovers.is_small("gelu", x, None, recorded=True) == (name == "avx512")
        assert not _crossovers.is_small("gelu", x, "cpu", recorded=False)
    monkeypatch.setattr(_crossovers, "compiled", lambda: None)
    forget()
    assert _crossovers.level() == "avx2"
    forget()


def test_the_tables_have_the_same_entries():
    assert _crossovers.TABLE.keys() == {"avx2", "avx512", "amx"}
    assert len({frozenset(entries) for entries in _crossovers.TABLE.values()}) == 1


def test_a_rerouted_call_has_a_size_of_its_own():
    """What `accelerate` asks for; without an entry every size would be rerouted."""
    source = inspect.getsource(_torch_calls)
    names = {*re.findall(r'refusal\("(\w+)", backend', source), "gelu", "gelu_tanh"}
    assert len(names) == 8 and source.count("refusal(") == 8
    for entries in _crossovers.TABLE.values():
        missing = [entry for entry in entries if entry[0] in names and (entry[0] + REROUTED, entry[1]) not in entries]
        assert not missing


def test_a_written_table_is_the_module():
    assert crossovers.written(_crossovers.TABLE) == Path(_crossovers.TABLE_FILE).read_text()


def test_a_crossover_is_where_all_larger_sizes_are_faster():
    assert crossovers.crossover({8: 0.9, 4: 0.5, 2: 1.2}) == 4
    assert crossovers.crossover({8: 0.9, 4: 1.1, 2: 0.5}) == 8
    assert crossovers.crossover({8: 1.0, 4: 0.5, 2: 0.96}) == 4
    assert crossovers.crossover({8: 1.1, 4: 0.5, 2: 0.5}) == _crossovers.NEVER
    assert crossovers.crossover({8: 0.9, 4: 0.5, 2: 0.5}) == 0


def test_explain_reports_the_crossover(monkeypatch):
    monkeypatch.setitem(_crossovers.TABLE[_crossovers.level()], ("layer_norm", 4), (1 << 10, _crossovers.NEVER))
    x, weight = torch.randn(2, 8), torch.ones(8)
    shown = str(tk.explain("layer_norm", x, weight, backend="auto"))
    assert "calls of fewer than 1024 elements, with gradients of any size, to PyTorch" in shown
    monkeypatch.setitem(_crossovers.TABLE[_crossovers.level()], ("layer_norm", 4), ((8, 64), (8, _crossovers.NEVER)))
    shown = str(tk.explain("layer_norm", x, weight, backend="auto"))
    assert "calls of 8 to 63 elements, with gradients of 8 elements or more, to PyTorch" in shown
    assert tk.explain("layer_norm", x, weight, backend="torch").crossover is None
    assert "gelu" not in str(tk.explain("rotary", x[None, None], x[None, None], *torch.randn(2, 2, 4)).crossover)


def test_traced_calls_stay_ours(monkeypatch):
    """A graph for other sizes must contain the operation; other devices have no such table."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    set_table(monkeypatch, {("gelu", 4): (3, 3)})

    def is_small(x, backend=None):
        return _crossovers.is_small("gelu", x, backend, recorded=False)

    x, seen = torch.ones(2), []
    assert is_small(x) and not is_small(x, "torch") and not is_small(torch.ones(3))
    assert not is_small(x.to("meta"))
    with FakeTensorMode():
        assert not is_small(torch.ones(2))
    torch.jit.trace(lambda each: (seen.append(is_small(each)), each + 1)[1], x, check_trace=False)
    assert seen and not any(seen)


REPLACEMENTS = {
    nn.LayerNorm: lambda: (nn.LayerNorm(32), 1),
    nn.RMSNorm: lambda: (nn.RMSNorm(32), 1),
    nn.GELU: lambda: (nn.GELU(), 1),
    nn.Softmax: lambda: (nn.Softmax(-1), 1),
    nn.MultiheadAttention: lambda: (nn.MultiheadAttention(32, 4, batch_first=True), 3),
    nn.TransformerEncoderLayer: lambda: (nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 1),
    nn.TransformerDecoderLayer: lambda: (nn.TransformerDecoderLayer(32, 4, 64, batch_first=True), 2),
    nn.TransformerEncoder: lambda: (
        nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 1),
        1,
    ),
}


def test_every_patched_class_declares_its_size():
    """A row of the table, or none where its operations decide; those of torch have an example here."""
    assert REPLACEMENTS.keys() == _torch.REPLACEMENTS.keys()
    classes = [*_torch.REPLACEMENTS.values(), *_transformers.REPLACEMENTS.values(), *_recognised.FORMS.values()]
    names = {name for name, _ in _crossovers.TABLE["avx2"]}
    for each in (*classes, *_rerouted.MIXINS.values(), _recognised.RotaryAttention):
        assert each.small_below in {*names, ""} and getattr(each, "small_masked", "") in {*names, ""}, each


@pytest.mark.parametrize("kind", REPLACEMENTS, ids=lambda kind: kind.__name__)
def test_a_small_module_of_torch_runs_its_original_forward(kind, computed, monkeypatch):
    """With the same bits, as torch's fused paths are used; a named backend and a larger input are this package's."""
    set_table(monkeypatch, dict.fromkeys(_crossovers.TABLE["avx2"], (1 << 12, 1 << 12)))
    plain, count = REPLACEMENTS[kind]()
    ours = copy.deepcopy(plain.eval())
    tk.patch(ours)
    small, large = (tuple(torch.randn(2, rows, 32) for _ in range(count)) for rows in (8, 4096))
    with torch.no_grad():
        found, expected = ours(*small), plain(*small)
        assert not computed
        for a, b in zip(*((each if isinstance(each, tuple) else (each,)) for each in (found, expected)), strict=True):
            assert torch.equal(a, b)
        ours(*(x[:, :2048] for x in large))
    assert computed


@pytest.mark.parametrize(
    ("dropout", "weights", "rows", "original"),
    [(0.0, False, 8, True), (0.0, False, 64, False), (0.0, True, 64, True), (0.1, False, 8, False)],
)
def test_small_attention_in_training_is_the_original_but_for_dropout(
    dropout, weights, rows, original, computed, monkeypatch
):
    rows_of_modules = {"multihead module": 1 << 10, "multihead weights module": 1 << 12}
    set_table(monkeypatch, {(name, 0): (0, limit) for name, limit in rows_of_modules.items()})
    plain = nn.MultiheadAttention(32, 4, dropout=dropout, batch_first=True)
    ours = copy.deepcopy(plain)
    tk.patch(ours)
    x = torch.randn(1, rows, 32)
    found = ours(x, x, x, need_weights=weights)
    assert bool(computed) != original
    if original:
        for a, b in zip(found, plain(x, x, x, need_weights=weights), strict=True):
            assert a is b is None or torch.equal(a, b)


def test_the_first_example_of_accelerate_reroutes_on_every_processor():
    """The call in README, by the table of each instruction set."""
    text = (Path(__file__).parents[2] / "README.md").read_text()
    lines = text.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("with tk.accelerate()"))
    shape = next(
        line for line in lines[:at] if line.startswith("q, k, v = torch.randn(3, 2, 4, 128, 32, requires_grad")
    )
    assert "scaled_dot_product_attention(q, k, v, is_causal=True)" in lines[at + 1] and shape
    for column in _crossovers.TABLE:
        first, end = _crossovers.of_pytorch("attention" + REROUTED, 4, True, column)
        assert not first <= 2 * 4 * 128 * 128 < end


@pytest.mark.parametrize("column", ["avx2", "avx512", "amx"])
@pytest.mark.parametrize("recorded", [False, True])
def test_the_choice_is_a_function_of_its_arguments(column, recorded, monkeypatch):
    """That of an instruction set that this processor lacks is testable; random numbers ignore what is recorded."""
    for (name, itemsize), limits in _crossovers.TABLE[column].items():
        pairs = [limit if isinstance(limit, tuple) else (0, limit) for limit in limits]
        assert _crossovers.of_pytorch(name, itemsize, recorded, column) == pairs[recorded]
        first, end = _crossovers.of_pytorch(name, itemsize, None, column)
        assert (first, end) == (max(pairs[0][0], pairs[1][0]), min(pairs[0][1], pairs[1][1]))
    set_table(monkeypatch, {("gelu", 4): ((1, 8), (2, 4))})
    chosen = [_crossovers.prefers_torch("gelu", size, 4, recorded=recorded) for size in range(1, 9)]
    assert chosen == [2 <= size < 4 if recorded else size < 8 for size in range(1, 9)]
    drawn = [_crossovers.prefers_torch("gelu", 1, 4, recorded=each, random=True) for each in (False, True)]
    assert drawn == [False, False]


@pytest.mark.parametrize("scale", [-0.5, 0.0, 0.3])
@pytest.mark.parametrize("causal", [False, True])
def test_small_attention_by_pytorch_is_finite_for_every_scale(scale, causal):
    """On a CPU SDPA multiplies the -inf of hidden scores by the scale."""
    q, k, v = torch.randn(3, 1, 2, 4, 8).unbind()
    with torch.no_grad():
        found = tk.attention(q, k, v, causal=causal, scale=scale)
        torch.testing.assert_close(found, tk.attention(q, k, v, causal=causal, scale=scale, backend="torch"))


@pytest.mark.parametrize("rows", [8, 128])
def test_few_rows_with_a_mask_are_the_original_forwards(rows, computed, monkeypatch):
    """Unless a query sees no key: then the result is that of the operations at any size."""
    plain = nn.MultiheadAttention(32, 4, batch_first=True).eval()
    ours = copy.deepcopy(plain)
    tk.patch(ours)
    x, hidden = torch.randn(1, rows, 32), torch.zeros(rows, rows, dtype=torch.bool)
    hidden[:, -1] = True
    with torch.no_grad():
        found = ours(x, x, x, attn_mask=hidden, need_weights=False)[0]
        assert bool(computed) == (rows == 128)
        torch.testing.assert_close(found, plain(x, x, x, attn_mask=hidden, need_weights=False)[0])
        hidden[2] = True
        found, weights = ours(x, x, x, attn_mask=hidden)
        torch.testing.assert_close(found[0, 2], plain.out_proj.bias)
        assert found.isfinite().all() and not weights[0, 2].any()
