"""The same bits at every instruction set: of each operation by default, and of whole runs in reproducible mode."""

from __future__ import annotations

import contextlib
import hashlib
import re
import warnings

import numpy
import pytest
import torch
from torch import Tensor

import transformer_kernels as tk
from tests.support import fresh, reproducible_runs
from tests.support.arguments import DTYPES, dtype_id
from transformer_kernels import cli
from transformer_kernels.backends import cpu
from transformer_kernels.ops import _exact
from transformer_kernels.ops.loss import _calls
from transformer_kernels.verification.examples import EXAMPLES

if cpu.unavailable(torch.device("cpu")) is not None:
    pytest.skip("the CPU kernels are not built", allow_module_level=True)

KERNELS = cpu.load()
FUSING = [level for level in KERNELS.instruction_sets if cpu._fuses(level) and level not in cpu.OWN_ORDER]
"""The levels with a fused multiply-add and no products of bfloat16 with an order of their own."""

SHAPES = [(6, 5), (10, 37), (150, 128), (67, 90), (4, 515), (33, 64)]

OPTIONS = {
    "layer_norm": {},
    "rms_norm": {},
    "add_layer_norm": {"dropout_p": 0.3},
    "cross_entropy": {"label_smoothing": 0.1, "softcap": 20.0, "z_loss": 0.01},
    "attention": {"causal": True, "window": 20, "softcap": 9.0, "dropout_p": 0.2},
}
"""Options beside those of an operation's example."""


def hashable(*tensors):
    return [x.detach().reshape(-1).contiguous().view(torch.uint8) for x in tensors]


def results(op, options, shape, dtype):
    """The bits of an operation's outputs and gradients."""
    tensors = EXAMPLES[op].make(*shape, dtype)
    if op == "cross_entropy":
        tensors["targets"] = tensors["targets"].clamp(max=shape[1] - 1)
    torch.manual_seed(3)
    outputs = getattr(tk, op)(**tensors, **options, backend="cpu")
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    generator = torch.Generator().manual_seed(4)
    torch.autograd.backward(outputs, [torch.randn(y.shape, generator=generator).to(y.dtype) for y in outputs])
    return hashable(*outputs, *(x.grad for x in tensors.values() if isinstance(x, Tensor) and x.grad is not None))


def at_each_level(levels, make):
    """make() at each of these instruction sets."""
    used, found = KERNELS.instruction_set(), []
    try:
        for level in levels:
            KERNELS.use(level)
            found.append(make())
    finally:
        KERNELS.use(used)
    return found


needs_two = pytest.mark.skipif(len(FUSING) < 2, reason="needs the levels avx2 and avx512")


@needs_two
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("varied", [False, True], ids=["example", "varied"])
@pytest.mark.parametrize("op", EXAMPLES)
def test_instruction_sets_compute_the_same_bits(op, varied, dtype):
    """By default: sums have one order, whatever the width of a register."""
    if varied and op not in OPTIONS:
        pytest.skip("no other options")
    options = {**EXAMPLES[op].options, **(OPTIONS[op] if varied else {})}
    for rows, columns in SHAPES:
        shape = (rows + rows % 2, columns + columns % 2)  # pairs of columns and two sequences
        first, *others = at_each_level(FUSING, lambda shape=shape: results(op, options, shape, dtype))
        for other in others:
            assert all(map(torch.equal, first, other)), shape


# Runs

HASHES = {
    "char-gpt": "0da5eac835032e38",
    "char-gpt, muon": "3beff0f235ee25ed",
    "char-gpt, bfloat16": "fd70ecd6711474c2",
    "imdb, packed": "80634aecbf9988eb",
    "imdb": "5edf989675cdca7e",
}
"""Of the weights at the end of each run, and the last validation loss, on every processor."""

needs_fused = pytest.mark.skipif(not FUSING, reason="needs kernels with a fused multiply-add")


@pytest.fixture
def restored():
    """Leaves the process as it was before a run in reproducible mode."""
    threads, level = torch.get_num_threads(), KERNELS.instruction_set()
    yield
    cpu.reproduce(False)
    KERNELS.use(level)
    torch.set_num_threads(threads)


