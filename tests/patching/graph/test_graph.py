"""The graph route: what is recognised, what is left alone, and that both give the program's own results."""

import copy
import math
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import transformer_kernels as tk
from tests.support.handwritten import compare
from tests.support.handwritten.attention import KEYS
from transformer_kernels.backends import cpu
from transformer_kernels.ops.activation._quick import quick_gelu
from transformer_kernels.ops.rotary import _pattern as rotary_pattern
from transformer_kernels.patching import graph
from transformer_kernels.patching._products import multiplies_under_autocast
from transformer_kernels.patching.graph import _multi_head, _rewrite

ROOT = Path(__file__).parents[3]
WEIGHT, BIAS = torch.linspace(0.5, 1.5, 16, dtype=torch.float64), torch.linspace(-1, 1, 16, dtype=torch.float64)
CAUSAL = torch.ones(8, 8).triu(1).bool()
PADDING = torch.arange(8) >= torch.tensor([[8], [5]])
ANGLES = torch.arange(16, dtype=torch.float64).view(8, 2)
C = math.sqrt(2 / math.pi)


def std_norm(x):
    return WEIGHT * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6) + BIAS


def by_two_products(x):
    mean = x.mean(-1, keepdim=True)
    return (x - mean) / torch.sqrt(((x - mean) * (x - mean)).mean(-1, keepdim=True) + 1e-5) * WEIGHT + BIAS


def by_var(x):
    var, mean = torch.var_mean(x, -1, unbiased=False, keepdim=True)
    return WEIGHT * ((x - mean) * torch.rsqrt(var + 1e-5)) + BIAS


def by_flat_mean(x):
    centred = x - x.mean(-1)[..., None]
    return centred / (centred.pow(2).sum(-1, keepdim=True) / 16 + 1e-5) ** 0.5 * WEIGHT + BIAS


def scores_in_place(x):
    scores = x @ x.transpose(-2, -1)
    scores /= 4.0
    scores.masked_fill_(CAUSAL, -math.inf)
    return torch.softmax(scores, -1) @ x


def scores_by_einsum(x):
    q = x.view(2, 8, 4, 4)
    weights = F.softmax(torch.einsum("bihd,bjhd->bhij", q, q) * 0.5 + torch.where(CAUSAL, -math.inf, 0.0), -1)
    return torch.einsum("bhij,bjhd->bihd", weights, q)


def scores_by_where(x):
    q = x.view(2, 8, 4, 4).transpose(1, 2)
    scores = torch.where(CAUSAL, torch.tensor(-1e9, dtype=x.dtype), (q * 0.5) @ q.mT)
    return scores.softmax(dim=-1, dtype=x.dtype) @ q


def scores_by_baddbmm(x):
    bias = torch.zeros(2, 8, 8, dtype=x.dtype).masked_fill(CAUSAL, -1e30)
    return torch.bmm(torch.baddbmm(bias, x, x.transpose(1, 2), alpha=0.25).softmax(-1), x)


def heads_in_the_batch(x):
    q = x.view(2, 8, 4, 4).transpose(1, 2).reshape(8, 8, 4)
    scores = torch.bmm(q, q.mT).view(2, 4, 8, 8).masked_fill(PADDING[:, None, None], -math.inf)
    return torch.bmm(F.softmax(scores, -1).view(8, 8, 8), q)


def rotary_whole(x):
    x = x.view(2, 8, 4, 4).transpose(1, 2)
    cos, sin = torch.cat((ANGLES, ANGLES), -1).cos(), torch.cat((ANGLES, ANGLES), -1).sin()
    return x * cos + torch.cat((-x[..., 2:], x[..., :2]), -1) * sin


def rotary_halves(x):
    first, second = x.view(2, 8, 4, 4).chunk(2, -1)
    cos, sin = ANGLES[:, None].cos(), ANGLES[:, None].sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def rotary_after_a_scale_in_place(x):
    q = x.sin()
    q *= 0.5
    return rotary_halves(q.contiguous())


def rotary_scaled_in_place(x):
    q = rotary_halves(x).transpose(1, 2)
    q.mul_(0.5)
    return q


def rotary_pairs(x):
    even, odd = x.view(2, 8, 4, 4).reshape(2, 8, 4, 2, 2).unbind(-1)
    cos, sin = ANGLES[:, None].cos(), ANGLES[:, None].sin()
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(3)


def rotary_complex(x):
    pairs = torch.view_as_complex(x.view(2, 8, 4, 4).reshape(2, 8, 4, 2, 2))
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(ANGLES), ANGLES)[:, None]).flatten(3)


def rotary_of_one_head(x):
    cos, sin = torch.cat((ANGLES,) * 8, -1)[None].cos(), torch.cat((ANGLES,) * 8, -1)[None].sin()
    return x * cos + torch.cat((-x[..., 8:], x[..., :8]), -1) * sin


def one_head_of_keys(x):
    q, k = x.view(2, 8, 4, 4).transpose(1, 2), x[:, None, :, :4]
    return (q @ k.mT / 2).masked_fill(CAUSAL, -math.inf).softmax(-1) @ k


def keys_without_heads(x):
    q, k = x.view(2, 8, 4, 4).transpose(1, 2), x[..., :4]
    weights = torch.einsum("b h i d, b j d -> b h i j", q * 0.5, k).masked_fill(CAUSAL, -1e9).softmax(-1)
    return torch.einsum("b h i j, b j d -> b h i d", weights, k)


def weights_averaged(x):
    weights = torch.softmax(x @ x.mT / 4, -1)
    weights.mean(1)
    return weights.type_as(weights + 1) @ x


def biases_of_both_shapes(x):
    q = x.view(2, 8, 4, 4).transpose(1, 2).reshape(8, 8, 4)
    distances = torch.arange(8, dtype=x.dtype) * torch.linspace(0.1, 1, 8, dtype=x.dtype)[:, None, None]
    scores = torch.baddbmm(input=distances, batch1=q, batch2=q.mT, beta=1.0, alpha=0.5).view(2, 4, 8, 8)
    hidden = torch.zeros(2, 1, 8, 8, dtype=x.dtype).masked_fill(PADDING[:, None, None], -1e30)
    return torch.bmm(F.softmax(scores + hidden, -1).view(8, 8, 8), q)


