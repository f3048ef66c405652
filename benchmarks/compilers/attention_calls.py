"""The attention calls whose launches the report compiles: each row of the tile tables, in the main variants.

bf16 for all variants, fp16 and fp32 for the last variant of each body.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from transformer_kernels.ops.attention import AttentionCall, prepare
from transformer_kernels.ops.attention import _triton as attention
from transformer_kernels.ops.attention._common import Angles

BIASED, WINDOWED, DROPPED = {"attn_bias": True}, {"window": 100}, {"dropout_p": 0.1}
CAUSAL, PADDED, PACKED = {"causal": True}, {"key_padding_mask": True}, {"cu_seqlens": True}

BODIES: dict[str, dict[str, dict[str, Any]]] = {
    "light": {"plain": {}, "causal": CAUSAL, "causal padded": CAUSAL | PADDED},
    "heavy": {
        "biased": BIASED,
        "causal padded windowed": CAUSAL | PADDED | WINDOWED,
        "causal padded dropout": CAUSAL | PADDED | DROPPED,
    },
    "packed": {"sequences": PACKED, "sequences causal dropout": PACKED | CAUSAL | DROPPED},
}
LENGTHS = {"any length": (1024, 1024), "64 keys": (64, 64), "128 keys": (128, 128), "decode": (4, 1024)}
HEAD_DIMS = (32, 64, 128, 256)
CAPPED, CAPPED_HEAD_DIMS = CAUSAL | BIASED | {"softcap": 50.0}, (128, 256)
"""Gemma 2's softcap, with a bias: covers each kernel for any length; last in order."""

ROTARY: dict[str, dict[str, Any]] = {
    "causal rotary": CAUSAL,
    "causal rotary interleaved": CAUSAL,
    "causal padded dropout rotary": CAUSAL | PADDED | DROPPED,
    "sequences causal rotary": PACKED | CAUSAL,
}
ROTATED_LENGTHS = ("any length", "64 keys", "128 keys")
"""Calls of packed_attention with rotary positions, after all others."""


def calls(operation: str = "attention") -> Iterator[tuple[str, Callable[[], object]]]:
    """Labels, and forward and backward passes on CPU tensors, for `launches.record`."""
    for dtype, precision in (
        (torch.bfloat16, "highest"), (torch.float16, "highest"), (torch.float32, "highest"), (torch.float32, "high"),
    ):  # fmt: skip
        name = f"{dtype}".removeprefix("torch.") + (" tf32" if precision == "high" else "")
        for where, lengths in LENGTHS.items():
            for body, variants in BODIES.items():
                if body == "packed" and where != "any length":
                    continue
                chosen = list(variants.items()) if dtype is torch.bfloat16 else list(variants.items())[-1:]
                for head_dim in HEAD_DIMS if "keys" not in where else HEAD_DIMS[:2]:
                    for variant, arguments in chosen:
                        label = f"attention {where} {variant} {name} D {head_dim}"
                        yield label, functools.partial(_run, dtype, precision, lengths, head_dim, where, arguments)
    for head_dim in HEAD_DIMS[:2]:
        call = functools.partial(_run, torch.bfloat16, "highest", (2048, 2048), head_dim, "many keys", CAUSAL)
        yield f"attention many keys causal bfloat16 D {head_dim}", call
    for head_dim in CAPPED_HEAD_DIMS:
        call = functools.partial(_run, torch.bfloat16, "highest", (1024, 1024), head_dim, "any length", CAPPED)
        yield f"attention any length causal biased softcap bfloat16 D {head_dim}", call
    for where, (variant, arguments) in itertools.product(ROTATED_LENGTHS, ROTARY.items()):
        if "any" in where or "sequences" not in variant:
            interleaved = "interleaved" in variant
            call = functools.partial(_run, torch.bfloat16, "highest", LENGTHS[where], 64, where, arguments, interleaved)
            yield f"attention {where} {variant} bfloat16 D 64", call


def gates(launch: Any) -> frozenset[str]:
    """The gates of a launch."""
    if launch.kernel_name in ("attention_sequences_kernel", "attention_combine_kernel"):
        return frozenset({"no_spills"})
    options = launch.constant("OPTIONS")
    found = {"wide_loads"} | (set() if options.PRECISION == "ieee" else {"matrix"})
    if "backward" in launch.kernel_name and "bias" not in launch.kernel_name:
        found.add("wide_stores")
    if not options.NATURAL or options.BLOCK_D <= 64:
        found.add("no_spills")  # fp32 products need whole rows in registers
    return frozenset(found)


def _run(
    dtype: torch.dtype,
    precision: str,
    lengths: tuple[int, int],
    head_dim: int,
    where: str,
    arguments: dict[str, Any],
    interleaved: bool | None = None,
) -> None:
    """Forward and, except for decoding, backward of one call, with the gradient of a full bias."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        call = _call(dtype, lengths, head_dim, **arguments)
        table = torch.empty(1, lengths[0], head_dim // 2)
        angles = None if interleaved is None else Angles(table, table, interleaved)
        result = attention.Kernels(call).forward(call, angles)
        if where != "decode":
            attention.Kernels(call).backward(
                call, result, (result.out, None), (True, True, True, call.scores.bias is not None), None, angles
            )
    finally:
        torch.set_float32_matmul_precision(before)


def _call(
    dtype: torch.dtype,
    lengths: tuple[int, int],
    head_dim: int,
    *,
    attn_bias: bool = False,
    key_padding_mask: bool = False,
    cu_seqlens: bool = False,
    causal: bool = False,
    window: int | None = None,
    dropout_p: float = 0.0,
    softcap: float | None = None,
) -> AttentionCall:
    queries, keys = lengths
    q = torch.empty(1, queries, 2, head_dim, dtype=dtype).transpose(1, 2)
    k, v = (torch.empty(1, keys, 2, head_dim, dtype=dtype).transpose(1, 2) for _ in range(2))
    return prepare(
        q,
        k,
        v,
        key_padding_mask=torch.ones(1, keys, dtype=torch.bool) if key_padding_mask else None,
        attn_bias=torch.empty(1, 2, queries, keys, dtype=dtype) if attn_bias else None,
        cu_seqlens=torch.tensor([0, keys], dtype=torch.int32) if cu_seqlens else None,
        causal=causal,
        window=window,
        dropout_p=dropout_p,
        scale=0.125,
        softcap=softcap,
    )
