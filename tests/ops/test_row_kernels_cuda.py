"""CUDA row kernels: memory traffic, alignment, schedules, boundaries between layouts."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

import transformer_kernels as tk
from tests.support.arguments import DTYPES, dtype_id, normal
from tests.support.operations import EXAMPLES, backward, forward_of, function, prepared, row_operations
from transformer_kernels.backends import cuda as _extension
from transformer_kernels.backends import dispatch
from transformer_kernels.ops.loss._calls import RowLoss

ACTIVATION, EMBEDDING, LOSS, NORM, ROTARY, SOFTMAX = (
    dispatch.family(f"transformer_kernels.ops.{family}", "cuda")
    for family in ("activation", "embedding", "loss", "norm", "rotary", "softmax")
)
CPU = torch.device("cpu")
SCHEDULES = [("lowest_first", 0), ("one_warp_ahead", 1), ("random", 2), ("random", 3)]


@pytest.fixture
def emulation():
    if not _extension.emulating():
        pytest.skip("counts and schedules require the emulation")
    if (reason := _extension.unavailable(CPU)) is not None:
        pytest.skip(reason)
    module = _extension.load()
    yield module
    module.set_schedule("lowest_first", 0)


def random(*shape, dtype, seed=1):
    return normal(*shape, dtype=dtype, device=CPU, seed=seed).detach()


def counted(module, function, *arguments):
    module.reset_counters()
    function(*arguments)
    return module.counters()


# Each layout with rows in registers: a row per warp of up to 256, 512 and 1024 columns, per block of 4096 and 8192.
@pytest.mark.parametrize("columns", [256, 512, 768, 1024, 4096, 8192])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_a_row_is_read_once(emulation, dtype, columns):
    rows = 8
    x, dy = random(rows, columns, dtype=dtype), random(rows, columns, dtype=dtype, seed=2)
    weight = torch.ones(columns)
    row_bytes = rows * columns * x.element_size()
    call = prepared("softmax", x)
    assert counted(emulation, forward_of, SOFTMAX, call)["global_load_bytes"] == row_bytes
    assert counted(emulation, backward, SOFTMAX, call, x, dy)["global_load_bytes"] == 2 * row_bytes
    parameters = 2 * rows * columns * 4  # weight and bias, which stay in the L2 cache
    forward = counted(emulation, forward_of, NORM, prepared("layer_norm", x, weight, weight))
    assert forward["global_load_bytes"] == row_bytes + parameters
    assert forward["global_store_bytes"] == row_bytes + 2 * 4 * rows
    forward = counted(emulation, forward_of, NORM, prepared("rms_norm", x, weight))
    assert forward["global_load_bytes"] == row_bytes + parameters // 2
    assert forward["global_store_bytes"] == row_bytes + 4 * rows


@pytest.mark.parametrize(("columns", "threads"), [(256, 32), (1024, 32), (4096, 256), (8192, 512)])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_logits_are_read_once_and_their_gradient_is_written_once(emulation, dtype, columns, threads):
    rows = 8
    logits, targets = random(rows, columns, dtype=dtype), torch.arange(rows)
    row_bytes = rows * columns * logits.element_size()
    each_reads_its_target = 8 * rows * threads
    counters = counted(emulation, LOSS.row_losses, logits, targets, RowLoss(-100, 0.1))
    assert counters["global_load_bytes"] == row_bytes + each_reads_its_target
    assert counters["global_store_bytes"] == 3 * 4 * rows  # loss, maximum, 1 / sum
    counters = counted(emulation, partial(LOSS.row_losses, in_place=True), logits, targets, RowLoss(-100, 0.1))
    assert counters["global_load_bytes"] == row_bytes + each_reads_its_target
    assert counters["global_store_bytes"] == row_bytes + 4 * rows


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("columns", [65, 1001, 8201])
def test_what_lies_between_rows_of_logits_is_not_looked_at_and_becomes_zero(emulation, columns, smoothing):
    buffer = torch.full((5, -(-columns // 8) * 8), torch.nan, dtype=torch.bfloat16)
    logits = buffer[:, :columns].copy_(random(5, columns, dtype=torch.bfloat16))
    expected = logits.clone()
    targets = torch.arange(5)
    losses = LOSS.row_losses(logits, targets, RowLoss(-100, smoothing), in_place=True)
    wide = torch.nn.functional.cross_entropy(expected.float(), targets, reduction="none", label_smoothing=smoothing)
    torch.testing.assert_close(losses, wide)
    assert torch.isfinite(logits).all() and (buffer[:, columns:] == 0).all()


@pytest.mark.parametrize("columns", [256, 768, 4096])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_an_embedding_reads_each_token_and_each_place_once(emulation, dtype, columns):
    """Each vector also reads its id, from the first-level cache; only y and the statistics are stored."""
    rows, norm = 8, torch.ones(columns)
    weight, positions = random(5, columns, dtype=dtype), random(rows, columns, dtype=dtype, seed=2)
    tokens = torch.tensor([[4, 0, 1, 1, 3, 2, 0, 4]])
    row_bytes, ids = rows * columns * weight.element_size(), rows * columns // (16 // weight.element_size()) * 8
    for factor, parameters, statistics in ((None, 0, 0), (norm, 2 * rows * columns * 4, 8 * rows)):
        call = prepared("embedding", tokens, weight, positions, factor, factor)
        counters = counted(emulation, forward_of, EMBEDDING, call)
        assert counters["global_load_bytes"] == 2 * row_bytes + ids + parameters
        assert counters["global_store_bytes"] == row_bytes + statistics


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_rows_travel_by_16_bytes(emulation, dtype):
    x = random(4, 768, dtype=dtype)
    for module, call in (
        (SOFTMAX, prepared("softmax", x)),
        (ACTIVATION, prepared("gelu", x)),
        (ACTIVATION, prepared("swiglu", x)),
    ):
        counters = counted(emulation, forward_of, module, call)
        assert counters["global_load_bytes"] == 16 * counters["global_loads"]
        assert counters["global_store_bytes"] == 16 * counters["global_stores"]


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_rotated_heads_are_read_once_and_written_by_16_bytes(emulation, dtype, interleaved):
    """Each head reads the angles of its tokens again, from the first-level cache."""
    heads, angles = random(1, 4, 3, 96, dtype=dtype), torch.ones(3, 32)
    call = prepared("rotary", heads, heads, angles, angles, interleaved=interleaved)
    counters = counted(emulation, forward_of, ROTARY, call)
    size = 2 * heads.numel() * heads.element_size()
    assert counters["global_load_bytes"] == size + 8 * 2 * angles.numel() * 4
    assert counters["global_store_bytes"] == size == 16 * counters["global_stores"]


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("shift_bytes", [4, 8])
@pytest.mark.parametrize("columns", [64, 1032])
def test_a_misaligned_address_takes_the_scalar_path(emulation, dtype, columns, shift_bytes):
    shift = shift_bytes // dtype.itemsize
    storage = random(shift + 5 * columns, dtype=dtype)
    shifted, aligned = storage[shift:].view(5, columns), storage[shift:].clone().view(5, columns)
    assert shifted.data_ptr() % 16 == shift_bytes
    weight = torch.ones(columns)
    for op, *others in (
        ("softmax",),
        ("layer_norm", weight),
        ("gelu",),
        ("bias_gelu", weight),
        ("bias_relu", weight),
        ("rms_norm", weight),
        ("swiglu",),
    ):
        ours, expected = (getattr(tk, op)(x, *others, backend="cuda") for x in (shifted, aligned))
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=2 * torch.finfo(dtype).eps)


def all_results(rows, columns):
    """The outputs and gradients of every row operation's example."""
    results: list[Tensor] = []
    for op in row_operations("cuda"):
        tensors = EXAMPLES[op].make(rows, columns, torch.bfloat16)
        torch.manual_seed(77)
        outputs = function(op, "cuda")(**tensors)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        torch.autograd.backward(outputs, [torch.full_like(output, 0.37) for output in outputs])
        results += [*outputs, *(x.grad for x in tensors.values() if x.grad is not None)]
    logits = random(rows, columns, dtype=torch.bfloat16)
    losses = LOSS.row_losses(logits, torch.arange(rows), RowLoss(3, 0.1), in_place=True)
    return [*results, losses, logits]