def weight_after_the_sum(x):
    summed = x + x.sin()
    return F.rms_norm(summed, (16,), 1.0 + WEIGHT, 1e-6) + summed


SPELLINGS = {
    "layer_norm by products": (by_two_products, "layer_norm"),
    "layer_norm by var_mean": (by_var, "layer_norm"),
    "layer_norm by flat means": (by_flat_mean, "layer_norm"),
    "layer_norm called": (lambda x: F.layer_norm(x, (16,), WEIGHT, BIAS), "layer_norm"),
    "rms_norm": (lambda x: WEIGHT * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)), "rms_norm"),
    "rms_norm by sum": (lambda x: x / ((x * x).sum(-1, keepdim=True) / 16 + 1e-6).sqrt() * WEIGHT, "rms_norm"),
    "norm by std": (std_norm, "std_norm"),
    "gelu tanh": (lambda x: 0.5 * x * (1 + torch.tanh(C * (x + 0.044715 * torch.pow(x, 3)))), "gelu_tanh"),
    "gelu tanh by products": (lambda x: 0.5 * x * (1 + (C * (x + 0.044715 * x * x * x)).tanh()), "gelu_tanh"),
    "gelu by sigmoid": (lambda x: x * torch.sigmoid(2 * C * x * (1 + 0.044715 * x * x)), "gelu_tanh"),
    "gelu erf": (lambda x: x * (0.5 + 0.5 * torch.erf(x / math.sqrt(2))), "gelu"),
    "swiglu": (lambda x: x * torch.sigmoid(x) * (x + 1), "swiglu"),
    "geglu": (lambda x: F.gelu(x) * (x + 1), "geglu"),
    "in place": (scores_in_place, "attention"),
    "einsum": (scores_by_einsum, "attention"),
    "where": (scores_by_where, "attention"),
    "heads in the batch": (heads_in_the_batch, "attention"),
    "rotary with whole tables": (rotary_whole, "rotary"),
    "rotary of one head": (rotary_of_one_head, "rotary"),
    "one head of keys": (one_head_of_keys, "attention"),
    "keys without heads": (keys_without_heads, "attention"),
    "an average of the weights that is not used": (weights_averaged, "attention"),
    "biases of both shapes": (biases_of_both_shapes, "attention"),
    "rotary by halves": (rotary_halves, "rotary"),
    "rotary after a scale in place": (rotary_after_a_scale_in_place, "rotary"),
    "rotary scaled in place": (rotary_scaled_in_place, "rotary"),
    "rotary by pairs": (rotary_pairs, "rotary"),
    "rotary by complex numbers": (rotary_complex, "rotary"),
    "geglu by erf": (lambda x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2))) * (x + 1), "geglu"),
    "baddbmm": (scores_by_baddbmm, "attention"),
    "linear": (lambda x: F.relu(F.linear(x, BIAS.outer(WEIGHT))), "linear_relu"),
    "add_rms_norm, its weight computed after the sum": (weight_after_the_sum, "add_rms_norm"),
    "add_layer_norm": (lambda x: F.layer_norm(x + x.sin(), (16,), WEIGHT, BIAS), "add_layer_norm"),
}


pytestmark = pytest.mark.usefixtures("fresh_compiler")