def at_level(level, name, **options):
    """The trainer of a run that starts at this instruction set."""
    cpu.reproduce(False)
    KERNELS.use(level)
    return reproducible_runs.trained(name, **options)


@needs_fused
@pytest.mark.parametrize("level", [level for level in KERNELS.instruction_sets if cpu._fuses(level)])
@pytest.mark.parametrize("name", HASHES)
def test_weights_have_the_same_bits_at_each_instruction_set(name, level, restored):
    trainer = at_level(level, name, threads=1)
    assert trainer.graph_state == "on"
    assert not trainer._mode.uncovered
    assert reproducible_runs.digest(trainer) == HASHES[name]


@needs_fused
@pytest.mark.parametrize("name", HASHES)
def test_weights_have_the_same_bits_in_eager_steps_of_two_threads(name, restored):
    trainer = at_level(FUSING[0], name, threads=2, cuda_graph="off")
    assert reproducible_runs.digest(trainer) == HASHES[name]


@needs_fused
def test_weights_have_the_same_bits_without_vector_code_of_pytorch_and_mkl():
    code = """
import torch
from tests.support import reproducible_runs as runs
torch.set_num_threads(3)
print(torch.backends.cpu.get_cpu_capability(), *(runs.digest(runs.trained(name)) for name in runs.RUNS))
"""
    restricted = {"ATEN_CPU_CAPABILITY": "default", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"}
    found = fresh.checked(code, **restricted, TRANSFORMER_KERNELS_CPU_ISA=FUSING[0]).split()
    assert found == ["DEFAULT", *HASHES.values()]


@needs_fused
def test_the_summary_of_a_run_has_the_hash_of_its_weights(tmp_path, restored, capsys):
    corpus = reproducible_runs.book(tmp_path)["corpus"]
    options = f"--corpus {corpus} --steps 2 --context 24 --model layers=1 --model heads=2 --reproducible --no-sample"
    assert cli.main(["train", "char-gpt", *options.split(), "--no-progress", "--out", str(tmp_path / "run")]) == 0
    expected = hashlib.sha256((tmp_path / "run/last/model.safetensors").read_bytes()).hexdigest()
    assert f"weights          SHA-256 {expected}" in capsys.readouterr().out


# Operations in reproducible mode


@needs_fused
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_id)
def test_a_row_has_the_bits_that_it_has_in_a_batch(dtype, restored):
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(*s, generator=generator).to(dtype) for s in ((40, 600), (700, 600), (700,)))
    q, k, v = (torch.randn(1, 4, 1100, 72, generator=generator).to(dtype) for _ in range(3))

    def bits():
        with tk.reproducible(), tk.use_backend("cpu"):
            batch, causal = tk.linear(x, weight, bias, activation="gelu"), tk.attention(q, k, v, causal=True)
            for count in (1, 2, 4, 7):
                assert torch.equal(tk.linear(x[:count], weight, bias, activation="gelu"), batch[:count])
                assert torch.equal(x[:count] @ weight.t(), (x @ weight.t())[:count])
                last = tk.attention(q[:, :, -count:], k, v, causal=True)  # decoding
                assert torch.equal(last, causal[:, :, -count:])
            return hashable(batch, causal)

    first, *others = at_each_level(FUSING, bits)
    assert all(all(map(torch.equal, first, other)) for other in others)


@needs_fused
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 9])
@pytest.mark.parametrize("op", ["layer_norm", "rms_norm", "softmax", "gelu", "swiglu"])
def test_rows_and_their_gradients_do_not_depend_on_the_batch(op, rows):
    def outcome(count):
        tensors = EXAMPLES[op].make(12, 193)
        leaves = {}
        for name, x in tensors.items():
            leaves[name] = (x if x.dim() == 1 else x[:count]).detach().clone().requires_grad_()
        y = getattr(tk, op)(**leaves, backend="cpu")
        y.backward(torch.linspace(-1, 1, 12 * 193).view(12, 193)[:count])
        return [y.detach(), *(x.grad for x in leaves.values() if x.dim() > 1)]

    for alone, among in zip(outcome(rows), outcome(12), strict=True):
        assert torch.equal(alone, among[:rows])


