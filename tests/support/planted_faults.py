"""Faults in small training runs and what a certificate must name: `FAULTS` is the table, `search` plants one."""

from __future__ import annotations

import contextlib
import math
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import transformer_kernels as tk
from tests.support.plants import (
    Plant,
    activation,
    after_forward,
    altered,
    between_steps,
    called,
    compiled,
    gradient,
    input_of,
    kept,
    kernel,
    left_out,
    masked,
    module,
    once_per_token,
    poisoned,
    repeated_row,
    scaled,
    scores,
    stale,
    stale_argument,
    stale_rate,
    stale_seed,
    state,
    summed_without_last_row,
    swapped,
    untransposed,
    weight,
    without,
    without_last_row,
    without_row,
)
from transformer_kernels.ops.attention._call import NO_LIMIT
from transformer_kernels.verification import certificate as certificates
from transformer_kernels.verification import memory

ONSET = 5
"""Memory changes and replays go stale after so many steps; a recorded run has been captured by then."""
SAMPLED_STEPS = 3000
"""Steps in which samples must find a fault, three minutes of `char_gpt` on two cores."""


@dataclass(frozen=True)
class Fault:
    """A row of the table.

    Attributes:
        name: what is wrong.
        run: the training run, in RUNS; `recorded`: whether its steps are.
        plant: makes it so.
        operation, direction, layer: what the certificate must name, for a non-finite value an operator; the direction
            is "forward or backward" if what backward reads is wrong, too.
        what: a part of the name of the wrong tensor.
        missed: why it is not found or not located; "" if it must be.
        owner: the module of a weight, which is located as well if the optimizer is named with it.
    """

    name: str
    run: str
    plant: Plant
    operation: str
    direction: str
    layer: str
    what: str = ""
    recorded: bool = False
    missed: str = ""
    owner: str = ""


# The runs


class Diverged(Exception):
    """A loss or a gradient is not finite."""


class Run:
    """A training run of a model whose batches are drawn anew in each step.

    Attributes:
        step: one training step of a batch; recorded or eager.
        repeat: its forward and backward pass.
        steps: number of finished steps.
        between: functions that are called after each step.
    """

    def __init__(self, build: Callable[[], tuple[Any, Callable[[], tuple[Any, ...]]]], recorded: bool) -> None:
        torch.manual_seed(0)
        model, self.batch = build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        self.model, self.optimizer, self.steps = model, optimizer, 0
        self.between: list[Callable[[], None]] = []

        def repeat(*batch):
            loss = model.loss(*batch)
            loss.backward()
            return loss.detach()

        def step(*batch):
            loss = repeat(*batch)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        def checked(*batch):
            loss = repeat(*batch)
            gradients = [x.grad for x in model.parameters() if x.grad is not None]
            if not all(bool(torch.isfinite(x).all()) for x in (loss, *gradients)):
                raise Diverged
            optimizer.step()
            optimizer.zero_grad()

        self.repeat, self.step = repeat, tk.graphed(step, optimizer) if recorded else checked

    def parameter(self, path: str) -> torch.Tensor:
        return self.model.get_parameter(path)

    def is_due(self) -> bool:
        return self.steps >= ONSET

    def take(self) -> None:
        """One step, and what happens after it."""
        self.last = self.batch()
        self.step(*self.last)
        self.steps += 1
        for function in self.between:
            function()


def gpt():
    """Post-norm, ReLU, sinusoidal positions, dropout; the head's loss is a linear layer and its loss."""
    model = tk.build("char_gpt", layers=2, width=32, heads=2)

    def batch():
        tokens = torch.randint(65, (8, 33))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    return model, batch


