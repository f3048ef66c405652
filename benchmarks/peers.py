"""Candidates: this package's backends and alternatives, each selected by name or skipped with a reason."""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import transformer_kernels as tk
from benchmarks import pytorch
from benchmarks.workloads import Workload
from transformer_kernels.backends import dispatch

Function = Callable[..., Any]


class Skipped(Exception):
    """This candidate does not support the workload here; the message states the reason."""


@dataclass(frozen=True)
class Candidate:
    """A name, and a function that builds the call from the operation's tensors; it raises Skipped with the reason."""

    name: str
    make: Callable[[Workload, torch.device], Function]

    @property
    def ours(self) -> bool:
        return self.name.startswith("ours ")


def candidates(op: str) -> list[Candidate]:
    """This package's backends first, then the others."""
    listed = [Candidate(f"ours {backend}", functools.partial(_ours, backend)) for backend in tk.BACKENDS]
    listed.append(Candidate("eager", _eager))
    if op == "attention":
        listed += [Candidate(f"sdpa {name}", functools.partial(_sdpa, name)) for name in SDPA_BACKENDS]
        listed.append(Candidate("flex", _flex))
    listed.append(Candidate("compile", functools.partial(_compiled, None)))
    # The mode without CUDA graphs: the harness captures a graph of every candidate's calls.
    listed.append(Candidate("compile max-autotune", functools.partial(_compiled, "max-autotune-no-cudagraphs")))
    if op in ("softmax", "layer_norm", "gelu"):
        listed.append(Candidate("liger", _liger))
    if op == "softmax":
        listed.append(Candidate("quack", _quack))
    return listed


def require(backend: str, device: torch.device) -> None:
    """Raise Skipped if one of our backends is unavailable, or runs only for tests."""
    if device.type == "cpu" and backend in ("triton", "cuda"):
        raise Skipped("its kernels require a GPU; on a CPU they are interpreted or emulated, for tests only")
    if (reason := dispatch.unavailable(backend, device)) is not None:
        raise Skipped(reason)


def _ours(backend: str, workload: Workload, device: torch.device) -> Function:
    require(backend, device)
    return functools.partial(getattr(tk, workload.op), **workload.options, backend=backend)


def reference_attention(
    q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None = None, causal: bool = False
) -> Tensor:
    """softmax(q k^T / sqrt(D)) v with the scores in memory."""
    if k.shape[1] != q.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.transpose(-2, -1) * (1.0 / math.sqrt(q.shape[-1]))
    if causal:
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~visible, -math.inf)
    if key_padding_mask is not None:
        scores = scores.masked_fill(~key_padding_mask[:, None, None, :], -math.inf)
    return scores.softmax(dim=-1) @ v


def _eager(workload: Workload, device: torch.device) -> Function:
    if workload.op == "attention" and not workload.options.keys() <= {"causal"}:
        raise Skipped("the reference attention has neither dropout nor a window here")
    function = reference_attention if workload.op == "attention" else getattr(pytorch, workload.op)
    return functools.partial(function, **workload.options)


def _compiled(mode: str | None, workload: Workload, device: torch.device) -> Function:
    if mode is not None and device.type == "cpu":
        raise Skipped("max-autotune selects among GPU kernels; requires a GPU")
    torch._dynamo.reset()
    torch._functorch.config.donated_buffer = False  # timing repeats the backward pass
    return torch.compile(_eager(workload, device), dynamic=False, mode=mode)


SDPA_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


def _sdpa(name: str, workload: Workload, device: torch.device) -> Function:
    if device.type == "cpu" and name in ("efficient", "cudnn"):
        raise Skipped("requires a GPU")

    def call(**tensors: Tensor) -> Tensor:
        with sdpa_kernel(SDPA_BACKENDS[name]):
            try:
                return pytorch.attention(**tensors, **workload.options)
            except RuntimeError as error:
                if "No available kernel" in str(error) or "No viable backend" in str(error):
                    raise Skipped(f"this SDPA backend does not support the call: {error}") from error
                raise

    return call


def _flex(workload: Workload, device: torch.device) -> Function:
    if device.type == "cpu":
        raise Skipped("FlexAttention is compiled for GPUs")
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()
    torch._functorch.config.donated_buffer = False
    size, block_mask = workload.shape, None
    make = functools.partial(create_block_mask, B=None, H=None, Q_LEN=size["Lq"], KV_LEN=size["L"], device=str(device))
    if workload.options["causal"]:
        block_mask = make(lambda batch, head, query, key: query >= key)
    elif workload.key_lengths:
        lengths = torch.tensor(workload.key_lengths, device=device)
        block_mask = make(lambda batch, head, query, key: key < lengths[batch], B=size["B"])
    attend = torch.compile(flex_attention, dynamic=False)

    def call(q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        return attend(q, k, v, block_mask=block_mask, enable_gqa=size["H"] != size["Hk"])

    return call


def _require(package: str, device: torch.device) -> None:
    if importlib.util.find_spec(package) is None:
        raise Skipped(f"{package} is not installed")
    if device.type == "cpu":
        raise Skipped("requires a GPU")


def _liger(workload: Workload, device: torch.device) -> Function:
    _require("liger_kernel", device)
    if workload.op == "softmax":
        from liger_kernel.ops.softmax import LigerSoftmaxFunction

        return lambda x: LigerSoftmaxFunction.apply(x)
    if workload.op == "layer_norm":
        from liger_kernel.ops.layer_norm import LigerLayerNormFunction

        return lambda x, weight, bias: LigerLayerNormFunction.apply(x, weight, bias, 1e-5)
    if workload.options["approximate"] != "tanh":
        raise Skipped("Liger supports only the tanh approximation")
    from liger_kernel.ops.geglu import LigerGELUMulFunction

    gate = torch.ones(workload.shape["M"], workload.shape["N"], dtype=workload.dtype, device=device)
    return lambda x: LigerGELUMulFunction.apply(x, gate)  # GEGLU, gelu(x) * 1: it reads a third tensor


def _quack(workload: Workload, device: torch.device) -> Function:
    _require("quack", device)
    from quack.softmax import softmax

    return softmax