# The mode


def test_what_is_not_covered_is_named_once(restored):
    if not FUSING:
        pytest.skip("needs kernels with a fused multiply-add")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with tk.reproducible() as mode:
            torch.randn(3, 5).erf().erf().relu().sum()
    assert dict(mode.uncovered) == {"aten::erf": 2}
    assert ["aten::erf" in str(warning.message) for warning in warned] == [True]


@needs_fused
def test_operators_inside_of_operations_are_replaced_or_named(restored, monkeypatch):
    x, weight = wide(12, 20).float(), wide(9, 20, seed=1).float()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with tk.reproducible() as mode:
            tk.linear(x.half(), weight.half(), backend="cpu")
    assert set(mode.uncovered) == {"aten::mm"}  # float16
    monkeypatch.setattr(_calls, "rows_at_once", lambda *_: 5)  # in chunks, by PyTorch's products
    given = x.requires_grad_(), weight.requires_grad_(), torch.arange(12) % 9
    with tk.reproducible() as mode:
        chunks = tk.linear_cross_entropy(*given, backend="cpu")
        (dx,) = torch.autograd.grad(chunks, x)
        whole = tk.cross_entropy(tk.linear(*given[:2], backend="cpu"), given[2], backend="cpu")
    assert not mode.uncovered and torch.equal(chunks, whole)
    torch.testing.assert_close(dx, torch.autograd.grad(whole, x)[0])


@needs_fused
def test_a_block_ends_as_it_began(restored):
    level = KERNELS.instruction_set()
    with pytest.raises(KeyError), tk.reproducible():
        assert cpu.is_reproducible() and KERNELS.instruction_set() in FUSING
        with tk.reproducible():
            pass
        assert cpu.is_reproducible()
        with pytest.raises(ValueError, match="order of additions of its own"):
            KERNELS.use("plain")
        raise KeyError
    assert not cpu.is_reproducible() and KERNELS.instruction_set() == level
    assert tk.reproducible()(cpu.is_reproducible)()
    assert not cpu.is_reproducible()


@pytest.mark.skipif(FUSING == [], reason="needs x86 and another level")
def test_kernels_without_a_fused_multiply_add_are_refused(restored):
    KERNELS.use("plain")
    with pytest.raises(tk.BackendUnavailable, match="fused multiply-add"), tk.reproducible():
        pass
    code = "import torch, transformer_kernels as tk; tk.gelu(torch.ones(3))"
    refused = fresh.python(code, TRANSFORMER_KERNELS_CPU_ISA="plain", TRANSFORMER_KERNELS_REPRODUCIBLE="1")
    assert refused.returncode and "TRANSFORMER_KERNELS_REPRODUCIBLE is set" in refused.stderr


@needs_fused
def test_the_environment_makes_operations_reproducible():
    code = "from transformer_kernels.backends import cpu; print(cpu.load().instruction_set(), cpu.is_reproducible())"
    assert fresh.checked(code, TRANSFORMER_KERNELS_REPRODUCIBLE="1") == f"{FUSING[-1]} True"
    assert fresh.checked(code, TRANSFORMER_KERNELS_REPRODUCIBLE="0").endswith("False")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"time_limit": 9}, "excludes --time-limit"),
        ({"compile": True}, "excludes --compile"),
        ({"backend": "torch"}, "excludes --backend torch: pass cpu"),
        ({"dtype": "tf32"}, "excludes --dtype tf32"),
    ],
)
def test_what_a_reproducible_run_excludes(options, message, restored):
    with pytest.raises(ValueError, match=message):
        reproducible_runs.trained("char-gpt", **options)


