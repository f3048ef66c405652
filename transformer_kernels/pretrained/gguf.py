"""Llama models in GGUF files, by the package `gguf`."""

from __future__ import annotations

import itertools
import math
import re
import reprlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from transformer_kernels.pretrained.folder import Stored, check_regular

try:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFValueType, dequantize
except ImportError as error:
    raise ImportError("GGUF files need the package gguf: pip install 'transformer_kernels[gguf]'") from error

MAX_KEYS = 1 << 12
MAX_TENSORS = 1 << 16
MAX_STRINGS = 1 << 20  # of all arrays; the largest vocabularies have 800,000 tokens and merges
MAX_DIMENSIONS = 4
OF_THE_READER = ("GGUF.version", "GGUF.tensor_count", "GGUF.kv_count")

SIZES = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
}
NUMBERS = {"attention.layer_norm_rms_epsilon": "rms_norm_eps", "rope.freq_base": "rope_theta"}
WITHOUT_EFFECT: dict[str, Any] = {  # options of other models, with the value that leaves a Llama as it is
    "attention.causal": True,
    "attention.clamp_kqv": 0.0,
    "attention.max_alibi_bias": 0.0,
    "embedding_scale": 1.0,
    "expert_count": 0,
    "expert_used_count": 0,
    "logit_scale": 1.0,
    "residual_scale": 1.0,
    "rope.scale_linear": 1.0,
    "rope.scaling.type": "none",
    "tensor_data_layout": "Meta AI original pth",
    "use_parallel_residual": False,
}
DESCRIPTIVE = ("general.", "tokenizer.", "quantize.imatrix.")  # the tokenizer's options concern `load_tokenizer`

NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class Reader(GGUFReader):
    """The package's reader with every declared count, length and region checked before it is used."""

    def __init__(self, path: Path) -> None:
        check_regular(path)
        self.path, self._strings = path, 0
        try:
            super().__init__(path)
            if self.byte_order != "I":
                raise ValueError("its numbers are big-endian")
            values = {name: field.contents() for name, field in self.fields.items() if name not in OF_THE_READER}
        except (ValueError, KeyError, IndexError, TypeError, OverflowError) as error:
            reason = error.args[0] if isinstance(error, KeyError) else error
            raise ValueError(f"{path}: not a GGUF file that can be read: {reason}") from error
        self.metadata: dict[str, Any] = values

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> np.ndarray:
        end = offset + int(count) * np.dtype(dtype).itemsize
        if end > len(self.data):
            raise ValueError(f"truncated: it has {len(self.data)} bytes; its header needs {end}")
        return np.asarray(super()._get(offset, dtype, count, override_order))  # a view of a memmap holds a dictionary

    def _build_fields(self, offs: int, count: int) -> int:
        if count > MAX_KEYS:
            raise ValueError(f"{count} metadata keys; at most {MAX_KEYS} are read")
        return super()._build_fields(offs, count)

    def _build_tensor_info(self, offs: int, count: int) -> tuple[int, list[Any]]:
        if count > MAX_TENSORS:
            raise ValueError(f"{count} tensors; at most {MAX_TENSORS} are read")
        return super()._build_tensor_info(offs, count)

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[Any]]:
        """The package's own, but numbers of an array are one part, and its strings one part each."""
        if raw_type != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        element = GGUFValueType(int(self._get(orig_offs, np.uint32)[0]))
        count, start = int(self._get(orig_offs + 4, np.uint64)[0]), orig_offs + 12
        if element in self.gguf_scalar_to_np:
            parts = [self._get(start, self.gguf_scalar_to_np[element], count)]
            end = start + parts[0].nbytes
        elif element == GGUFValueType.STRING:
            self._strings += count
            if self._strings > MAX_STRINGS:
                raise ValueError(f"{self._strings} strings in arrays; at most {MAX_STRINGS} are read")
            parts, end = [], start
            for _ in range(count):
                parts.append(self._get_str(end)[1])
                end += 8 + len(parts[-1])
        else:
            raise ValueError("an array of arrays")
        return end - orig_offs, parts, list(range(len(parts))), [GGUFValueType.ARRAY, element]

    def _build_tensors(self, start_offs: int, fields: list[Any]) -> None:
        """The package's own, which wraps where sizes overflow, after a check of all shapes and regions."""
        regions = []
        for field in fields:
            sizes, number, offset = field.parts[3].tolist(), int(field.parts[4][0]), int(field.parts[5][0])
            if not 1 <= len(sizes) <= MAX_DIMENSIONS or 0 in sizes:
                raise ValueError(f"{field.name} has shape {tuple(reversed(sizes))}")
            block, length = GGML_QUANT_SIZES[GGMLQuantizationType(number)]
            if sizes[0] % block:
                raise ValueError(f"{field.name} has rows of {sizes[0]} weights, stored in blocks of {block}")
            start, end = start_offs + offset, start_offs + offset + math.prod(sizes) // block * length
            if end > len(self.data):
                raise ValueError(f"truncated within {field.name}: it has {len(self.data)} bytes, not {end}")
            regions.append((start, end, field.name))
        regions.sort()
        for (_, end, first), (start, _, second) in itertools.pairwise(regions):
            if start < end:
                raise ValueError(f"{first} and {second} share bytes")
        super()._build_tensors(start_offs, fields)

    def stored(self) -> dict[str, Stored]:
        """The tensors in row-major order; each is dequantised to float32 when it is read."""
        return {tensor.name: self._stored(tensor) for tensor in self.tensors}

    def _stored(self, tensor: Any) -> Stored:
        shape = tuple(reversed(tensor.shape.tolist()))

        def read() -> Tensor:
            try:
                values = dequantize(tensor.data, tensor.tensor_type)
            except NotImplementedError as error:
                raise ValueError(f"{self.path}: {tensor.name}: {error}") from None
            return torch.from_numpy(np.require(values, requirements="W")).view(shape)

        return Stored(shape, "F32", read)


