"""Attention's kernel for forward-mode AD: out, lse and their tangents in one pass over the keys."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import jvp

import transformer_kernels as tk
from python_ref import ops as reference
from tests.support.parity import GRADIENT_FACTOR, OUTPUT_FACTOR, assert_within_budget
from transformer_kernels import BackendUnavailable
from transformer_kernels.backends import cpu
from transformer_kernels.ops.attention import AttentionCall

try:
    KERNELS = cpu.load()
except BackendUnavailable as error:
    pytest.skip(str(error), allow_module_level=True)


@pytest.fixture(params=KERNELS.instruction_sets)
def instruction_set(request):
    before = KERNELS.instruction_set()
    KERNELS.use(request.param)
    yield request.param
    KERNELS.use(before)


@pytest.fixture
def kernels_alone(kernels_alone, monkeypatch):
    """PyTorch's operators compute neither attention nor its tangents."""
    monkeypatch.setattr(AttentionCall, "tangents", AttentionCall.in_pytorch)  # which raises


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def operands(queries=37, keys=150, heads=(4, 2), width=40, batch=2, dtype=torch.float32):
    shapes = (heads[0], queries), (heads[1], keys), (heads[1], keys)
    inputs = [normal(batch, *shape, width, seed=i, dtype=dtype) for i, shape in enumerate(shapes)]
    return inputs, [normal(*x.shape, seed=10 + i, dtype=dtype) for i, x in enumerate(inputs)]


def check(inputs, tangents, options, op="attention"):
    """Outputs and tangents within the budgets of outputs and of gradients; an input without a tangent is a constant."""
    moved = [i for i, x in enumerate(tangents) if x is not None]
    dtype = inputs[0].dtype

    def run(operations, dtype, **extra):
        wide = {
            n: x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x for n, x in options.items()
        }
        given = [x.to(dtype) for x in inputs]

        def function(*primals):
            torch.manual_seed(4)
            for i, x in zip(moved, primals, strict=True):
                given[i] = x
            result = getattr(operations, op)(*given, **(options if extra else wide), **extra)
            return result if isinstance(result, tuple) else (result,)

        return jvp(function, *(tuple(values[i].to(dtype) for i in moved) for values in (inputs, tangents)))

    exact, eager, ours = run(reference, torch.float64), run(reference, dtype), run(tk, dtype, backend="cpu")
    terms = None  # the tangent of a row is the difference of terms as large as its output times the tangent of lse
    if options.get("return_lse"):
        terms = max(exact[1][0].abs().max().item(), (exact[0][0] * exact[1][1].unsqueeze(-1)).abs().max().item())
    for part, factor in ((0, OUTPUT_FACTOR), (1, GRADIENT_FACTOR)):
        for i, (got, want, plain) in enumerate(zip(ours[part], exact[part], eager[part], strict=True)):
            magnitude = terms if part and i == 0 else None
            assert_within_budget(f"{('output', 'tangent')[part]} {i}", got, want, plain, factor, dtype, magnitude)


IRREGULAR = torch.arange(37 * 150).view(37, 150) % 7 != 3
OPTIONS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (59, 9)},
    "padding": {"key_padding_mask": torch.arange(150).expand(2, 150) % 7 != torch.tensor([[3], [5]])},
    "leading padding": {"key_padding_mask": torch.arange(150) < torch.tensor([[150], [101]])},
    "bias": {"attn_bias": normal(1, 4, 37, 150, seed=20)},
    "mask": {"attn_bias": IRREGULAR},
    "mask of a window": {"attn_bias": torch.ones(37, 150).triu(2).tril(90).bool()},
    "alibi": {"alibi_slopes": torch.linspace(-0.1, 0.4, 8).view(2, 4), "causal": True},
    "sinks": {"sinks": torch.tensor([0.3, -1.0, 2.0, -torch.inf])},
    "softcap": {"softcap": 1.5},
    "dropout": {"dropout_p": 0.3},
    "negative scale": {"scale": -0.3},
    "no key": {"key_padding_mask": torch.tensor([[True], [False]]).expand(2, 150)},
    "no key, scale 0": {"key_padding_mask": torch.tensor([[True], [False]]).expand(2, 150), "scale": 0.0},
    "everything": {
        "window": (59, 9), "alibi_slopes": torch.linspace(-0.1, 0.4, 4), "attn_bias": normal(1, 4, 37, 150, seed=20),
        "key_padding_mask": torch.arange(150).expand(2, 150) % 7 != torch.tensor([[3], [5]]), "dropout_p": 0.2,
        "softcap": 1.5, "sinks": torch.tensor([0.3, -1.0, 2.0, 0.0]),
    },
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_each_option(name, dtype, kernels_alone):
    check(*operands(dtype=dtype), {**OPTIONS[name], "return_lse": True})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["causal", "everything"])