@pytest.mark.parametrize("columns", [40, 45, 1000, 1100, 4100, 8300, 8301])
def test_every_schedule_gives_the_same_bits(emulation, columns):
    expected = all_results(12, columns)
    for kind, seed in SCHEDULES[1:]:
        emulation.set_schedule(kind, seed)
        for ours, first in zip(all_results(12, columns), expected, strict=True):
            assert torch.equal(ours, first), f"{kind} {seed}"


def test_partial_sums_do_not_depend_on_their_number_of_rows(emulation):
    """dweight of equal rows is the row count times one term, for any partition into blocks."""
    x = random(1, 96, dtype=torch.float32).expand(67, 96).contiguous()
    weight = torch.ones(96)
    call = prepared("layer_norm", x, weight, weight)
    _, _, dweight, dbias = backward(NORM, call, forward_of(NORM, call), torch.ones_like(x))
    normalised = (x[0] - x[0].mean()) / (x[0].var(unbiased=False) + 1e-5).sqrt()
    torch.testing.assert_close(dweight, 67 * normalised, atol=1e-4, rtol=1e-5)
    assert dbias is not None and torch.equal(dbias, torch.full_like(dbias, 67.0))


def test_launch_limits_are_those_of_the_device(emulation):
    x = random(4, 8, dtype=torch.float32)
    workspace = torch.empty(8)
    with pytest.raises(RuntimeError, match=r"bias_gelu_backward with grid \(1, 65536, 1\), block \(256, 1, 1\).*65535"):
        given = {"dtype": 0, "kind": 1, "gated": False, "dy": x.data_ptr(), "x": x.data_ptr()}
        given |= {"bias": workspace.data_ptr(), "up": 0, "dx": x.data_ptr(), "dbias": x.data_ptr(), "dup": 0}
        given |= {"partials": workspace.data_ptr(), "partial_rows": 65536, "rows": 4, "columns": 8}
        emulation.activation_backward(**given, bias_is_float32=True, device=0, stream=0)


def test_what_no_launch_can_count_is_refused(emulation):
    """Not truncated to 32 bits, which would leave most of a result unwritten. No address is read."""
    wide = (1 << 31) + 8
    with pytest.raises(ValueError, match="rows of up to 2147479551 elements; got 2147483656"):
        emulation.softmax_backward(0, 0, 0, 0, 1, wide, 1.0, 0, 0)
    for rows in (1 << 33, 1 << 34):  # four rows per block
        with pytest.raises(ValueError, match=f"2147483647 blocks; this call needs {rows // 4}"):
            emulation.softmax_backward(0, 0, 0, 0, rows, 1, 1.0, 0, 0)
    with pytest.raises(ValueError, match=f"this call needs {1 << 32}"):
        emulation.activation_forward(0, 1, False, 0, 0, 0, 0, 1 << 42, 1, False, 0, 0)


def test_a_wrong_number_of_arguments_is_a_type_error(emulation):
    with pytest.raises(TypeError, match="softmax_backward: dy is missing, or not in its position"):
        emulation.softmax_backward(0)