def read_llama(path: Path) -> tuple[dict[str, Any], dict[str, Stored]]:
    """A Llama's configuration and tensors, under the names of transformers."""
    file = Reader(path)
    if (name := file.metadata.get("general.architecture")) != "llama":
        raise ValueError(f"{path}: the architecture of a GGUF file must be 'llama'; got {name!r}")
    config, weights = _config(path, file.metadata), {}
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for name, tensor in file.stored().items():
        layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name, re.ASCII)
        if layer and layer[2] in LAYER_NAMES:
            if layer[2] in heads:
                tensor = _halves_together(f"{path}: {name}", tensor, heads[layer[2]])
            name = f"model.layers.{layer[1]}.{LAYER_NAMES[layer[2]]}.weight"
        weights[NAMES.get(name, name)] = tensor
    return config | {"tie_word_embeddings": "lm_head.weight" not in weights}, weights


def _config(path: Path, metadata: dict[str, Any]) -> dict[str, Any]:
    """The configuration in the words of transformers; ValueError for a key that is not understood."""
    foreign = [name for name in metadata if not name.startswith(("llama.", *DESCRIPTIVE))]
    given = {name.removeprefix("llama."): value for name, value in metadata.items() if name.startswith("llama.")}
    if metadata.get("general.type", "model") != "model":
        foreign.append("general.type")
    if foreign:
        raise ValueError(f"{path}: {foreign[0]} = {reprlib.repr(metadata[foreign[0]])} is not supported")
    config = {name: _positive(path, key, given, int) for key, name in SIZES.items()}
    config |= {name: _positive(path, key, given, float) for key, name in NUMBERS.items()}
    tokens = metadata.get("tokenizer.ggml.tokens")
    config["vocab_size"] = len(tokens) if isinstance(tokens, list) else _positive(path, "vocab_size", given, int)
    head_width = config["hidden_size"] // config["num_attention_heads"]
    implied = dict.fromkeys(("rope.dimension_count", "attention.key_length", "attention.value_length"), head_width)
    supported = WITHOUT_EFFECT | implied | {"vocab_size": config["vocab_size"]}
    for key in given.keys() - SIZES.keys() - NUMBERS.keys():
        if key not in supported or given[key] != supported[key]:
            only = f"; only {supported[key]!r} is supported" if key in supported else " and is not supported"
            raise ValueError(f"{path}: llama.{key} = {reprlib.repr(given[key])} may change the computation{only}")
    return config


def _positive(path: Path, key: str, given: dict[str, Any], kind: type) -> Any:
    """The value of llama.`key`, a positive number of this kind."""
    defaults: dict[str, Any] = {
        "rope.freq_base": 10_000.0,
        "attention.head_count_kv": given.get("attention.head_count"),
    }
    value: Any = (defaults | given).get(key)
    if value is None:
        raise ValueError(f"{path}: 'llama.{key}' is missing in the metadata")
    of_kind = type(value) is kind  # not a bool
    if not of_kind or not 0 < value < math.inf:
        raise ValueError(f"{path}: llama.{key} must be a positive {kind.__name__}; got {reprlib.repr(value)}")
    return value


def _halves_together(where: str, weight: Stored, heads: int) -> Stored:
    """Convert rows of queries or keys from interleaved rotation pairs (GGUF) to rotated halves."""
    if weight.shape[0] % (2 * heads):
        raise ValueError(f"{where}: {heads} heads cannot share {weight.shape[0]} rows in pairs")
    return weight._replace(read=lambda: weight.read().unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2))