def test_each_instruction_set(name, dtype, instruction_set, kernels_alone):
    check(*operands(dtype=dtype), {**OPTIONS[name], "return_lse": True})


@pytest.mark.parametrize("moved", ["q", "k", "v", "qk", "kv"])
def test_absent_tangents(moved, kernels_alone):
    inputs, tangents = operands()
    tangents = [x if name in moved else None for name, x in zip("qkv", tangents, strict=True)]
    for options in ({"causal": True}, OPTIONS["everything"]):
        check(inputs, tangents, {**options, "return_lse": True})


@pytest.mark.parametrize("width", [16, 64, 128, 144, 200])
@pytest.mark.parametrize("lengths", [(1, 1), (3, 200), (130, 130), (65, 300)], ids=str)
def test_shapes(lengths, width, kernels_alone):
    check(*operands(*lengths, heads=(2, 1), width=width), {"causal": True, "return_lse": True})


def test_packed_sequences(kernels_alone):
    """And tokens behind the last of them."""
    inputs, tangents = operands(200, 300, batch=1)
    options = {
        "cu_seqlens": torch.tensor([0, 120, 120, 190], dtype=torch.int32),
        "cu_seqlens_k": torch.tensor([0, 30, 41, 290], dtype=torch.int32),
    }
    check(inputs, tangents, {**options, "causal": True, "return_lse": True})


@pytest.mark.parametrize("name", ["full", "causal", "sinks", "softcap"])
def test_packed_projections(name, kernels_alone):
    """Rotated as they are read, or not; tangents of any layout."""
    qkv, angles = normal(2, 50, 8, 32), normal(50, 8, seed=3)
    for cos, sin in ((None, None), (angles.cos(), angles.sin())):
        for tangent in (
            normal(2, 50, 8, 32, seed=1),
            normal(2, 50, 32, 8, seed=1).transpose(2, 3),
            torch.ones(1).expand(2, 50, 8, 32),
        ):
            check([qkv], [tangent], {"heads": 4, "cos": cos, "sin": sin, **OPTIONS[name]}, "packed_attention")


def test_rows_that_are_not_in_order(kernels_alone):
    """Tangents expanded, transposed, negated lazily and of another layout than their primals."""
    (q, k, v), _ = operands(33, 33, (2, 2), 64)
    layouts = normal(2, 33, 2, 64).transpose(1, 2), torch.ones(1).expand(k.shape), torch.complex(v, v).conj().imag
    check([q, k, v], list(layouts), {"causal": True})


def test_the_number_of_threads_does_not_change_a_bit(kernels_alone):
    inputs, tangents = operands(300, 300, (2, 1))
    found, before = [], torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(jvp(lambda *x: tk.attention(*x, causal=True, backend="cpu"), tuple(inputs), tuple(tangents)))
    finally:
        torch.set_num_threads(before)
    assert all(map(torch.equal, *found))


def test_dual_numbers_outside_of_torch_func(kernels_alone):
    inputs, tangents = operands()
    expected = jvp(lambda *x: tk.attention(*x, causal=True, backend="cpu"), tuple(inputs), tuple(tangents))
    with torch.no_grad(), forward_ad.dual_level():
        duals = map(forward_ad.make_dual, inputs, tangents)
        found = forward_ad.unpack_dual(tk.attention(*duals, causal=True, backend="cpu"))
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("shape", [(37, 150, (4, 2), 40), (5, 70, (3, 1), 64), (129, 129, (1, 1), 144)], ids=str)
def test_unwritten_scratch_reaches_no_result(shape, instruction_set, kernels_alone):
    """Nor is it computed with: no operand is denormal."""
    inputs, tangents = operands(*shape)
    found = []
    for word in (0, 0x00010001, 0x7FFF7FFF):  # zeros, denormals, NaN
        KERNELS.fill_scratch(word)
        try:
            KERNELS.denormal_operand()
            results = jvp(
                lambda q, k, v: tk.attention(q, k, v, causal=True, softcap=2.0, backend="cpu"),
                *map(tuple, (inputs, tangents)),
            )
            denormal = KERNELS.denormal_operand()
        finally:
            KERNELS.fill_scratch(-1)
        found.append((*results, torch.tensor(denormal)))
    for others in found[1:]:
        assert all(map(torch.equal, others, found[0]))


def test_reproducible_results_have_the_same_bits_at_each_level():
    levels = [level for level in ("avx2", "avx512") if level in KERNELS.instruction_sets]
    if len(levels) < 2:
        pytest.skip("needs two levels with a fused multiply-add")
    before, found = KERNELS.instruction_set(), []
    inputs, tangents = operands()
    for level in levels:
        KERNELS.use(level)
        cpu.reproduce(True)
        try:
            found.append(jvp(lambda *x: tk.attention(*x, causal=True, backend="cpu"), tuple(inputs), tuple(tangents)))
        finally:
            cpu.reproduce(False)
            KERNELS.use(before)
    assert all(map(torch.equal, *found))