def sample(*shape, dtype=torch.float64, seed=0):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def assert_same(function, compiled, *arguments):
    """Results and gradients, in float64."""
    given = [each.detach().clone().requires_grad_() for each in arguments]
    expected, found = function(*arguments), compiled(*given)
    assert found.dtype is expected.dtype and found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    grad = torch.linspace(-1, 1, expected.numel(), dtype=expected.dtype).view(expected.shape)
    gradients = (torch.autograd.grad(y, xs, grad) for y, xs in ((expected, arguments), (found, given)))
    for wanted, gradient in zip(*gradients, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings(name):
    function, operation = SPELLINGS[name]
    compiled = tk.compile(function, backend="torch", fullgraph=True)
    assert_same(function, compiled, sample(2, 8, 16))
    assert compiled.report().matched == {operation: 1}


def view_without_a_gradient(x):
    with torch.no_grad():
        view = x[:]
    x = x * 2
    with torch.no_grad():
        doubled = x[:]
    return x + view + doubled


def assigned_without_a_gradient(x):
    x = x * 2
    with torch.no_grad():
        view = x[:]
    x[:] = view
    return x * 3


def view_written_before_it_is_read(x):
    scores = x @ x.mT
    view = scores[:]
    scores[..., CAUSAL] = 0.0
    return view @ x


def alias_read_after_a_write(x):
    y = x * 2
    alias = y.contiguous()
    y.mul_(3)
    return F.gelu(alias)


def written_through_an_alias(x):
    y = x * 2
    alias = y.view(y.shape)
    alias *= 3
    return F.layer_norm(y, (16,), WEIGHT, BIAS) + F.gelu(alias)


def part_written_and_read_as_a_whole(x):
    y = x * 2
    part = y[0]
    part.mul_(3)
    return F.gelu(part) + F.gelu(y)


def part_written_after_another(x):
    y = x * 2
    first, second = y[0], y.view(16, 16)[4:12]
    first *= 3
    return F.gelu(first) + F.gelu(second)


@pytest.mark.parametrize(
    "function",
    (
        view_without_a_gradient,
        assigned_without_a_gradient,
        view_written_before_it_is_read,
        alias_read_after_a_write,
        written_through_an_alias,
        part_written_and_read_as_a_whole,
        part_written_after_another,
    ),
)
def test_views_of_all_elements(function):
    assert_same(function, tk.compile(function, backend="torch"), sample(2, 8, 16))


def weight_of_the_sum(x):
    summed = x + x.sin()
    return F.rms_norm(summed, (16,), 1.0 + summed[0, 0], 1e-6) + summed


def weight_is_drawn(x):
    torch.manual_seed(1)
    summed = F.dropout(x, 0.5) + x
    return F.rms_norm(summed, (16,), F.dropout(WEIGHT, 0.5), 1e-6) + summed


@pytest.mark.parametrize("function", (weight_of_the_sum, weight_is_drawn))
def test_a_weight_that_cannot_be_computed_before_the_sum(function):
    compiled = tk.compile(function, backend="torch")
    assert_same(function, compiled, sample(2, 8, 16))
    assert compiled.report().matched == {"rms_norm": 1}


def test_a_product_and_a_sum_without_gradients():
    def function(x, y, scale):
        laid_out_as_the_product = y * scale + x.mT.contiguous().mT
        return y * (1 + scale) + x, x * y.double() + y, laid_out_as_the_product.view(-1)

    x, y, scale = torch.randn(2, 8, 16), torch.randn(2, 8, 16), torch.randn(2, 1, 16)
    compiled = tk.compile(function)
    with torch.no_grad():
        for found, expected in zip(compiled(x, y, scale), function(x, y, scale), strict=True):
            torch.testing.assert_close(found, expected)
            assert found.dtype is expected.dtype
    assert compiled.report().matched == {"multiply_add": 1}
    compiled(x.requires_grad_(), y, scale)
    assert compiled.report().matched == {"multiply_add": 1}


def test_a_product_and_a_sum_of_any_length(monkeypatch):
    """PyTorch logs an error for addcmul of symbolic sizes, whose result's strides it cannot compute."""
    logged = Mock()
    monkeypatch.setattr(torch._subclasses.fake_tensor.log, "exception", logged)
    compiled = tk.compile(lambda x, scale: x * scale + x)
    with torch.no_grad():
        for length in (8, 9, 10):
            x, scale = torch.randn(2, length, 16), torch.randn(length, 16)
            torch.testing.assert_close(compiled(x, scale), x * scale + x)
    assert compiled.report().matched == {"multiply_add": 2}
    assert not logged.called


@pytest.mark.parametrize(
    ("causal", "keys", "direct"), [(True, 8, True), (False, 8, True), (False, 6, True), (True, 6, False)]
)
def test_calls_without_a_mask_are_checked_once(causal, keys, direct):
    def function(q, k):
        return F.scaled_dot_product_attention(q, k, k, is_causal=causal)

    compiled = tk.compile(function, backend="torch")
    assert_same(function, compiled, sample(2, 2, 8, 8), sample(2, 2, keys, 8))
    nodes = compiled.report.__self__._modules[0].graph.nodes
    assert (tk.attention in [node.target for node in nodes]) is direct


def test_second_derivatives_of_quick_gelu():
    x = sample(2, 8)
    assert torch.autograd.gradgradcheck(lambda x: quick_gelu(x, 1.702), x)
    slopes = [torch.autograd.grad(quick_gelu(x, 1.702).sum(), x, create_graph=again)[0] for again in (True, False)]
    torch.testing.assert_close(*slopes)


def test_tables_of_a_narrower_dtype():
    def function(x):
        x = x.view(2, 8, 4, 4)
        cos, sin = (table.bfloat16()[:, None] for table in (ANGLES.cos(), ANGLES.sin()))
        first, second = x.chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    x = torch.randn(2, 8, 16)
    for backend in ("torch", "cpu"):
        compiled = tk.compile(function, backend=backend)
        torch.testing.assert_close(compiled(x), function(x))
        assert compiled.report().matched == {"rotary": 1}


@pytest.mark.skipif(not graph.ALONE, reason="this version of PyTorch counts the compilations of a class")
def test_models_of_one_class_do_not_share_the_limit_of_compilations():
    for width in range(16, 16 * (torch._dynamo.config.recompile_limit + 3), 16):
        compiled = tk.compile(nn.Sequential(nn.LayerNorm(width)), backend="torch")
        compiled(torch.randn(2, width))
        assert compiled.report().matched == {"layer_norm": 1}, width


def test_a_backend_without_float64_leaves_it():
    functions = [function for function, operation in SPELLINGS.values() if operation != "std_norm"]

    def together(x):
        return [function(x) for function in functions]

    compiled, matched = compare.routed(together, "cpu")
    x = sample(2, 8, 16)
    torch.testing.assert_close(compiled(x), together(x))
    assert not matched


def weights_returned(x):
    weights = torch.softmax(x @ x.mT / 4, -1)
    return (weights @ x) + weights.sum()


def weights_written(x):
    weights = torch.softmax(x @ x.mT / 4, -1).clone()
    weights[..., 0] = 0.0
    return weights @ x


def filled_with_little(x):
    return torch.softmax((x @ x.mT / 4).masked_fill(CAUSAL, -2.0), -1) @ x


def rounded_scores(x):
    return torch.softmax((x @ x.mT / 4).half().to(x.dtype), -1) @ x


def other_axis(x):
    return torch.softmax(x @ x.mT / 4, -2) @ x


def unlike_means(x):
    return (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.sin().var(-1, keepdim=True, unbiased=False) + 1e-5) * WEIGHT


def nearly_gelu(x):
    return 0.5 * x * (1 + torch.tanh(C * (x + 0.0447 * x**3)))


def rounded_softmax(x):
    return F.softmax(x @ x.mT, -1, dtype=torch.bfloat16).to(x.dtype) @ x


def inside_vmap(x):
    return torch.vmap(lambda y: torch.softmax(y @ y.mT, -1) @ y)(x)


def value_written_through_view(x):
    scores = x @ x.mT / 4
    scores.view(-1)[:5] = 1.0
    return torch.softmax(scores, -1) @ x


def summed_before_the_product(x):
    weights = torch.einsum("bxid,bjd->bij", x.view(2, 2, 4, 16), x[:, :4]).softmax(-1)
    return torch.einsum("bij,bjd->bid", weights, x[:, :4])


@pytest.mark.parametrize("checkpointed", (False, True))
def test_a_graph_that_cannot_be_rewritten_runs_as_it_is(monkeypatch, checkpointed):
    """After the matches were replaced: in the part that is checkpointed, or in all."""
    reported = []

    def fails(self):
        reported.append(dict(self.outcome.matched))
        if not checkpointed or len(reported) > 1:
            raise ZeroDivisionError("planted")

    def program(x):
        first = checkpoint(scores_by_where, x, use_reentrant=False) if checkpointed else scores_by_where(x)
        return first.tanh() + scores_by_where(x)

    monkeypatch.setattr(_rewrite.Rewriter, "_report", fails)
    compiled, x = tk.compile(program), sample(2, 8, 16, dtype=torch.float32)
    with pytest.warns(RuntimeWarning, match="left to PyTorch: rewriting it failed.*ZeroDivisionError: planted"):
        assert torch.equal(compiled(x), program(x))
    assert all(found["attention"] for found in reported)
    assert not compiled.report().matched and "planted" in str(compiled.report())
    graphs = [part.graph for part in compiled.report.__self__._modules[0].modules() if hasattr(part, "graph")]
    assert len(graphs) == 1 + checkpointed
    assert sum(node.name.startswith("softmax") for found in graphs for node in found.nodes) == 2
    with pytest.raises(Exception, match="planted"):
        tk.compile(program, backend="torch")(x)


LEFT_ALONE = (weights_returned, weights_written, filled_with_little, rounded_scores, other_axis, unlike_means,
              nearly_gelu, value_written_through_view, rounded_softmax, inside_vmap,
              summed_before_the_product)  # fmt: skip


@pytest.mark.parametrize("function", LEFT_ALONE, ids=lambda function: function.__name__)
def test_left_alone(function):
    compiled = tk.compile(function, backend="torch")
    assert_same(function, compiled, sample(2, 8, 16))
    assert not compiled.report().matched


def test_a_write_that_no_match_takes_in_happens():
    def function(x):
        y = x * 2
        y.add_(1)
        y[..., 0] = 3.0
        z = y.view(-1)
        z += 1
        return y

    assert_same(function, tk.compile(function, backend="torch"), sample(2, 16))


def test_a_mask_is_read_after_it_is_written():
    def function(x):
        hidden = torch.ones(8, 8, dtype=torch.bool).triu(1)
        hidden[:, 0] = False
        hidden[0, 5] = False
        return torch.softmax((x @ x.mT).masked_fill(hidden, -math.inf), -1) @ x

    compiled = tk.compile(function, backend="torch")
    assert_same(function, compiled, sample(2, 8, 16))
    assert compiled.report().matched == {"attention": 1}


def test_tables_with_unequal_halves_are_as_written():
    table = torch.cat((ANGLES, ANGLES + 1), -1)

    def function(x):
        x = x.view(2, 8, 4, 4).transpose(1, 2)
        return x * table.cos() + torch.cat((-x[..., 2:], x[..., :2]), -1) * table.sin()

    compiled = tk.compile(function, backend="torch")
    assert_same(function, compiled, sample(2, 8, 16))
    assert compiled.report().matched == {"rotary": 1}


@pytest.mark.parametrize("size", (1.0, 100.0))
def test_a_fill_hides_only_small_scores(size):
    def function(x):
        return torch.softmax((x * size @ (x * size).mT).masked_fill(CAUSAL, -1.2e4), -1) @ x

    compiled = tk.compile(function, backend="torch")
    assert_same(function, compiled, sample(2, 8, 16))
    assert compiled.report().matched == {"attention": 1}


def test_a_kept_input_may_be_written_later():
    def function(x):
        logits = x * 2
        loss = F.cross_entropy(logits, torch.zeros(8, dtype=torch.long))
        logits.mul_(2)
        return loss + logits

    compiled = tk.compile(function, backend="torch")
    assert_same(function, compiled, sample(8, 16))
    assert compiled.report().matched == {"cross_entropy": 1}


@pytest.mark.parametrize("masks", ("none", "padding", "causal", "both", "a row without keys"))
def test_multi_head_attention(masks):
    torch.manual_seed(0)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(16, 4, batch_first=True)

        def forward(self, x, **options):
            return self.attention(x, x, x, **options)[0]

    padding, options = PADDING.clone(), {}
    padding[0] = masks == "a row without keys"
    if masks in ("padding", "both", "a row without keys"):
        options["key_padding_mask"] = padding
    if masks in ("causal", "both"):
        options |= {"attn_mask": CAUSAL, "is_causal": True, "need_weights": False}
    model = Model().double()
    compiled = tk.compile(model, backend="torch")
    x = sample(2, 8, 16)
    torch.testing.assert_close(compiled(x, **options), model(x, **options), rtol=1e-9, atol=1e-9, equal_nan=True)
    assert compiled.report().matched == {"multi_head_attention": 1}


def test_multi_head_attention_of_keys_and_values_of_other_widths():
    attention = nn.MultiheadAttention(16, 4, kdim=12, vdim=8, batch_first=True).double()

    def function(x):
        return attention(x, x[..., :12], x[..., :8], need_weights=False)[0]

    compiled = tk.compile(function, backend="torch")
    assert_same(function, compiled, sample(2, 8, 16))
    assert compiled.report().matched == {"multi_head_attention": 1}


class Masked(nn.Module):
    def __init__(self, fill=-1e9):
        super().__init__()
        self.fill = fill
        self.register_buffer("mask", torch.ones(32, 32).triu(1))

    def forward(self, x):
        length = x.shape[1]
        scores = (x @ x.transpose(1, 2)).masked_fill(self.mask[:length, :length].bool(), self.fill)
        return torch.softmax(scores / 4.0, -1) @ x


def test_a_changed_mask_counts():
    model = Masked()
    compiled = tk.compile(model, backend="torch")
    for change in (
        lambda: None,
        lambda: model.mask[:, 1].zero_(),
        lambda: setattr(model, "mask", model.mask.T.clone()),
    ):
        change()
        assert_same(model, compiled, sample(2, 8, 16))
    assert "attention" in compiled.report().matched


class Added(Masked):
    def forward(self, x):
        bias = torch.zeros(8, 8).masked_fill(self.mask[:8, :8].bool(), self.fill)
        return torch.softmax(x @ x.mT + bias, -1) @ x


@pytest.mark.parametrize("kind", (Masked, Added))
@pytest.mark.parametrize("fill", (-1e9, -math.inf))
def test_a_row_without_keys_is_as_written(fill, kind):
    model = kind(fill)
    model.mask[3] = 1.0
    compiled = tk.compile(model, backend="torch")
    x = sample(2, 8, 16)
    torch.testing.assert_close(compiled(x), model(x), equal_nan=True)
    assert compiled.report().matched == {"attention": 1}


@pytest.mark.parametrize("dynamic", (True, None), ids=("dynamic", "automatic"))
def test_two_compilations_serve_all_lengths(dynamic):
    model = Masked()
    compiled = tk.compile(model, backend="torch", dynamic=dynamic)
    for length in (8, 9, 17, 31, 11):
        assert_same(model, compiled, sample(2, length, 16))
    report = compiled.report()
    assert report.graphs <= 2 and report.matched == {"attention": report.graphs}


class Block(nn.Module):
    def __init__(self, p=0.0, checkpointed=False):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(16, 64), nn.Linear(64, 16), nn.LayerNorm(16)
        self.drop, self.checkpointed = nn.Dropout(p), checkpointed

    def body(self, x):
        hidden = self.up(self.norm(x))
        hidden = 0.5 * hidden * (1 + torch.erf(hidden / math.sqrt(2)))
        x = x + self.drop(self.down(hidden))
        return torch.softmax(x @ x.transpose(1, 2) / 4, -1) @ x

    def forward(self, x):
        return checkpoint(self.body, x, use_reentrant=False) if self.checkpointed else self.body(x)


@pytest.mark.parametrize("fill", (-100.0, -1e9, -math.inf), ids=str)
def test_windows_with_masks_of_their_own(fill):
    """Windows of an image are sequences of a batch; they share a bias, and some hide positions (3 windows, 2 heads)."""
    hidden = torch.arange(8)[:, None] + torch.arange(8) > torch.tensor([20, 9, 12])[:, None, None]
    hidden[2, 3] = fill == -1e9  # every key of one query

    def attention(q, bias):
        scores = q @ q.mT * 0.5 + bias
        scores = scores.view(-1, 3, 2, 8, 8)
        if fill == -100.0:
            scores = scores + torch.zeros(3, 8, 8, dtype=q.dtype).masked_fill(hidden, fill)[None, :, None]
        else:
            scores = scores.masked_fill(hidden[None, :, None], fill)
        return scores.view(-1, 2, 8, 8).softmax(-1) @ q

    compiled = tk.compile(attention, backend="torch", fullgraph=True)
    for images in (2, 3, 5):
        assert_same(attention, compiled, sample(3 * images, 2, 8, 4), sample(2, 8, 8, seed=1))
    assert set(compiled.report().matched) == {"attention"}


@pytest.mark.parametrize(
    ("batch", "trained", "matched"), ((2, True, {}), (2, False, {"attention": 1}), (1, True, {"attention": 1}))
)
def test_a_bias_of_each_score_is_left_alone_in_training(batch, trained, matched):
    """PyTorch's operators are faster for its gradient, which is as large as the scores; not for one that is shared."""

    def attention(x, bias):
        return (x @ x.mT * 0.5 + bias).softmax(-1) @ x

    compiled = tk.compile(attention, fullgraph=True)
    x, bias = (sample(*shape, dtype=torch.float32) for shape in ((2, 4, 192, 64), (batch, 4, 192, 192)))
    compiled(x.requires_grad_(trained), bias.requires_grad_(trained))
    assert compiled.report().matched == matched


@pytest.mark.parametrize(("channels", "tokens"), ((48, 192), (192, 192)))
def test_channels_that_attend_to_channels_are_left_alone(channels, tokens):
    def attention(x):
        return (x @ x.mT * 0.5).softmax(-1) @ x

    compiled = tk.compile(attention, fullgraph=True)
    with torch.no_grad():
        compiled(sample(2, 4, channels, tokens, dtype=torch.float32))
    assert compiled.report().matched == ({} if channels < tokens else {"attention": 1})


def test_arithmetic_of_sizes_is_not_arithmetic_of_tensors():
    def windows(x):
        parts = x.view(-1, 2, 4, 16)
        batch = int(parts.shape[0] / (8 / 4) * 2) // 2
        return parts.view(2 * batch, 8, 16) + 1.0 / x.shape[0]

    compiled = tk.compile(windows, fullgraph=True)
    for batch in (2, 4, 6):
        torch.testing.assert_close(compiled(sample(batch, 8, 16)), windows(sample(batch, 8, 16)))


def test_a_norm_that_casts_its_input_takes_in_the_sum_before_it():
    def residual(x, branch):
        stream = x + branch
        normed = F.layer_norm(stream.to(torch.float64), (16,), WEIGHT, BIAS).type(x.dtype)
        return stream + normed.sin()

    compiled = tk.compile(residual, backend="torch", fullgraph=True)
    assert_same(residual, compiled, sample(2, 8, 16), sample(2, 8, 16, seed=1))
    assert compiled.report().matched == {"add_layer_norm": 1}


def test_norms_without_parameters_share_one_weight():
    def modulated(x, scale, shift):
        for _ in range(2):
            x = x + (F.layer_norm(x, (16,), None, None, 1e-6) * (1 + scale[:, None]) + shift[:, None])
        return F.layer_norm(x, (16,))

    compiled = tk.compile(modulated, backend="torch", fullgraph=True)
    assert_same(modulated, compiled, sample(2, 8, 16), sample(2, 16, seed=1), sample(2, 16, seed=2))
    assert compiled.report().matched == {"layer_norm": 1, "add_layer_norm": 2}


def test_checkpointing_recomputes():
    torch.manual_seed(0)
    model = Block(0.2, True).double()
    compiled = tk.compile(model, backend="torch")
    x = sample(2, 8, 16)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor.shape) or tensor, lambda y: y):
        y = compiled(x)
    assert compiled.report().matched.keys() >= {"attention", "gelu"}
    assert torch.Size((2, 8, 64)) not in saved
    y.sum().backward()
    model.drop.p = 0.0
    assert_same(model, tk.compile(model, backend="torch"), x)


