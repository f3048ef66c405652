"""Fusion of calls in a recorded step: conditions, and bitwise equality."""

from contextlib import nullcontext

import pytest
import torch

import transformer_kernels as tk
from tests.support.operations import without_plans
from transformer_kernels.backends import cpu
from transformer_kernels.graphs import _host
from transformer_kernels.graphs._host import HostGraphs
from transformer_kernels.ops.linear import _cpu

pytestmark = pytest.mark.skipif(
    cpu.unavailable(torch.device("cpu")) is not None, reason="the CPU kernels are not built"
)

AMX = {(*case[:2], ""): limits for kind in ("", "AMX") for case, limits in _cpu.LIMITS.items() if case[2] == kind}
"""The limits that hold with AMX, for any processor."""

ROWS, WIDTH, INNER = 100, 70, 1100
"""No multiples of a tile; the second exceeds the number of products accumulated in one register."""


@pytest.fixture(params=["plain", "avx2", "avx512", "avx512_bf16", "amx", "chosen as with amx"])
def instruction_set(request, monkeypatch):
    """The last case is what is chosen with AMX, on any processor."""
    kernels = cpu.load()
    used = kernels.instruction_set()
    if request.param == "chosen as with amx":
        monkeypatch.setattr(_cpu, "LIMITS", AMX)
    elif request.param not in kernels.instruction_sets:
        pytest.skip("not supported by this processor")
    else:
        kernels.use(request.param)
    with without_plans():
        yield request.param
    kernels.use(used)


@pytest.fixture
def two_threads():
    used = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(used)


@pytest.fixture
def names(monkeypatch):
    """Counts in the calls of the last recording."""
    found = []
    fuse = _host.Recording.fuse

    def noted(recording):
        fuse(recording)
        found[:] = [
            getattr(function, "__name__", "") + "_added" * _is_added(function, arguments)
            for function, arguments in recording.calls
        ]

    monkeypatch.setattr(_host.Recording, "fuse", noted)
    return found


def _is_added(function, arguments):
    """Whether a kernel adds the residual's gradient to what it computes or reads."""
    return getattr(function, "__name__", "") in ("linear_backward_data", "norm_backward") and arguments.residual != 0


def step(parts, dtype, read=None):
    """The gradients of x and the weights, where a branch of two linear layers is added to its input.

    With `read` also a value computed from the branch's gradient, "before" or "after" it is added to the residual's, or
    from the "sum".
    """
    kept = []
    x, norm, up, down = (part.detach().requires_grad_() for part in parts)
    with torch.autocast("cpu", dtype) if dtype is not torch.float32 else nullcontext():
        stream = tk.layer_norm(x, norm, backend="cpu")
        through = stream.view_as(stream) if dtype is torch.float32 else stream.to(dtype)
        if read == "sum":
            stream.register_hook(lambda gradient: kept.append(gradient * 3))
        elif read is not None:
            through.register_hook(lambda gradient: kept.append(gradient * 3 if read == "before" else gradient))
        inner = tk.linear(through, up, activation="relu", backend="cpu")
        branch = tk.linear(inner, down, backend="cpu")
        loss = (stream.float() * 0.5 + branch.float()).square().sum()
    gradients = torch.autograd.grad(loss, (x, norm, up, down))
    return [*gradients, *(gradient * 3 if read == "after" else gradient for gradient in kept)]