def wide(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


REPLACED = {
    "exp": lambda x, y: x.exp(),
    "log": lambda x, y: x.abs().log(),
    "sin": lambda x, y: (x * 50).sin(),
    "cos": lambda x, y: (x * 50).cos(),
    "pow": lambda x, y: x.abs() ** y,
    "pow scalar": lambda x, y: 10000.0**x + x.abs() ** 0.3 + x**2 + x**3,
    "rsqrt": lambda x, y: x.abs().rsqrt(),
    "sum": lambda x, y: x.sum((0, 2), keepdim=True) + x.sum() + y.mean(-1, keepdim=True).mean(),
    "norm": lambda x, y: x.norm(dim=(0, 1)) + torch.stack(torch._foreach_norm([x, y])).sum(),
    "mm": lambda x, y: x[0] @ y[1].t() + torch.addmm(x[0, :, :6], x[1], y[0].t(), beta=0.5, alpha=2.0),
    "bmm": lambda x, y: torch.baddbmm(torch.bmm(x, y.mT), y, x.mT, beta=3.0, alpha=0.5),
    "mv": lambda x, y: x[0] @ y[0, 0],
    "lerp": lambda x, y: x.lerp(y, 0.3).add_(y, alpha=0.7).sub(x, alpha=0.4),
    "addcmul": lambda x, y: torch.addcmul(x, x, y, value=0.5).addcdiv_(x, y.abs() + 1, value=-0.3),
    "foreach": lambda x, y: torch._foreach_addcdiv(torch._foreach_lerp([x], [y], 0.9), [x], [y.abs() + 1], [0.2])[0],
    "add.out": lambda x, y: torch.add(x, y, alpha=0.3, out=torch.empty_like(x)),
}
"""Functions of two tensors (3, 6, 9) by operators that the mode replaces."""


@needs_fused
@pytest.mark.parametrize("name", REPLACED)
def test_replacements_compute_what_pytorch_does(name, restored):
    x, y = wide(3, 6, 9), wide(3, 6, 9, seed=1)
    want = REPLACED[name](x, y)
    with tk.reproducible() as mode:
        found = REPLACED[name](x.float(), y.float())
    assert not mode.uncovered
    torch.testing.assert_close(found.double(), want, rtol=1e-5, atol=1e-5)


@needs_fused
@pytest.mark.parametrize("fused", [False, True], ids=["foreach", "fused"])
def test_adamw_steps_as_pytorch_does(fused, restored):
    def weights(mode):
        layer = torch.nn.Linear(7, 5)
        with torch.no_grad():
            for number, parameter in enumerate(layer.parameters()):
                parameter.copy_(wide(*parameter.shape, seed=number))
        optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, weight_decay=0.2, fused=fused)
        batches = [wide(6, 7, seed=10 + number).float() for number in range(4)]  # drawn by PyTorch
        with mode:
            for batch in batches:
                optimizer.zero_grad()
                layer(batch).square().sum().backward()
                torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
                optimizer.step()
        return layer.weight.detach()

    ours = tk.reproducible()
    torch.testing.assert_close(weights(ours), weights(contextlib.nullcontext()), rtol=1e-5, atol=1e-6)
    assert not ours._mode.uncovered


@needs_fused
def test_draws_have_the_distribution(restored):
    torch.manual_seed(0)
    with tk.reproducible() as mode:
        drawn, uniform = torch.randn(200_000), torch.rand(200_000)
        kept = torch.empty(200_000).bernoulli_(0.3)
        spread = torch.empty(200_000).normal_(3.0, 0.5)
    assert not mode.uncovered
    moments = [
        drawn.mean(),
        drawn.var(),
        drawn.pow(4).mean(),
        uniform.mean(),
        uniform.var(),
        kept.mean(),
        spread.mean(),
    ]
    expected = torch.tensor([0.0, 1.0, 3.0, 0.5, 1 / 12, 0.3, 3.0])
    torch.testing.assert_close(torch.stack(moments), expected, rtol=0.02, atol=0.01)
    assert uniform.min() >= 0.0 and uniform.max() < 1.0


@pytest.mark.parametrize(
    ("function", "scale"), [("exp", 100.0), ("sin", 1000.0), ("cos", 1000.0), ("log", 1.0)], ids=lambda x: str(x)
)
def test_exact_functions_are_within_a_few_units(function, scale):
    x = wide(20_000) * scale
    x = x.abs() if function == "log" else x
    found, want = getattr(_exact, function)(x), getattr(torch, function)(x)
    torch.testing.assert_close(found, want, rtol=1e-15, atol=0.0 if function == "exp" else 1e-15)
    ends = torch.tensor([0.0, torch.inf, -torch.inf, torch.nan], dtype=torch.float64)
    if function in ("exp", "log"):
        torch.testing.assert_close(getattr(_exact, function)(ends), getattr(torch, function)(ends), equal_nan=True)