@pytest.mark.parametrize("backend", ("torch", None))
def test_autocast_has_the_dtypes_of_eager(backend):
    model, x = Block(), sample(64, 8, 16, dtype=torch.float32)
    compiled = tk.compile(model, backend=backend)
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = model(x), compiled(x)
        ours = multiplies_under_autocast(x, torch.empty(16, 16), True)
    assert found.dtype is expected.dtype
    assert ("linear" in compiled.report().matched) is (backend is None and ours)
    torch.testing.assert_close(found, expected, rtol=5e-2, atol=5e-2)


def test_a_norm_that_becomes_part_of_another_one_is_not_computed_twice(monkeypatch):
    def normed(x, residual, weight):
        summed = x + residual
        y = summed * torch.rsqrt(summed.square().mean(-1, keepdim=True) + 1e-6) * weight
        return y * summed

    graphs = []
    monkeypatch.setattr(
        graph, "rewrite", lambda module, *rest: (_rewrite.rewrite(module, *rest), graphs.append(module))[0]
    )
    compiled = tk.compile(normed, backend="torch")
    assert_same(normed, compiled, sample(2, 8, 16), sample(2, 8, 16, seed=1), sample(16, seed=2))
    assert compiled.report().matched == {"add_rms_norm": 1}
    names = [node.target.__name__ for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert sorted(names) == ["add_rms_norm", "getitem", "getitem", "mul"]


class Stream(nn.Module):
    """A float32 stream of norms and products, before or after the addition."""

    def __init__(self, norm, first, dropout=0.0):
        super().__init__()
        self.norms, self.first = nn.ModuleList(norm(64) for _ in range(3)), first
        self.layers, self.dropout = nn.ModuleList(nn.Linear(64, 64) for _ in range(3)), nn.Dropout(dropout)

    def forward(self, x):
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + self.dropout(layer(norm(x))) if self.first else norm(self.dropout(layer(x)) + x)
        return x


@pytest.mark.skipif(cpu.unavailable(torch.device("cpu")) is not None, reason="only the CPU kernels have two dtypes")
@pytest.mark.parametrize("dropout", (0.0, 0.1))
@pytest.mark.parametrize("first", (True, False), ids=("pre", "post"))
@pytest.mark.parametrize("norm", (nn.LayerNorm, nn.RMSNorm))
def test_norms_round_for_products_under_autocast(norm, first, dropout):
    torch.manual_seed(0)
    model, x = Stream(norm, first, dropout), sample(8, 128, 64, dtype=torch.float32).requires_grad_()
    compiled = tk.compile(model)

    def run(module):
        with torch.autocast("cpu", torch.bfloat16):
            y = module(x)
        return y, torch.autograd.grad(y.square().mean(), (x, *model.parameters()))

    y, gradients = run(compiled)
    assert compiled.report().matched["rounded_norm"] == (3 if first else 2)  # nothing rounds the last result
    assert not any(row.operation == "rounded_norm" for row in compiled.report().left)
    expected, wanted = run(model)
    assert y.dtype is expected.dtype is torch.float32
    if not dropout:
        torch.testing.assert_close(y, expected, rtol=2e-2, atol=2e-2)
        exact = torch.autograd.grad(model(x).square().mean(), (x, *model.parameters()))
        for mine, theirs, reference in zip(gradients, wanted, exact, strict=True):
            assert mine.dtype is theirs.dtype
            assert (mine - reference).norm() <= 2 * (theirs - reference).norm() + 1e-6


def errors_under_autocast(model, compiled, *inputs):
    """For the result and each gradient: the dtypes, and the errors of a compiled model and of eager autocast."""
    outcomes = []
    for module, enabled in ((compiled, True), (model, True), (model, False)):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            y = module(*inputs)
        given = [x for x in (*inputs, *model.parameters()) if x.requires_grad]
        grad = torch.linspace(-1, 1, y.numel()).view(y.shape).to(y.dtype)
        outcomes.append((y, *torch.autograd.grad(y, given, grad)))
    for mine, theirs, exact in zip(*outcomes, strict=True):
        assert mine.dtype is theirs.dtype
        yield (mine - exact).norm().item(), (theirs - exact).norm().item()


class SelfAttention(nn.Module):
    def __init__(self, mask, padding):
        super().__init__()
        self.attention, self.mask, self.padding = nn.MultiheadAttention(64, 4), mask, padding

    def forward(self, x):
        return self.attention(x, x, x, attn_mask=self.mask, key_padding_mask=self.padding)[0]


@pytest.mark.parametrize("masks", ("none", "float", "padding", "both"))
def test_multi_head_attention_under_autocast(masks):
    torch.manual_seed(0)
    mask = nn.Transformer.generate_square_subsequent_mask(32) if masks in ("float", "both") else None
    padding = (torch.arange(32) >= 28).repeat(8, 1) if masks in ("padding", "both") else None
    padding = padding if mask is None or padding is None else torch.zeros(8, 32).masked_fill(padding, -math.inf)
    model, x = SelfAttention(mask, padding), sample(32, 8, 64, dtype=torch.float32)
    compiled = tk.compile(model)
    for mine, theirs in errors_under_autocast(model, compiled, x):
        assert mine <= 2 * theirs + 1e-6
    assert compiled.report().matched["multi_head_attention"] == 1


@pytest.mark.parametrize("batch_first", (True, False))
def test_multi_head_attention_multiplies_rows_in_the_order_of_memory(batch_first, monkeypatch):
    """Without gradients PyTorch's product of a transposed view has a copy of the weight for each batch."""
    attention = nn.MultiheadAttention(64, 4, batch_first=batch_first).eval()
    x = sample(32, 16, 64, dtype=torch.float32).detach()
    factors, linear = [], _multi_head.faster_linear
    monkeypatch.setattr(_multi_head, "faster_linear", lambda x, *rest: factors.append(x) or linear(x, *rest))
    with torch.no_grad():
        compiled = torch.compile(lambda x: attention(x, x, x, need_weights=False)[0], backend="transformer_kernels")
        torch.testing.assert_close(compiled(x), attention(x, x, x)[0], atol=1e-5, rtol=1e-5)
    assert len(factors) == 2 and all(factor.is_contiguous() for factor in factors)


class CastLinear(nn.Linear):
    """A layer that casts its parameters to the dtype of its input."""

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype))