def llama():
    """RMSNorm before the branches, rotary positions, two queries for each key, SwiGLU."""
    sizes = {"vocab_size": 50, "context": 32, "width": 32, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_width": 48}
    model = tk.build("llama", **sizes)

    def batch():
        tokens = torch.randint(50, (4, 33))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    return model, batch


def bert():
    """Padded sequences, GELU, learned positions, a classifier."""
    model = tk.build("imdb_bert", vocab_size=50, context=24, width=32, layers=2, heads=2)

    def batch():
        lengths = torch.randint(8, 24, (8, 1))
        return torch.randint(2, (8,)), torch.randint(50, (8, 24)), torch.arange(24) < lengths

    return model, batch


RUNS = {"gpt": gpt, "llama": llama, "bert": bert}


# The table


def _out(name, run, op, layer, change, nth=None, recorded=False, what="", direction="forward"):
    return Fault(name, run, kernel(op, "forward", change, nth), op, direction, layer, what, recorded)


def _gradient(name, run, op, layer, change, nth=None, recorded=False, what="gradient"):
    return Fault(name, run, kernel(op, "backward", change, nth), op, "backward", layer, what, recorded)


def _flipped(name, run, plant, op, layer, what, recorded=False, missed="", owner=""):
    direction = "step" if op == "AdamW" else "backward"
    return Fault(name, run, plant, op, direction, layer, what, recorded, missed, owner)


def _non_finite(name, run, plant, op, layer, direction="forward"):
    return Fault(name, run, plant, op, direction, layer)


BLOCK = "blocks.1"
ATTENTION, UP, DOWN = f"{BLOCK}.attention", f"{BLOCK}.feed_forward", f"{BLOCK}.feed_forward.down"
BOTH = "forward or backward"
# fmt: off
FAULTS = [
    # Outputs
    _out("dropout's scale is missing", "gpt", "packed_attention", ATTENTION, altered(scaled(0.9)), 1, True),
    _out("no causal mask", "gpt", "packed_attention", ATTENTION, scores(right=NO_LIMIT), 1, True),
    _out("causal mask off by one", "gpt", "packed_attention", ATTENTION, scores(right=1), 1),
    _out("scale of other heads", "gpt", "packed_attention", ATTENTION, scores(scale=0.26), 1, True),
    _out("a head is not written", "gpt", "packed_attention", ATTENTION, altered(lambda x: x[..., -16:].zero_()), 1),
    _out("a query is not written", "gpt", "packed_attention", "blocks.0.attention",
         altered(lambda x: x[-1, -1].zero_()), 0),
    _out("no padding mask", "bert", "packed_attention", ATTENTION, scores(key_padding_mask=None), 1),
    _out("padding mask off by one", "bert", "packed_attention", ATTENTION,
         scores(key_padding_mask=lambda given: given.key_padding_mask.roll(1, 1)), 1, True),
    _out("angles of other columns", "llama", "packed_attention", ATTENTION, called(cos=lambda call: call.cos.flip(-1)),
         1),
    _out("rotated the other way", "llama", "packed_attention", ATTENTION, called(sin=lambda call: -call.sin), 1, True),
    _out("heads of keys exchanged", "llama", "packed_attention", ATTENTION,
         called(qkv=lambda call: call.qkv[:, :, [0, 1, 2, 3, 5, 4, 6, 7]]), 1),
    _out("bias off by one", "gpt", "linear", UP, called(bias=lambda call: call.bias.roll(1)), 6, True,
         direction=BOTH),
    _out("last column is not written", "gpt", "linear", f"{ATTENTION}.qkv", altered(lambda x: x[..., -1].zero_()), 4),
    _out("last row is the one before it", "gpt", "linear", DOWN, altered(repeated_row), 7, True),
    _out("last input is not added", "gpt", "linear", f"{ATTENTION}.out",
         called(x=lambda call: torch.cat([call.x[..., :-1], torch.zeros_like(call.x[..., :1])], -1)), 5),
    _out("tanh in place of erf", "bert", "linear", UP, called(activation="gelu_tanh"), 6, True, direction=BOTH),
    _out("eps of another model", "gpt", "add_layer_norm", BLOCK, called(eps=1e-3), 2, True),
    _out("variance of N - 1", "gpt", "add_layer_norm", BLOCK, altered(scaled((31 / 32) ** 0.5)), 3),
    _out("a row without its residual", "gpt", "add_layer_norm", BLOCK,
         called(residual=lambda call: without_last_row(call.residual)), 2),
    _out("no scale of dropout in a sum", "gpt", "add_layer_norm", BLOCK, called(x=lambda call: call.x * 0.9), 3, True),
    _out("a column without its weight", "llama", "add_rms_norm", BLOCK, altered(lambda x: x[..., -1].mul_(1.01)), 1,
         True),
    _out("a token's row is another's", "gpt", "embedding", "embedding",
         called(tokens=lambda call: call.tokens.clamp(1)), 0),
    _out("positions of a table off by one", "gpt", "embedding", "embedding",
         called(positions=lambda call: call.positions.roll(1, 0)), 0, True),
    _out("mean over one row more", "gpt", "cross_entropy", "", altered(scaled(256 / 257)), None, True),
    _out("smoothed labels", "bert", "cross_entropy", "", called(label_smoothing=0.1), None),
    _out("gate and up exchanged", "llama", "swiglu", UP,
         called(x=lambda call: torch.cat(call.x.chunk(2, -1)[::-1], -1)), 1),
    _out("logarithm of the sum of a row", "gpt", "packed_attention", ATTENTION, kept("statistics"), 1, True,
         direction=BOTH),
    _out("rstd of a row", "llama", "add_rms_norm", BLOCK, kept("rstd"), 2, direction=BOTH),
    # Gradients
    _gradient("dx scaled by 1.0005", "gpt", "linear", UP, altered(scaled(1.0005)), 6, True, "gradient of x"),
    _gradient("a sum over rows lacks one", "gpt", "linear", DOWN, summed_without_last_row(1), 7, False,
              "gradient of weight"),
    _gradient("dbias is zero", "gpt", "linear", UP, altered(torch.Tensor.zero_, 2), 6, True, "gradient of bias"),
    _gradient("dx by the transposed weight", "gpt", "linear", f"{ATTENTION}.out", untransposed, 5),
    _gradient("dweight transposed", "gpt", "linear", f"{ATTENTION}.out", altered(lambda x: x.copy_(x.t().clone()), 1),
              5, True),
    _gradient("dq and dk exchanged", "gpt", "packed_attention", ATTENTION,
              altered(swapped(slice(0, 2), slice(2, 4), 2)), 1, True),
    _gradient("no dropout in backward", "gpt", "packed_attention", ATTENTION, called(seed=None, dropout_p=0.0), 1),
    _gradient("mask off by one in backward", "gpt", "packed_attention", ATTENTION, scores(right=1), 1, True),
    _gradient("dk scaled by 1.01", "gpt", "packed_attention", "blocks.0.attention",
              altered(lambda x: x[:, :, 2:4].mul_(1.01)), 0),
    _gradient("dk of one query of two", "llama", "packed_attention", ATTENTION,
              altered(lambda x: x[:, :, 4:6].mul_(0.5)), 1),
    _gradient("dq and dk not rotated back", "llama", "packed_attention", ATTENTION, called(sin=lambda call: -call.sin),
              1, True),
    _gradient("dx scaled by 0.999", "gpt", "add_layer_norm", BLOCK, altered(scaled(0.999)), 2, True),
    _gradient("dx without the mean", "gpt", "add_layer_norm", BLOCK,
              altered(lambda x: x.add_(x.abs().mean(-1, keepdim=True) * 0.1)), 3),
    _gradient("dweight of the step before", "gpt", "add_layer_norm", BLOCK, stale(2), 3, False, "gradient of weight"),
    _gradient("the stream's gradient is left out", "llama", "add_rms_norm", BLOCK, without(1), 1, True),
    _gradient("dweight is transposed in rows", "llama", "rms_norm", "blocks.0.attention_norm",
              altered(lambda x: x.copy_(x.flip(0)), 2), 0),
    _gradient("repeated tokens count once", "gpt", "embedding", "embedding", once_per_token, 0),
    _gradient("no scale of the table", "gpt", "embedding", "embedding", called(scale=1.0), 0, True),
    _gradient("mean over one row more, backward", "gpt", "cross_entropy", "", altered(scaled(256 / 257)), None, True),
    _gradient("a row lacks its target", "bert", "cross_entropy", "", altered(lambda x: x[-1].add_(0.1)), None),
    _gradient("dgate and dup exchanged", "llama", "swiglu", UP, altered(swapped(slice(0, 48), slice(48, 96), -1)), 1,
              True),
    # Bits in memory: saved activations and weights within a step, weights and moments between steps
    _flipped("norm's weight, bit 0", "gpt", after_forward(weight(f"{BLOCK}.attention_norm.weight", 0)),
             "add_layer_norm", BLOCK, "weight changed", owner=f"{BLOCK}.attention_norm"),
    _flipped("layer's weight, bit 22", "gpt", after_forward(weight(f"{UP}.up.weight", 22)), "linear", UP,
             "weight changed", True, owner=f"{UP}.up"),
    _flipped("packed weight, bit 30", "gpt", after_forward(weight(f"{ATTENTION}.qkv.weight", 30)), "linear",
             f"{ATTENTION}.qkv", "weight changed", owner=f"{ATTENTION}.qkv"),
    _flipped("RMSNorm's weight, bit 12", "llama", after_forward(weight(f"{BLOCK}.feed_forward_norm.weight", 12)),
             "add_rms_norm", BLOCK, "weight changed", True, owner=f"{BLOCK}.feed_forward_norm"),
    _flipped("saved queries and keys, bit 20", "gpt", activation("packed_attention", 1, lambda call, _: call.qkv, 20),
             "packed_attention", ATTENTION, "qkv changed in memory after forward", True),
    _flipped("saved input of a layer, bit 3", "gpt", activation("linear", 7, lambda call, _: call.x, 3), "linear",
             DOWN, "x changed in memory after forward"),
    _flipped("saved sum of a norm, bit 22", "llama",
             activation("add_rms_norm", 2, lambda _, result: result.summed, 22), "add_rms_norm", BLOCK, ""),
    _flipped("saved gate, bit 22", "llama", activation("swiglu", 1, lambda call, _: call.x, 22), "swiglu", UP,
             "x changed in memory after forward", True),
    _flipped("table, bit 0", "gpt", between_steps(weight("embedding.tokens.weight", 0)), "AdamW", "embedding.tokens",
             "weight changed"),
    _flipped("layer's weight between steps, bit 22", "gpt", between_steps(weight(f"{UP}.up.weight", 22)), "AdamW",
             f"{UP}.up", "weight changed", True),
    _flipped("head's bias, bit 12", "gpt", between_steps(weight("head_bias", 12)), "AdamW", "", "head_bias changed",
             True),
    _flipped("two bits of a weight", "llama", between_steps(weight(f"{ATTENTION}.out.weight", 22, 3)), "AdamW",
             f"{ATTENTION}.out", "weight changed"),
    _flipped("weight of PyTorch's layer", "bert", after_forward(weight("classifier.weight", 20)), "AdamW",
             "classifier", "weight changed"),
    _flipped("first moment, bit 22", "gpt", between_steps(state(f"{UP}.up.weight", "exp_avg", 22)), "AdamW",
             f"{UP}.up", "exp_avg of weight", True),
    _flipped("second moment, bit 10", "bert", between_steps(state("embedding.positions", "exp_avg_sq", 10)), "AdamW",
             "embedding", "exp_avg_sq of positions"),
    _flipped("count of steps, bit 20", "gpt", between_steps(state(f"{UP}.up.weight", "step", 20)), "AdamW", f"{UP}.up",
             "step of weight"),
    _flipped("gradient before the optimizer, bit 20", "gpt", gradient(f"{UP}.up.weight", 20), "linear", UP,
             "gradient of weight changed"),
    _flipped("input of PyTorch's layer, bit 20", "bert", input_of("classifier", 20), "linear", "classifier",
             "x changed", missed="what PyTorch's own operators keep for backward is not compared"),
    _flipped("three bits of a weight", "gpt", between_steps(weight(f"{UP}.up.weight", 22, 12, 3)), "AdamW", f"{UP}.up",
             "weight changed", missed="programs write to single elements through weight.data, which no version counts"),
    # Values that are not finite, by PyTorch's operators and by kernels
    _non_finite("logarithm of 0", "gpt", module(UP, lambda x: (x - x).log()), "aten::log", UP),
    _non_finite("exponential overflows", "gpt", module(ATTENTION, lambda x: (x * 1e6).exp()), "aten::exp", ATTENTION),
    _non_finite("quotient of a zero", "llama", module(UP, lambda x: without_row(x, 0.0)), "aten::div", UP),
    _non_finite("every key is masked", "bert", module(UP, masked), "softmax", UP),
    _non_finite("difference of infinities", "gpt", module(UP, lambda x: (x * 1e38 * 1e38) * 0.0), "aten::mul", UP),
    _non_finite("half precision overflows", "llama", module(DOWN, lambda x: ((x + 1.0).half() * 1e3 * 1e3).float()),
                "aten::mul", DOWN),
    _non_finite("root of 0, backward", "gpt", module(UP, lambda x: x + (x - x.detach()).abs().sqrt()), "aten::", UP,
                "backward"),
    _non_finite("norm of 0, backward", "llama",
                module(UP, lambda x: x + (x - x.detach()).square().sum(-1, keepdim=True).sqrt()), "aten::", UP,
                "backward"),
    _non_finite("NaN in a compiled block", "bert", compiled(UP, lambda x: (x - x).log()), "aten::log", UP),
    _non_finite("scores overflow", "bert", module(f"{ATTENTION}.qkv", lambda x: x * 1e30), "packed_attention",
                ATTENTION),
    _non_finite("a weight is NaN", "gpt", poisoned(f"{ATTENTION}.out.weight", math.nan), "linear", f"{ATTENTION}.out"),
    _out("a kernel writes NaN", "gpt", "linear", DOWN, altered(lambda x: x[2, 3].fill_(math.nan)), 7),
    _gradient("a kernel's gradient overflows", "bert", "packed_attention", ATTENTION,
              altered(lambda x: x[2, 3].fill_(math.inf)), 1),
    # Stale recordings
    Fault("attention is skipped", "gpt", left_out("packed_attention", "forward", 1), "packed_attention", BOTH,
          ATTENTION, recorded=True),
    Fault("a layer's gradients are skipped", "gpt", left_out("linear", "backward", 6), "linear", "backward", UP,
          recorded=True),
    Fault("a norm is skipped", "llama", left_out("add_rms_norm", "forward", 1), "add_rms_norm", BOTH, BLOCK,
          recorded=True),
    Fault("the embedding is skipped", "bert", left_out("embedding", "forward", 0), "embedding", BOTH, "embedding",
          recorded=True),
    Fault("tokens are not copied", "gpt", stale_argument(0), "graphed", "step", "", "argument 0", recorded=True),
    Fault("targets are not copied", "llama", stale_argument(1), "graphed", "step", "", "argument 1", recorded=True),
    Fault("a seed is not drawn", "gpt", stale_seed(4), "packed_attention", "forward", ATTENTION, "seed",
          recorded=True),
    Fault("a learning rate is that of the capture", "gpt", stale_rate, "AdamW", "step", "", recorded=True,
          missed="the arithmetic of optimizers is not checked"),
    # An operator of PyTorch
    Fault("PyTorch's layer is scaled", "bert", module("classifier", lambda x: x * 1.01), "linear", "forward",
          "classifier", missed="calls of PyTorch's own functions are not checked"),
]
# fmt: on


# The search

STEP, CHECK, COPY = 0.06, 0.015, 5e-5
"""Seconds of a clock that makes samples repeatable: a step of `char_gpt`, a check, a comparison of memory."""


@dataclass
class Outcome:
    """Whether a fault was found and located, in how many steps, and the certificate."""

    found: bool
    located: bool
    steps: int
    certificate: Any


def search(fault: Fault, share: float = 1.0, steps: int = ONSET + 3) -> Outcome:
    """Plant a fault and train until the certificate finds one; with a share below 1.0 by a clock of its own."""
    with contextlib.ExitStack() as stack:
        monkeypatch = stack.enter_context(pytest.MonkeyPatch.context())
        now = clocked(monkeypatch) if share < 1.0 else [0.0]
        stack.enter_context(tk.use_backend("cpu"))
        run = Run(RUNS[fault.run], fault.recorded)
        fault.plant(run, monkeypatch)
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        certificate = stack.enter_context(tk.certify(f"{folder}/certificate.json", share=share))
        certificate.name(run.model)
        with contextlib.suppress(Diverged):
            while run.steps < steps and not certificate.findings:
                run.take()
                now[0] += STEP
            return Outcome(bool(certificate.findings), is_located(fault, certificate), run.steps, certificate)
        certificate.find_non_finite(lambda: run.repeat(*run.last))
        return Outcome(certificate.non_finite is not None, is_located(fault, certificate), run.steps, certificate)


def clocked(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that checks and comparisons of memory advance; steps add to it."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def timed(owner: Any, name: str, seconds: float) -> None:
        function = getattr(owner, name)

        def slow(*arguments):
            now[0] += seconds
            return function(*arguments)

        monkeypatch.setattr(owner, name, slow)

    timed(certificates, "check", CHECK)
    timed(memory, "changed_bits", COPY)
    return now


def is_located(fault: Fault, certificate: Any) -> bool:
    """Whether the first finding, or else the first value that is not finite, is the planted one."""
    if certificate.findings:
        first = certificate.findings[0]
        if fault.owner and (first.operation, first.layer) == ("AdamW", fault.owner):
            return fault.what in first.what
        operation, what = first.operation == fault.operation, first.what
    elif (first := certificate.non_finite) is not None:
        operation, what = fault.operation in first.operator, ""
    else:
        return False
    return operation and first.direction in fault.direction and first.layer == fault.layer and fault.what in what