@pytest.fixture
def parts():
    torch.manual_seed(3)
    sizes = (ROWS, WIDTH), (WIDTH,), (INNER, WIDTH), (WIDTH, INNER)
    return [torch.randn(size) / size[-1] ** 0.5 for size in sizes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_kernel_adds_the_residuals_gradient_with_the_same_bits(parts, dtype, names, instruction_set, two_threads):
    own = dtype is torch.float32 or "amx" not in instruction_set
    torch.set_num_threads(1 if own else 2)  # the bits of PyTorch's products in tiles depend on their number
    expected = step(parts, dtype)
    torch.set_num_threads(2)
    replay = HostGraphs().capture(lambda: step(parts, dtype))
    replay()
    for _ in range(2):
        for found, wanted in zip(replay(), expected, strict=True):
            assert torch.equal(found, wanted)
    assert names.count("linear_backward_data_added") == (dtype is torch.float32)
    assert names.count("norm_backward_added") == (dtype is torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("read", ["before", "after", "sum"])
def test_a_gradient_that_is_read_elsewhere_too_is_made_as_before(parts, names, read, dtype):
    expected = step(parts, dtype, read)
    replay = HostGraphs().capture(lambda: step(parts, dtype, read))
    replay()
    for found, wanted in zip(replay(), expected, strict=True):
        assert torch.equal(found, wanted)
    by = "linear_backward_data" if read == "sum" else "norm_backward"
    with_tiles = _cpu.processor(cpu.load()) == "AMX"  # its products in bfloat16 are PyTorch's
    is_added = dtype is torch.float32 or not with_tiles if read == "sum" else dtype is torch.bfloat16
    assert [name for name in names if name.endswith("_added")] == [f"{by}_added"] * is_added


def test_a_gradient_that_attention_writes_after_the_product_is_added_after_it(parts, names):
    """The kernel's arguments name every tensor, those inside of views too."""

    def step():
        x, norm, up, down = (part.detach().requires_grad_() for part in parts)
        stream = tk.layer_norm(x, norm, backend="cpu")
        heads = stream.view(1, 1, ROWS, WIDTH)
        attended = tk.attention(heads, heads.detach(), heads.detach(), backend="cpu")
        branch = tk.linear(tk.linear(stream, up, activation="relu", backend="cpu"), down, backend="cpu")
        return list(torch.autograd.grad(attended.square().sum() + branch.square().sum(), (x, norm, up, down)))

    expected = step()
    replay = HostGraphs().capture(step)
    for found, wanted in zip(replay(), expected, strict=True):
        assert torch.equal(found, wanted)
    assert not any(name.endswith("_added") for name in names)


def block(parts, kind, read=None):
    """y and the gradients of a block of a network in bfloat16 around norms in float32, which autocast casts between.

    With `read` also a value computed from a norm's operand, result or gradient, which stays in float32.
    """
    found = []
    add = tk.add_rms_norm if kind == "rms" else tk.add_layer_norm
    x, norm, up, down = (part.detach().requires_grad_() for part in parts)
    with torch.autocast("cpu", torch.bfloat16):
        stream = x * 2
        for _ in range(2):
            normed = stream if kind == "post" else tk.layer_norm(stream, norm, backend="cpu")
            if read == "gradient":
                normed.register_hook(lambda gradient: found.append(gradient * 3))
            inner = tk.linear(normed, up, activation="gelu", backend="cpu")
            branch = tk.linear(inner, down, backend="cpu")
            branch = branch.float() if read == "operand" else branch
            normed, summed = add(branch, stream, norm, dropout_p=0.0 if kind == "pre" else 0.3, backend="cpu")
            stream = normed if kind == "post" else summed
        y = tk.linear(normed, up, backend="cpu")
    found += {"result": [normed.detach() * 2], "operand": [branch.detach() * 2]}.get(read, [])
    gradients = torch.autograd.grad(y.float().square().mean() + summed.square().mean(), (x, norm, up, down))
    return [y.detach(), *gradients, *found]


def seeded(function):
    torch.manual_seed(5)
    return function()


@pytest.mark.parametrize("kind", ["pre", "post", "rms"])
def test_norms_cast_between_products_with_the_same_bits(parts, kind, names, instruction_set, two_threads):
    own = "amx" not in instruction_set
    torch.set_num_threads(2 if own else 1)  # the bits of PyTorch's products in tiles depend on their number
    expected = seeded(lambda: block(parts, kind))
    replay = HostGraphs().capture(lambda: block(parts, kind))
    replay()
    for _ in range(2):
        for found, wanted in zip(seeded(replay), expected, strict=True):
            assert torch.equal(found, wanted)
    if own:  # y.float() and its gradient, and gradients of two tensors that are one without dropout, or the first x
        assert names.count("copy_") == {"pre": 4, "post": 3, "rms": 2}[kind]
    assert names.count("norm_backward_added") == (kind == "post")  # also where its result has the residual's memory


@pytest.mark.parametrize("read", ["operand", "result", "gradient"])
def test_what_another_call_reads_is_kept_in_float32(parts, names, read):
    expected = block(parts, "pre", read)
    replay = HostGraphs().capture(lambda: block(parts, "pre", read))
    replay()
    for found, wanted in zip(replay(), expected, strict=True):
        assert torch.equal(found, wanted)


def test_a_cast_that_no_call_reads_and_results_without_elements_are_dropped(names):
    x = torch.randn(64, 70)
    norm = tk.layer_norm
    replay = HostGraphs().capture(lambda: (x.bfloat16(), torch.zeros(0, 3), norm(x, x[0], backend="cpu") + 1)[2])
    assert torch.equal(replay(), replay()) and not {"copy_", "fill_"} & set(names)