def test_products_read_parameters_that_are_cast_under_autocast():
    torch.manual_seed(0)
    model, x = nn.Sequential(CastLinear(64, 64), CastLinear(64, 64)), sample(8, 64, 64, dtype=torch.float32)
    compiled = tk.compile(model)
    for mine, theirs in errors_under_autocast(model, compiled, x):
        assert mine <= 1.1 * theirs + 1e-6
    with torch.autocast("cpu", torch.bfloat16):
        ours = multiplies_under_autocast(x, model[0].weight, True)
    assert compiled.report().matched.get("linear", 0) == 2 * ours  # the second one reads bfloat16


def test_products_that_are_small_under_autocast_stay_pytorchs():
    layer = nn.Linear(64, 64)
    compiled = tk.compile(layer)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        x = torch.randn(8, 64)
        torch.testing.assert_close(compiled(x), layer(x), rtol=0, atol=0)
    assert "linear" not in compiled.report().matched


def test_rotated_queries_and_keys_are_rounded_once(monkeypatch):
    angles = torch.arange(64.0)[:, None] * 10000.0 ** (-torch.arange(16) / 16)
    cos, sin = torch.cat((angles, angles), 1).cos(), torch.cat((angles, angles), 1).sin()

    def rotated(x):
        first, second = x.chunk(2, -1)
        return (x * cos + torch.cat((-second, first), -1) * sin).to(torch.bfloat16)

    x, dtypes = sample(8, 8, 64, 32, dtype=torch.bfloat16), []
    original = rotary_pattern.rotary
    monkeypatch.setattr(rotary_pattern, "rotary", lambda *a, **k: (dtypes.append(a[0].dtype), original(*a, **k))[1])
    compiled = tk.compile(rotated)
    found, expected = compiled(x), rotated(x)
    assert compiled.report().matched == {"rotary": 1} and dtypes == [torch.bfloat16]
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)
    gradients = [torch.autograd.grad(y.float().square().sum(), x)[0] for y in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=2e-2, atol=2e-2)


