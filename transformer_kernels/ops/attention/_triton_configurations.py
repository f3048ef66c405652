"""Every compilation that the tables of Triton attention can lead to, for the ahead-of-time report."""

from __future__ import annotations

from typing import Any

import torch

from transformer_kernels.backends import triton as _triton
from transformer_kernels.backends.triton import Configuration
from transformer_kernels.ops.attention import _triton_config as config
from transformer_kernels.ops.attention._triton_backward import attention_backward_query_kernel
from transformer_kernels.ops.attention._triton_backward_bias import attention_backward_bias_kernel
from transformer_kernels.ops.attention._triton_backward_key import attention_backward_key_kernel
from transformer_kernels.ops.attention._triton_config import Tile
from transformer_kernels.ops.attention._triton_decode import attention_decode_kernel
from transformer_kernels.ops.attention._triton_forward import attention_forward_kernel
from transformer_kernels.ops.attention._triton_short import (
    attention_short_backward_kernel,
    attention_short_forward_kernel,
)

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"CAUSAL": True},
    "causal padded": {"CAUSAL": True, "PADDING": True},
}
HEAVY_VARIANTS: dict[str, dict[str, Any]] = {
    "biased": {"BIAS": "full"},
    "causal padded windowed": {"CAUSAL": True, "PADDING": True, "WINDOW": True},
    "causal padded dropout": {"CAUSAL": True, "PADDING": True, "DROPOUT": True},
}
PACKED_VARIANTS: dict[str, dict[str, Any]] = {
    "sequences": {"SEQUENCES": True},
    "sequences causal dropout": {"SEQUENCES": True, "CAUSAL": True, "DROPOUT": True},
}
KERNELS = {
    "forward": attention_forward_kernel,
    "query": attention_backward_query_kernel,
    "key": attention_backward_key_kernel,
    "bias": attention_backward_bias_kernel,
    "decode": attention_decode_kernel,
}


def configurations() -> list[Configuration]:
    """Every row of the tables for aligned tensors: bf16 in the variants that differ most, fp16 and fp32 in one."""
    listed = []
    for name, table in config.TABLES.items():
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            precisions = ("ieee", "tf32") if dtype is torch.float32 else ("tf32",)
            for capability, itemsize in table.rows:
                if itemsize != dtype.itemsize:
                    continue
                for width, tile in table.rows[capability, itemsize]:
                    variants = _variants(name, width)
                    if dtype is not torch.bfloat16:
                        variants = dict([list(variants.items())[-1]])
                    for label, constants in variants.items():
                        for precision in precisions:
                            if name.startswith("bias") and "BIAS" not in constants:
                                constants = {**constants, "BIAS": "full"}
                            chosen = {**constants, "PRECISION": precision}
                            listed.append(_configuration(name, label, dtype, capability, width, tile, chosen))
    return listed


def _variants(table: str, width: int | None) -> dict[str, dict[str, Any]]:
    """What is compiled for a row of a table: the calls that it serves."""
    if table == "forward descriptors" and width not in config.DESCRIPTOR_PADDED_HEAD_DIMS:
        return {label: constants for label, constants in VARIANTS.items() if "PADDING" not in constants}
    if table.endswith("packed"):
        return PACKED_VARIANTS
    if table in ("forward heavy", "query gradient heavy", "bias gradient"):
        return HEAVY_VARIANTS | PACKED_VARIANTS
    return HEAVY_VARIANTS if table.endswith("heavy") else VARIANTS


def _configuration(
    name: str,
    label: str,
    dtype: torch.dtype,
    capability: _triton.Capability,
    width: int | None,
    tile: Tile,
    chosen: dict[str, Any],
) -> Configuration:
    """One entry of a table as `kernel_report` compiles it."""
    first, *rest = name.split()
    if first == "short":
        kernel = attention_short_forward_kernel if rest[0] == "forward" else attention_short_backward_kernel
        head_dim = int(rest[1])
        where = f"keys <= {width}"
    else:
        kernel = KERNELS[first]
        head_dim = width or config.MAXIMUM_HEAD_DIM
        where = f"D <= {width}"
    biased, dropout = chosen.get("BIAS", "none") != "none", chosen.get("DROPOUT", False)
    elements = 16 // dtype.itemsize
    constants: dict[str, Any] = {
        "GROUP": 1, "HEAD_DIM": head_dim, "BLOCK_D": head_dim, "BLOCK_M": tile.queries, "BLOCK_N": tile.keys,
        "MASKED_M": tile.masked, "MASKED_N": tile.masked, "CAUSAL": False, "WINDOW": False, "PADDING": False,
        "SEQUENCES": False, "BIAS": "none", "BIAS_ALIGNMENT": elements, "DROPOUT": False, "NEGATE": False,
        "ALIGNMENT": elements, "DESCRIPTOR": name == "forward descriptors", **chosen,
    }  # fmt: skip
    if first == "decode":
        constants["BIAS"] = biased
    absent = {
        "padding_pointer": not constants["PADDING"],
        "bias_pointer": not biased,
        "seed_pointer": not dropout,
        "dlse_pointer": True,
        "sequences_pointer": not constants["SEQUENCES"],
        "correction_pointer": dtype is not torch.float32,
    }
    constants |= {pointer: None for pointer, missing in absent.items() if missing}
    element = _triton.TYPE_NAMES[dtype]
    statistics = ("lse", "delta", "correction", "partial", "partial_max", "partial_sum")
    types = {f"{statistic}_pointer": "*fp32" for statistic in statistics}
    types |= {
        "padding_pointer": "*i1",
        "sequences_pointer": "*i32",
        "seed_pointer": "*i64",
        "scale": "fp32",
        "keep_scale": "fp32",
    }
    signature = {}
    for argument in kernel.arg_names:
        if argument in constants:
            signature[argument] = "constexpr"
        elif argument.endswith("_source") and constants["DESCRIPTOR"]:
            rows = tile.queries if argument == "q_source" else tile.keys
            signature[argument] = f"tensordesc<{element}[1, 1, {rows}, {head_dim}]>"
        elif argument.endswith(("_pointer", "_source")):
            signature[argument] = types.get(argument, f"*{element}")
        else:
            signature[argument] = types.get(argument, "i32")
    gates = {"wide_loads"} | (set() if chosen["PRECISION"] == "ieee" else {"matrix"})
    if first in ("query", "key") or name.startswith("short backward"):
        gates.add("wide_stores")
    if dtype is not torch.float32 or head_dim <= 64:  # products of fp32 hold whole rows in registers
        gates.add("no_spills")
    return Configuration(
        f"attention {name} {label} {element} {where} {chosen['PRECISION'] if element == 'fp32' else ''}".strip(),
        kernel,
        signature,
        {argument: value for argument, value in constants.items() if argument in kernel.arg_names},
        tile.num_warps,
        tile.num_stages,
        (capability,),
        frozenset(gates),
    )