@needs_fused
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=dtype_id)
def test_square_roots_are_those_of_the_processor(dtype, restored):
    """MKL's, which PyTorch calls, are a unit off for one element in a hundred, at each instruction set for others."""
    x = torch.cat([wide(100_000).abs() * 100.0, wide(1000).abs() * 1e-40, torch.tensor([0.0, torch.inf, 4.0])]).to(
        dtype
    )
    want = torch.from_numpy(numpy.sqrt(x.numpy()))
    with tk.reproducible() as mode:
        found = [x.sqrt(), torch._foreach_sqrt([x])[0], x**0.5, x.clone().sqrt_()]
    assert not mode.uncovered and all(torch.equal(y, want) for y in found)


@needs_fused
def test_a_program_runs_reproducibly(tmp_path):
    program = """
import torch
torch.manual_seed(0)
layer = torch.nn.Sequential(torch.nn.LayerNorm(40), torch.nn.Linear(40, 30))
optimizer = torch.optim.AdamW(layer.parameters())
layer(torch.randn(9, 40)).square().mean().backward()
optimizer.step()
print(sum(p.view(torch.int32).sum().item() for p in layer.parameters()))
"""
    (tmp_path / "program.py").write_text(program + "torch.ones(3).erf()\n")
    code = f"""
import sys
from transformer_kernels.cli import main
sys.exit(main(["run", "--backend", "cpu", "--reproducible", {str(tmp_path / "program.py")!r}]))
"""
    found = [
        fresh.python(code, ATEN_CPU_CAPABILITY=capability, TRANSFORMER_KERNELS_CPU_ISA=level)
        for capability, level in (("default", FUSING[0]), (None, FUSING[-1]))
    ]
    assert found[0].stdout == found[1].stdout != ""
    assert all(re.findall("reproducible: (.*) is computed", each.stderr) == ["aten::erf"] for each in found)


@needs_fused
def test_a_step_that_is_recorded_in_a_block_has_the_bits_of_eager_ones(restored):
    def weights(wrapped):
        torch.manual_seed(0)
        with tk.reproducible() as mode:
            model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Linear(30, 7))
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)

            def step(x):
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                return loss

            called = wrapped(step, optimizer)
            losses = [called(torch.randn(8, 20)).item() for _ in range(5)]
        assert not mode.uncovered
        return losses, hashable(*model.parameters())

    (eager, before), (recorded, after) = weights(lambda step, _: step), weights(tk.graphed)
    assert eager == recorded and all(map(torch.equal, before, after))


@needs_fused
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("aten::normal", lambda x: torch.normal(x, 1.0)),
        ("aten::normal", lambda x: torch.normal(0.0, 1.0, (3,))),
        ("aten::linspace", lambda x: torch.linspace(0, 1, 7)),
        ("aten::arange", lambda x: torch.arange(0, 1, 0.1)),
        ("aten::index_put", lambda x: x.index_put((torch.tensor([0, 0]),), x[:2], accumulate=True)),
        ("aten::add", lambda x: x.add(1.0, alpha=0.3)),
        ("aten::exp2", lambda x: torch.arange(3).exp2()),
        ("", lambda x: torch.randint(9, (3,)) + torch.arange(3.0) + torch.randperm(3) + x[:3].bernoulli_()),
        ("", lambda x: torch.arange(5).pow(2).sum() + x.index_put((torch.tensor([0]),), x[:1]).sum()),
        ("", lambda x: torch.bernoulli(x.abs().clamp(max=1)) + torch.nn.functional.dropout(x, 0.5)),
    ],
)
def test_other_operators_are_named(name, call, restored):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with tk.reproducible() as mode:
            call(wide(5).float())
    assert set(mode.uncovered) == ({name} if name else set())
