"""Bytes and FLOPs against counts by hand."""

import pytest
import torch

from benchmarks import workloads
from benchmarks.plan import plan

BF16, FP32 = torch.bfloat16, torch.float32


def test_attention_forward_by_hand():
    work = workloads.attention(BF16, "forward", B=2, H=4, L=128, D=64)
    one = 2 * 4 * 128 * 64 * 2  # bytes of each of q, k, v, out
    assert work.bytes == 4 * one + 2 * 4 * 128 * 4
    assert work.flops == 2 * (2 * 2 * 4 * 128 * 128 * 64)  # two products of 2 B H L L D


def test_attention_backward_is_two_and_a_half_forwards():
    forward, backward, both = (
        workloads.attention(BF16, direction, B=2, H=4, L=128, D=64) for direction in workloads.DIRECTIONS
    )
    assert backward.flops == 2.5 * forward.flops
    assert both.flops == 3.5 * forward.flops
    one, lse = 2 * 4 * 128 * 64 * 2, 2 * 4 * 128 * 4
    assert backward.bytes == 8 * one + lse  # q k v out dout in, dq dk dv out
    assert both.bytes == forward.bytes + backward.bytes


def test_padding_is_not_counted_as_work():
    work = workloads.attention(FP32, "forward", B=3, H=2, L=100, D=8, padded=True)
    assert work.key_lengths == (100, 75, 50)
    assert work.flops == 4 * 2 * 100 * (100 + 75 + 50) * 8
    mask = work.inputs(torch.device("cpu"))["key_padding_mask"]
    assert mask.sum(1).tolist() == [100, 75, 50] and mask[1, 74] and not mask[1, 75]


def test_decode_reads_each_key_head_once():
    work = workloads.attention(BF16, "forward", B=2, H=8, Hk=2, Lq=1, L=1000, D=128)
    assert work.bytes == 2 * (2 * 8 * 128 * 2) + 2 * (2 * 2 * 1000 * 128 * 2) + 2 * 8 * 4
    assert work.flops == 4 * 2 * 8 * 1000 * 128


@pytest.mark.parametrize(
    ("op", "forward", "backward"),
    [
        ("softmax", 2 * 600, 3 * 600),
        ("gelu", 2 * 600, 3 * 600),
        ("bias_gelu", 2 * 600 + 60, 3 * 600 + 2 * 60),
        ("bias_relu", 2 * 600 + 60, 3 * 600 + 60),
        ("cross_entropy", 600 + 80 + 80, 2 * 600 + 80 + 80),
        ("layer_norm", 2 * 600 + 2 * 60 + 80, 3 * 600 + 3 * 60 + 80),
        ("add_layer_norm", 4 * 600 + 2 * 60 + 80, 4 * 600 + 3 * 60 + 80),
        ("rms_norm", 2 * 600 + 60 + 40, 3 * 600 + 2 * 60 + 40),
        ("swiglu", 3 * 600, 5 * 600),
    ],
)
def test_row_bytes_by_hand(op, forward, backward):
    # 10 rows of 30 bf16 are 600 bytes, one row 60, mean and rstd of 10 rows 80
    counts = [workloads.rows(op, BF16, direction, M=10, N=30).bytes for direction in workloads.DIRECTIONS]
    assert counts == [forward, backward, forward + backward]


def test_an_output_layer_by_hand():
    forward, both = (workloads.output_layer(BF16, direction, M=10, E=4, V=30) for direction in ("forward", "both"))
    assert forward.bytes == 2 * (10 * 4 + 30 * 4) + 8 * 10  # x, weight, targets; the logits need no memory
    assert both.bytes == 2 * 2 * (10 * 4 + 30 * 4) + 8 * 10  # and dx, dweight
    assert forward.flops == 2 * 10 * 30 * 4 + 4 * 300
    assert both.flops == 3 * 2 * 10 * 30 * 4 + (4 + 5) * 300


@pytest.mark.parametrize("op", workloads.OPERATIONS)
def test_inputs_are_random_and_fresh(op):
    if op == "attention":
        work = workloads.attention(FP32, "forward", B=1, H=2, L=16, D=8)
    elif op == "linear_cross_entropy":
        work = workloads.output_layer(FP32, "forward", M=16, E=2, V=16)
    else:
        work = workloads.rows(op, FP32, "forward", M=16, N=16)
    first, second, again = (work.inputs(torch.device("cpu"), seed) for seed in (0, 1, 0))
    for name, tensor in first.items():
        assert (
            tensor.double().std() > 0.5 and not torch.equal(tensor, second[name]) and torch.equal(tensor, again[name])
        )


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_plan_covers_every_operation_and_repeats_nothing(device):
    tasks = plan(torch.device(device))
    assert len({task.key for task in tasks}) == len(tasks)
    assert {task.op for task in tasks} == {*workloads.OPERATIONS, "step"}