class Viewed(nn.Module):
    """Norms whose results are read through views, by a product, and by an attention module."""

    def __init__(self):
        super().__init__()
        self.norms, self.layer = nn.ModuleList(nn.LayerNorm(64) for _ in range(2)), nn.Linear(64, 64)
        self.attention = nn.MultiheadAttention(64, 4)

    def forward(self, x):
        x = x + self.layer(self.norms[0](x).transpose(0, 1).reshape(-1, 64)).view(x.shape)
        y = self.norms[1](x)
        return x + self.attention(y, y, y)[0]


def test_norms_round_through_views_and_for_attention_modules():
    torch.manual_seed(0)
    model, x = Viewed(), sample(64, 32, 64, dtype=torch.float32)
    compiled = tk.compile(model)
    for mine, theirs in errors_under_autocast(model, compiled, x):
        assert mine <= 2 * theirs + 1e-6
    assert compiled.report().matched["rounded_norm"] == 2


class CastNorm(nn.RMSNorm):
    """A norm in float32 whose result has the dtype of its input."""

    def forward(self, x):
        return super().forward(x.to(torch.float32)).to(x.dtype)


def test_norms_with_casts_around_them():
    torch.manual_seed(0)
    model = nn.Sequential(CastNorm(64), nn.Linear(64, 64), CastNorm(64), nn.Linear(64, 64))
    compiled, x = tk.compile(model), sample(16, 64, 64, dtype=torch.float32)
    graphs = []
    original = _rewrite.rewrite
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph, "rewrite", lambda module, *rest: (original(module, *rest), graphs.append(module))[0])
        for mine, theirs in errors_under_autocast(model, compiled, x):
            assert mine <= 2 * theirs + 1e-6
    names = [node.target.__name__ for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert compiled.report().matched["rounded_norm"] == 2
    assert names.count("rms_norm") == 1  # from bfloat16 to bfloat16
    assert not any(node.op == "call_method" and node.args[0].op == "placeholder" for node in graphs[0].graph.nodes)


def test_a_norm_that_no_product_reads_is_not_rounded():
    model, x = nn.Sequential(nn.LayerNorm(64)), sample(8, 128, 64, dtype=torch.float32)
    compiled = tk.compile(model)
    with torch.autocast("cpu", torch.bfloat16):
        assert compiled(x).dtype is torch.float32
    assert "rounded_norm" not in str(compiled.report())


def test_casts_of_a_norm_are_fused_into_it():
    def run(x, weight):
        y = F.rms_norm(x, (64,), weight, 1e-6)
        return y.to(torch.bfloat16) @ y.bfloat16().transpose(-1, -2), y.sum()

    compiled, x = tk.compile(run), sample(8, 128, 64, dtype=torch.float32).requires_grad_()
    found, expected = compiled(x, torch.ones(64)), run(x, torch.ones(64))
    assert compiled.report().matched["rounded_norm"] == 1
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-2, atol=1e-2)


