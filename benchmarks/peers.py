"""Who is timed: our backends, and what a user would take instead, each pinned by name or skipped with a reason."""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import transformer_kernels as tk
from benchmarks.workloads import Workload
from transformer_kernels import _dispatch

Function = Callable[..., Any]


class Skipped(Exception):
    """This candidate does not do this here; the text says why."""


@dataclass(frozen=True)
class Candidate:
    """A name, and what makes a function of the operation's tensors; it raises Skipped with the reason."""

    name: str
    make: Callable[[Workload, torch.device], Function]

    @property
    def ours(self) -> bool:
        return self.name.startswith("ours ")


def candidates(op: str) -> list[Candidate]:
    """Ours first, then the others."""
    listed = [Candidate(f"ours {backend}", functools.partial(_ours, backend)) for backend in tk.BACKENDS]
    listed.append(Candidate("eager", _eager))
    if op == "attention":
        listed += [Candidate(f"sdpa {name}", functools.partial(_sdpa, name)) for name in SDPA_BACKENDS]
        listed.append(Candidate("flex", _flex))
    listed.append(Candidate("compile", functools.partial(_compiled, None)))
    # The mode without CUDA graphs: the harness replays everybody's calls from a graph of its own.
    listed.append(Candidate("compile max-autotune", functools.partial(_compiled, "max-autotune-no-cudagraphs")))
    if op in ("softmax", "layer_norm", "gelu"):
        listed.append(Candidate("liger", _liger))
    if op == "softmax":
        listed.append(Candidate("quack", _quack))
    return listed


# Ours


def _ours(backend: str, workload: Workload, device: torch.device) -> Function:
    if device.type == "cpu" and backend != "torch":
        raise Skipped("its kernels run on a GPU; on a CPU they are only interpreted or emulated, for tests")
    if (reason := _dispatch.unavailable(backend, device)) is not None:
        raise Skipped(reason)
    return functools.partial(getattr(tk, workload.op), **workload.options, backend=backend)


# PyTorch


def _attention(q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None = None, causal: bool = False) -> Tensor:
    if k.shape[1] != q.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.transpose(-2, -1) * (1.0 / math.sqrt(q.shape[-1]))
    if causal:
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~visible, -math.inf)
    if key_padding_mask is not None:
        scores = scores.masked_fill(~key_padding_mask[:, None, None, :], -math.inf)
    return scores.softmax(dim=-1) @ v


def _softmax(x: Tensor) -> Tensor:
    return F.softmax(x, dim=-1)


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias)


def _add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return F.layer_norm(total, weight.shape, weight, bias), total


def _gelu(x: Tensor, approximate: str) -> Tensor:
    return F.gelu(x, approximate=approximate)


def _bias_gelu(x: Tensor, bias: Tensor, approximate: str) -> Tensor:
    return F.gelu(x + bias, approximate=approximate)


def _bias_relu(x: Tensor, bias: Tensor) -> Tensor:
    return F.relu(x + bias)


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), targets)


def _linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return _cross_entropy(F.linear(x, weight), targets)


def _embedding(tokens: Tensor, weight: Tensor, positions: Tensor, norm_weight: Tensor, norm_bias: Tensor) -> Tensor:
    return F.layer_norm(F.embedding(tokens, weight) + positions, norm_weight.shape, norm_weight, norm_bias)


EAGER: dict[str, Function] = {
    "attention": _attention,
    "softmax": _softmax,
    "layer_norm": _layer_norm,
    "add_layer_norm": _add_layer_norm,
    "gelu": _gelu,
    "bias_gelu": _bias_gelu,
    "bias_relu": _bias_relu,
    "cross_entropy": _cross_entropy,
    "linear_cross_entropy": _linear_cross_entropy,
    "embedding": _embedding,
}


def _eager(workload: Workload, device: torch.device) -> Function:
    return functools.partial(EAGER[workload.op], **workload.options)


def _compiled(mode: str | None, workload: Workload, device: torch.device) -> Function:
    if mode is not None and device.type == "cpu":
        raise Skipped("max-autotune chooses among GPU kernels; it needs a GPU")
    torch._dynamo.reset()
    torch._functorch.config.donated_buffer = False  # the backward pass is timed by running it many times
    eager = EAGER[workload.op]

    def call(**tensors: Tensor) -> Any:
        return eager(**tensors, **workload.options)

    return torch.compile(call, dynamic=False, mode=mode)


SDPA_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


def _sdpa(name: str, workload: Workload, device: torch.device) -> Function:
    if device.type == "cpu" and name in ("efficient", "cudnn"):
        raise Skipped("needs a GPU")
    grouped = workload.shape["H"] != workload.shape["Hk"]
    backend = SDPA_BACKENDS[name]

    def call(q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        mask = None if key_padding_mask is None else key_padding_mask[:, None, None, :]
        with sdpa_kernel(backend):
            try:
                return F.scaled_dot_product_attention(
                    q, k, v, attn_mask=mask, is_causal=workload.options["causal"], enable_gqa=grouped
                )
            except RuntimeError as error:
                if "No available kernel" in str(error) or "No viable backend" in str(error):
                    raise Skipped(f"this backend of SDPA does not take the call: {error}") from error
                raise

    return call


def _flex(workload: Workload, device: torch.device) -> Function:
    if device.type == "cpu":
        raise Skipped("FlexAttention is compiled for GPUs")
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()
    torch._functorch.config.donated_buffer = False
    size = workload.shape
    mask = None
    if workload.options["causal"]:
        mask = create_block_mask(
            lambda batch, head, query, key: query >= key, None, None, size["Lq"], size["L"], device=str(device)
        )
    elif workload.key_lengths:
        lengths = torch.tensor(workload.key_lengths, device=device)
        mask = create_block_mask(
            lambda batch, head, query, key: key < lengths[batch],
            size["B"],
            None,
            size["Lq"],
            size["L"],
            device=str(device),
        )
    attend = torch.compile(flex_attention, dynamic=False)

    def call(q: Tensor, k: Tensor, v: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        return attend(q, k, v, block_mask=mask, enable_gqa=size["H"] != size["Hk"])

    return call


# Other packages


def _require(package: str, device: torch.device) -> None:
    if importlib.util.find_spec(package) is None:
        raise Skipped(f"{package} is not installed")
    if device.type == "cpu":
        raise Skipped("needs a GPU")


def _liger(workload: Workload, device: torch.device) -> Function:
    _require("liger_kernel", device)
    if workload.op == "softmax":
        from liger_kernel.ops.softmax import LigerSoftmaxFunction

        return lambda x: LigerSoftmaxFunction.apply(x)
    if workload.op == "layer_norm":
        from liger_kernel.ops.layer_norm import LigerLayerNormFunction

        return lambda x, weight, bias: LigerLayerNormFunction.apply(x, weight, bias, 1e-5)
    if workload.options["approximate"] != "tanh":
        raise Skipped("Liger has the tanh approximation only")
    from liger_kernel.ops.geglu import LigerGELUMulFunction

    gate = torch.ones(workload.shape["M"], workload.shape["N"], dtype=workload.dtype, device=device)
    return lambda x: LigerGELUMulFunction.apply(x, gate)  # GEGLU, gelu(x) * 1: it reads a third tensor


def _quack(workload: Workload, device: torch.device) -> Function:
    _require("quack", device)
    from quack.softmax import softmax

    return softmax
