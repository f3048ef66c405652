"""What a compiled program meets after it was compiled: other masks, lengths and modes, hooks, dropout that draws."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from torch import Tensor, nn

import transformer_kernels as tk
from tests.support.handwritten import compare
from transformer_kernels.ops.attention import _structure


class Attention(nn.Module):
    """Attention of one tensor with itself, and a mask that is a buffer."""

    def __init__(self, length: int = 8, p: float = 0.0) -> None:
        super().__init__()
        self.mask: Tensor
        self.register_buffer("mask", torch.ones(length, length, dtype=torch.bool).triu(1))
        self.softmax, self.dropout = nn.Softmax(dim=-1), nn.Dropout(p)

    def forward(self, q: Tensor, v: Tensor) -> Tensor:
        length = q.shape[-2]
        scores = q @ q.transpose(-2, -1) / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(self.mask[:length, :length], -math.inf)
        return self.dropout(self.softmax(scores)) @ v


pytestmark = pytest.mark.usefixtures("fresh_compiler")


def tensors(length: int = 8) -> tuple[Tensor, Tensor]:
    return torch.randn(2, 2, length, 8), torch.randn(2, 2, length, 8)


def routed(model: nn.Module):
    """The compiled model and the matches so far."""
    return compare.routed(model, compare.SINGLE.kernels)


def same(model, compiled, *inputs: Tensor) -> None:
    torch.testing.assert_close(compiled(*inputs), model(*inputs), rtol=2e-5, atol=2e-6)


CHANGES = {
    "in place": lambda model: model.mask.logical_not_().fill_diagonal_(False),
    "one element": lambda model: model.mask.__setitem__((3, 0), True),
    "another tensor": lambda model: setattr(model, "mask", torch.zeros_like(model.mask)),
    "other data": lambda model: setattr(model.mask, "data", torch.zeros_like(model.mask)),
    "loaded": lambda model: model.load_state_dict({"mask": torch.ones(8, 8, dtype=torch.bool).tril(-2)}),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
def test_a_mask_that_changes_after_the_first_call(change):
    model = Attention()
    compiled, matched = routed(model)
    inputs = tensors()
    same(model, compiled, *inputs)
    assert matched["attention"] == 1
    change(model)
    same(model, compiled, *inputs)


LENGTH = 160
POSITIONS = torch.arange(LENGTH)
STRUCTURED = {
    "window": (POSITIONS[:, None] - POSITIONS).abs() < 9,
    "documents": POSITIONS[:, None] // 40 == POSITIONS // 40,
    "prefix": (POSITIONS[:, None] >= POSITIONS) | (POSITIONS < 12),
}


@pytest.mark.skipif(compare.SINGLE.kernels != "cpu", reason="the CPU kernels read the values of masks")
@pytest.mark.parametrize("visible", STRUCTURED.values(), ids=list(STRUCTURED))
def test_the_structure_of_a_written_mask_is_found(visible, monkeypatch):
    model, found = Attention(LENGTH), []
    model.mask = ~visible

    def understood(*arguments):
        result = _structure.understood(*arguments)
        found.append(result)
        return result

    monkeypatch.setattr(sys.modules["transformer_kernels.ops.attention"], "understood", understood)
    compiled, _ = routed(model)
    same(model, compiled, *tensors(LENGTH))
    bias, _, _, key_ranges = found[-1]
    assert bias is None and key_ranges is not None


def test_every_length_has_its_own_mask():
    model = Attention(32)
    compiled, _ = routed(model)
    for length in (8, 5, 13, 1, 32, 8):
        same(model, compiled, *tensors(length))


def test_gradients_and_evaluation_take_turns():
    model = Attention(p=0.5)
    compiled, _ = routed(model)
    for training in (False, True, False):
        model.train(training)
        q, v = (each.requires_grad_(training) for each in tensors())
        out = compiled(q, v)
        assert out.requires_grad == training
        if not training:
            same(model, compiled, q, v)


def test_dropout_keeps_or_drops_each_weight():
    p, drawn = 0.25, []
    model = Attention(64, p)
    compiled, matched = routed(model)
    q, v = torch.randn(4, 2, 64, 8), torch.eye(64).expand(4, 2, 64, 64).contiguous()
    weights = model.eval()(q, v)
    model.train()
    for _ in range(2):
        out = compiled(q, v)
        visible = weights > 1e-6
        dropped = out[visible].abs() < 1e-12
        kept = out[visible][~dropped] / weights[visible][~dropped]
        torch.testing.assert_close(kept, torch.full_like(kept, 1.0 / (1.0 - p)), rtol=1e-3, atol=0.0)
        assert abs(dropped.double().mean().item() - p) < 5.0 * math.sqrt(p * (1 - p) / dropped.numel())
        drawn.append(dropped)
    assert matched["attention"] == 1 and not torch.equal(*drawn)


def test_a_hook_sees_and_changes_the_weights():
    model, seen = Attention(), []

    def hook(module: nn.Module, given: tuple[Tensor, ...], weights: Tensor) -> Tensor:
        seen.append(weights.shape)
        return weights * 0.5

    expected = 0.5 * model(*(inputs := tensors()))
    model.softmax.register_forward_hook(hook)
    compiled, _ = routed(model)
    torch.testing.assert_close(compiled(*inputs), expected, rtol=2e-5, atol=2e-6)
    assert seen == [(2, 2, 8, 8)]


def test_second_derivatives_are_right_or_refused():
    def second(function) -> Tensor:
        q = tensors()[0].double().requires_grad_()
        (first,) = torch.autograd.grad(function(q, q).pow(2).sum(), q, create_graph=True)
        return torch.autograd.grad(first.pow(2).sum(), q)[0]

    model = Attention()
    torch.manual_seed(0)
    expected = second(model)
    compiled, _ = compare.routed(model, "torch")
    torch.manual_seed(0)
    try:
        found = second(compiled)
    except (RuntimeError, NotImplementedError):
        return
    torch.testing.assert_close(found, expected)


def test_a_model_made_in_inference_mode():
    with torch.inference_mode():
        model = Attention()
        inputs = tensors()
        compiled, _ = routed(model)
        same(model, compiled, *inputs)
        same(model, compiled, *inputs)


class Logged(Tensor):
    """A tensor that counts the products it takes part in."""

    products = 0

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if getattr(function, "__name__", "") in ("matmul", "__matmul__"):
            cls.products += 1
        return super().__torch_function__(function, types, args, kwargs or {})


def test_a_subclass_keeps_its_type_and_its_calls():
    model = Attention()
    inputs = [each.as_subclass(Logged) for each in tensors()]
    expected = model(*inputs)
    compiled, _ = routed(model)
    found = compiled(*inputs)
    assert type(found) is type(expected)
    torch.testing.assert_close(found.as_subclass(Tensor), expected.as_subclass(Tensor), rtol=2e-5, atol=2e-6)


def test_a_random_mask_is_drawn_in_each_call():
    def function(q: Tensor, v: Tensor) -> Tensor:
        hidden = (torch.rand(8, 8) < 0.5) & ~torch.eye(8, dtype=torch.bool)
        return (q @ q.transpose(-2, -1)).masked_fill(hidden, -math.inf).softmax(-1) @ v

    compiled, matched = routed(function)
    inputs = tensors()
    drawn = []
    for run in (compiled, compiled, function, function):
        torch.manual_seed(len(drawn) % 2)
        drawn.append(run(*inputs))
    assert matched["attention"] and not torch.equal(drawn[0], drawn[1])
    for ours, eager in zip(drawn[:2], drawn[2:], strict=True):
        torch.testing.assert_close(ours, eager, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("training", (False, True))
def test_dropout_before_a_norm_of_a_sum(training):
    norm = nn.LayerNorm(8)

    def function(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        summed = v + nn.functional.dropout(torch.ones_like(q), 0.25, training)
        return norm(summed), summed

    compiled, matched = routed(function)
    q, v = torch.randn(64, 64, 8), torch.zeros(64, 64, 8)
    normed, summed = compiled(q, v)
    assert dict(matched) == {"add_layer_norm": 1}
    torch.testing.assert_close(normed, norm(summed), rtol=1e-4, atol=1e-5)
    share = (summed == 0.0).double().mean().item()
    assert abs(share - 0.25 * training) < 5.0 * math.sqrt(0.25 * 0.75 / summed.numel())


@pytest.mark.parametrize("training", (False, True))
def test_dropout_of_torchs_multi_head_attention(training):
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x, x, x, need_weights=False)[0]

    model = Model().train(training)
    compiled, matched = routed(model)
    x = torch.randn(2, 8, 8, requires_grad=True)
    found = [compiled(x) for _ in range(2)]
    assert matched["multi_head_attention"] == 1 and torch.equal(*found) is not training
    if not training:
        same(model, compiled, x)


class Normed(nn.Module):
    """The sum of two tensors and its norm."""

    def __init__(self, norm: str, eps: float | None) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(8, eps=eps) if norm == "rms_norm" else nn.LayerNorm(8, eps=1e-5 if eps is None else eps)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        summed = x + y
        return summed, self.norm(summed), self.norm(x)


@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("eps", [None, 1e-3, 0.0])
def test_norms_with_and_without_an_eps(norm, eps):
    model = Normed(norm, eps)
    compiled, matched = routed(model)
    inputs = torch.randn(4, 8), torch.randn(4, 8)
    expected = model(*inputs)
    for mine, theirs in zip(compiled(*inputs), expected, strict=True):
        torch.testing.assert_close(mine, theirs)
    assert dict(matched) == ({} if eps == 0.0 else {f"add_{norm}": 1, norm: 1})


def _multi_head(q: Tensor) -> Tensor:
    weights = (torch.ones(24, 8), None, None, None, False, 0.5, torch.eye(8), None)
    return nn.functional.multi_head_attention_forward(q[0], q[0], q[0], 8, 2, *weights, need_weights=False)[0]


DRAWN = {
    "sdpa": lambda q: nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=0.5),
    "dropout": lambda q: nn.functional.dropout(q, 0.5),
    "random numbers": torch.rand_like,
    "multi-head attention": _multi_head,
}
OF_TWO = {
    "square": lambda x, y: x * torch.rsqrt((x * y).mean(-1, keepdim=True) + 1e-5),
    "inverse": lambda x, y: x * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-5),
    "gate": lambda x, y: x * torch.sigmoid(y) * (x + 1.0),
    "mean": lambda x, y: (x - x.mean(-1, keepdim=True)) * torch.rsqrt(y.var(-1, unbiased=False, keepdim=True) + 1e-5),
    "gelu": lambda x, y: 0.5 * x * (1.0 + torch.erf(y / math.sqrt(2.0))),
}


def test_a_norm_without_a_weight():
    norm = nn.RMSNorm(8, eps=1e-3, elementwise_affine=False)
    compiled, matched = routed(norm)
    same(norm, compiled, torch.randn(4, 8))
    assert dict(matched) == {"rms_norm": 1}


def test_norms_whose_result_is_wider():
    weight, bias = torch.rand(8) + 0.5, torch.randn(8)

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.float()
        rms = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight
        variance = x.var(-1, unbiased=False, keepdim=True)
        return rms, (x - x.mean(-1, keepdim=True)) * torch.rsqrt(variance + 1e-5) * weight + bias

    compiled, matched = routed(function)
    x = torch.randn(4, 8, dtype=torch.bfloat16)
    torch.testing.assert_close(compiled(x), function(x), rtol=2e-5, atol=2e-6)
    assert dict(matched) == {"rms_norm": 1, "layer_norm": 1}


def test_dropout_beside_a_row_without_keys():
    model = Attention(64, 0.5)
    model.mask[3] = True
    compiled, matched = routed(model)
    first, second = (compiled(*inputs)[..., 4:, :] for inputs in [tensors(64)] * 2)
    assert matched["attention"] == 1 and not torch.equal(first, second)


@pytest.mark.parametrize("drawn", DRAWN.values(), ids=list(DRAWN))
def test_two_calls_that_draw_are_two_values(drawn):
    """Dropout, called twice with the same arguments: its product with itself is not its square, and so on."""

    def program(q: Tensor, weight: Tensor) -> list[Tensor]:
        return [combined(drawn(q), drawn(q)) * weight for combined in OF_TWO.values()]

    compiled, matched = routed(program)
    compiled(torch.ones(2, 2, 8, 8), torch.ones(8))
    assert not {"rms_norm", "layer_norm", "gelu", "swiglu"} & matched.keys()


def test_dropout_of_whole_channels_is_torchs():
    compiled, _ = routed(lambda x: torch.feature_dropout(x, 0.5, True))
    channels = compiled(torch.ones(8, 16, 16, 16)).flatten(2)
    assert torch.equal(channels.amin(-1), channels.amax(-1))


@pytest.mark.parametrize("family", ("GPT2", "Llama"))
def test_two_compilations_of_models_of_transformers_serve_all_lengths(family):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = getattr(transformers, f"{family}Config")(**sizes, vocab_size=50, use_cache=False)
    model = getattr(transformers, "GPT2LMHeadModel" if family == "GPT2" else "LlamaForCausalLM")(config)
    compiled = tk.compile(model)
    for length in (8, 9, 17, 33, 12):
        tokens = torch.randint(50, (2, length))
        compiled(input_ids=tokens, labels=tokens)
    assert compiled.report().graphs == 2


@pytest.mark.parametrize(
    "function",
    [
        lambda x: nn.functional.cross_entropy(x.flatten(0, 2), torch.arange(512), label_smoothing=-0.1),
        lambda x: nn.functional.scaled_dot_product_attention(x, x, x, scale=math.inf),
    ],
    ids=["smoothing", "scale"],
)
def test_numbers_that_the_operations_refuse_are_pytorchs(function):
    x = torch.randn(2, 4, 64, 512, requires_grad=True)
    torch.testing.assert_close(tk.compile(function)(x), function(x), rtol=0, atol=0, equal_nan=True)