def written(y):
    first = y.bfloat16()
    first.view(-1, 64).mul_(2)
    return first, y.bfloat16()


def written_after_a_view(y):
    first = y.view(-1, 64).bfloat16()
    first.view(-1).mul_(2)
    return first, y.bfloat16()


def returned(y):
    return y.bfloat16(), y.bfloat16()


def without_a_gradient(y):
    with torch.no_grad():
        first = y.bfloat16()
    return first * y.bfloat16(), y.bfloat16()


def normed(x, weight):
    return F.rms_norm(x.float(), (64,), weight, 1e-6)


def rotated(x, angles):
    swapped = torch.cat((-x[..., 32:], x[..., :32]), -1)
    angles = torch.cat((angles, angles), -1)
    return x * angles.cos() + swapped * angles.sin()


@pytest.mark.parametrize("use", (written, written_after_a_view, returned, without_a_gradient))
@pytest.mark.parametrize(("made", "other"), ((normed, (64,)), (rotated, (128, 32))))
def test_rounded_copies_that_are_not_alike_stay_apart(made, other, use):
    def run(x, other):
        return use(made(x, other))

    compiled, other = tk.compile(run), sample(*other, dtype=torch.float32).detach()
    x, same = (sample(8, 4, 128, 64, dtype=torch.bfloat16) for _ in range(2))
    found, expected = compiled(x, other), run(same, other)
    assert found[0].data_ptr() != found[1].data_ptr()
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=2e-2)
    for result in (found, expected):
        sum(value.float().square().sum() for value in result).backward()
    assert (x.grad - same.grad).norm() <= 2e-2 * same.grad.norm()


def written_weight(x, weight):
    narrow = weight.to(torch.bfloat16)
    narrow.view(-1).mul_(2)
    return F.linear(x, narrow)


def weight_without_a_gradient(x, weight):
    with torch.no_grad():
        narrow = weight.to(torch.bfloat16)
    return F.linear(x, narrow)


def written_rows(x, weight):
    wide = x.float()
    wide.view(-1).mul_(2)
    return F.linear(wide + F.rms_norm(wide, (256,), torch.ones(256), 1e-6), weight)


def rows_without_a_gradient(x, weight):
    with torch.no_grad():
        wide = (x * 2).float()
    return F.linear(F.rms_norm(wide, (256,), torch.ones(256), 1e-6), weight) + x


@pytest.mark.parametrize(
    "run",
    (written_weight, weight_without_a_gradient, written_rows, rows_without_a_gradient),
    ids=lambda run: run.__name__,
)
def test_casts_that_do_more_under_autocast_are_kept(run):
    """A cast that is written to, or made without gradients, is no other form of what it casts."""
    results = []
    for function in (tk.compile(run), run):
        x, weight = sample(1024, 256, dtype=torch.bfloat16), sample(256, 256, dtype=torch.float32, seed=1)
        with torch.autocast("cpu", torch.bfloat16):
            y = function(x, weight)
        y.float().square().sum().backward()
        results.append((y.detach(), x.grad, weight.grad))
    for mine, theirs in zip(*results, strict=True):
        assert (mine is None) is (theirs is None)
        assert mine is None or (mine - theirs).norm() <= 2e-2 * theirs.norm()


def test_dropout_drops_the_right_share():
    compiled = tk.compile(lambda x: F.dropout(x, 0.25) + 1.0)
    x = torch.ones(64, 1024, requires_grad=True)
    y = compiled(x)
    y.sum().backward()
    assert abs((y == 1.0).float().mean().item() - 0.25) < 0.01
    torch.testing.assert_close(x.grad, (y - 1.0).detach())


def test_no_gradients():
    model = Block(0.5).double().eval()
    compiled = tk.compile(model, backend="torch")
    with torch.no_grad():
        torch.testing.assert_close(compiled(sample(2, 8, 16)), model(sample(2, 8, 16)))


def test_the_report_names_what_is_left_and_why():
    compiled = tk.compile(weights_returned, backend="torch")
    x = sample(2, 8, 16)
    compiled(x)
    (row,) = (row for row in compiled.report().left if row.operation == "attention")
    assert "used elsewhere" in row.reason
    assert "used elsewhere" in str(compiled.report())
    shares = compiled.shares(lambda: compiled(x))
    assert shares.share == 0.0 and "softmax" in shares.rest and "0% of the forward pass" in str(shares)


def test_compile_is_torch_compile():
    model = Block()
    compiled = tk.compile(model)
    compiled(sample(2, 8, 16, dtype=torch.float32))
    assert compiled.report().graphs == 1
    assert compiled.state_dict().keys() == {f"_orig_mod.{name}" for name in model.state_dict()}
    copy.deepcopy(compiled)(sample(2, 8, 16, dtype=torch.float32))
    with pytest.raises(ValueError, match="compile: backend must be one of"):
        tk.compile(model, backend="fast")


def test_the_entry_point():
    table = (ROOT / "pyproject.toml").read_text()
    assert (
        '[project.entry-points.torch_dynamo_backends]\ntransformer_kernels = "transformer_kernels.patching.graph:'
        in table
    )
    from transformer_kernels.patching.graph import transformer_kernels

    model = Block()
    x = sample(2, 8, 16, dtype=torch.float32)
    compiled = torch.compile(model, backend=transformer_kernels, options={"backend": "torch"})
    torch.testing.assert_close(compiled(x), model(x))


def test_run_compiles_a_script(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\n"
        "class M(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        return torch.softmax(x @ x.mT, -1) @ x\n"
        "print(M()(torch.ones(1, 256, 64)).sum().item())\n"
    )
    command = [sys.executable, "-m", "transformer_kernels", "run", "--compile", "--backend", "torch", str(script)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == 256 * 64
    assert "1 operations replaced, 0 left to PyTorch; 1 graph: attention 1" in done.stderr


@pytest.mark.parametrize("repeated", KEYS.values(), ids=list(KEYS))
@pytest.mark.parametrize("sdpa", (False, True), ids=("by hand", "sdpa"))
def test_repeated_heads_are_not_copied(repeated, sdpa):
    def attention(x):
        q, k, v = torch.cat((x, x + 1.0), 1), repeated(x.sin()), repeated(x.cos())
        if sdpa:
            return F.scaled_dot_product_attention(q, k, v)
        return (q @ k.mT * 0.5).softmax(-1) @ v

    found = []

    def backend(module, inputs):
        graph.rewrite(module, torch.is_grad_enabled(), "torch")
        found.extend(str(getattr(node.target, "__name__", node.target)) for node in module.graph.nodes)
        return module.forward

    x = torch.randn(2, 2, 8, 8, dtype=torch.float64)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(attention, backend=backend)(x), attention(x))
    assert not {"repeat_interleave", "expand", "reshape", "flatten"} & set(found), found
