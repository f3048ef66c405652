"""Pretrained weights: conversion between Hugging Face folders or GGUF files and this package's models.

model = transformer_kernels.load_pretrained("distilgpt2")
print(model.generate("Once upon a time", max_new_tokens=40))
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from transformer_kernels._bind import bind
from transformer_kernels.pretrained.tokenizers import download_remedy, load_tokenizer
from transformer_kernels.pretrained.tutorials import load_tutorial

if TYPE_CHECKING:
    from python_ref.encoder import Encoder
    from python_ref.vit import ViT
    from transformer_kernels.pretrained.architectures import Architecture, Entry
    from transformer_kernels.pretrained.language_model import PretrainedGPT

__all__ = ["export_pretrained", "load_pretrained", "load_tokenizer", "load_tutorial"]

UNUSABLE = (TypeError, AttributeError, ArithmeticError, RecursionError, MemoryError)
"""Exceptions raised for invalid numbers or nesting in a file."""
PICKLED = (".pt", ".pth", ".bin")
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "model.pt", "model.pth")


def load_pretrained(path: str | os.PathLike[str], backend: str | None = None) -> PretrainedGPT | Encoder | ViT:
    """Load a pretrained model.

    Args:
        path: a folder with config.json and safetensors of GPT-2, DistilGPT-2, BERT (MiniLM), RoBERTa, DistilBERT, Llama
            or ViT with its classifier in the format of transformers, or a GGUF file of a Llama with tensors in F32,
            F16, Q8_0, Q4_0 or Q4_1.
        backend: as in `build`.

    Returns:
        `PretrainedGPT`, a `python_ref.GPT`: tokens (B, L) -> logits (B, L, V), with `generate` for text and tokens;
        `python_ref.Encoder`: tokens, padding_mask -> hidden states (B, L, E), with the heads whose weights exist; or
        `python_ref.ViT`. RoBERTa's positions start at 0, so padding must follow the text. Parameters are float32; the
        model is in evaluation mode.

    Raises:
        FileNotFoundError: the folder or one of its files is missing.
        ValueError: an unknown architecture or option, truncated files, tensors that are missing, unknown, of another
            shape, of integers or not finite (all are listed), or pickled weights, which are never loaded.

    Examples:
        >>> folder = tempfile.mkdtemp()
        >>> export_pretrained(tk.build("gpt2", vocab_size=65, layers=1, width=64, heads=2), folder)
        >>> model = load_pretrained(folder)
        >>> model(torch.randint(65, (1, 16))).shape
        torch.Size([1, 16, 65])
    """
    from transformer_kernels.pretrained.language_model import PretrainedGPT

    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such folder or file; {download_remedy(path)}")
    if path.suffix in PICKLED:
        raise ValueError(f"{path}: a state dict saved by torch.save; use load_tutorial for a handwritten model")
    operations = bind(backend)
    try:
        config, weights, architecture = _read_gguf(path) if path.is_file() else _read_folder(path)
        if config.layers > len(weights):
            raise ValueError(f"{path}: {config.layers} layers are configured; there are {len(weights)} tensors")
        with torch.device("meta"):
            model = architecture.make(config, operations)
    except UNUSABLE as error:
        raise ValueError(f"{path}: it contains values that no model has: {error}") from error
    model.load_state_dict(_ours(path, architecture, config, weights, model.state_dict()), assign=True)
    if isinstance(model, PretrainedGPT):
        model.source = path.absolute()
    return model.eval()


def export_pretrained(model: Any, folder: str | os.PathLike[str]) -> None:
    """Write a model in the format of transformers: config.json and model.safetensors.

    Args:
        model: a `python_ref.GPT` with the layers of GPT-2 or Llama, a `python_ref.Encoder`, which becomes a BERT or a
            DistilBERT (a RoBERTa too; its positions then start at the first token), or a ViT.
        folder: created if missing.

    Raises:
        TypeError: another type of model.
        ValueError: transformers has no model with these layers; the offending field is named.
    """
    from safetensors.torch import save_file

    architecture = _exported_as(model)
    config = {"model_type": architecture.name, **architecture.describe(model.config), "dtype": "float32"}
    state, tensors = model.state_dict(), {}
    for entry in architecture.entries(model.config):
        whole = state[entry.ours].detach().cpu()
        whole = whole if entry.shape is None else whole.view(entry.shape)
        for name, part in zip(entry.theirs, whole.split(_rows(entry, whole, model)), strict=True):
            tensors[name] = (part.t() if entry.transposed else part).contiguous().clone()
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _exported_as(model: Any) -> Architecture:
    from python_ref import GPT
    from python_ref.encoder import Encoder
    from python_ref.vit import ViT
    from transformer_kernels.pretrained.architectures import ARCHITECTURES

    if isinstance(model, GPT):
        return ARCHITECTURES["llama" if model.config.norm == "rms" else "gpt2"]
    if isinstance(model, ViT):
        return ARCHITECTURES["vit"]
    if isinstance(model, Encoder):
        return ARCHITECTURES["distilbert" if model.embedding.segments is None else "bert"]
    raise TypeError(f"export_pretrained: model must be a python_ref.GPT, Encoder or ViT; got {type(model).__name__}")


def _rows(entry: Entry, whole: Tensor, model: Any) -> list[int]:
    """Number of rows of our tensor from each source tensor: queries, keys and values may differ, gates are equal."""
    if len(entry.theirs) == 3:
        return model.blocks[0].attention.rows
    return [whole.shape[0] // len(entry.theirs)] * len(entry.theirs)


def _architecture(name: str, where: Path) -> Architecture:
    from transformer_kernels.pretrained.architectures import ARCHITECTURES

    if name not in ARCHITECTURES:
        raise ValueError(f"{where}: the architecture must be one of {', '.join(ARCHITECTURES)}; got {name!r}")
    return ARCHITECTURES[name]


def _read_folder(folder: Path) -> tuple[Any, dict[str, Tensor], Architecture]:
    theirs = _read_config(folder)
    architecture = _architecture(str(theirs.get("model_type")), folder / "config.json")
    weights = _read_safetensors(folder)
    try:
        config = architecture.configure(theirs, {*weights, *(architecture.prefix + name for name in weights)})
    except KeyError as error:
        raise ValueError(f"{folder / 'config.json'}: {error} is missing") from None
    return config, weights, architecture


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file; a Hugging Face folder contains one")
    try:
        theirs = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    if not isinstance(theirs, dict):
        raise ValueError(f"{path}: must contain an object; got {type(theirs).__name__}")
    return theirs


def _read_safetensors(folder: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    index = folder / "model.safetensors.index.json"
    names: list[str] = []
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, *UNUSABLE) as error:
            raise ValueError(f"{index}: no weight_map from tensors to files: {error!r}") from error
    files = [folder / name for name in names or ["model.safetensors"]]
    weights: dict[str, Tensor] = {}
    for file in files:
        if not file.exists():
            pickle = next((name for name in PICKLES if (folder / name).exists()), None)
            remedy = f"; {pickle} is a pickle, which is never loaded: save the model as safetensors" if pickle else ""
            raise (ValueError if pickle else FileNotFoundError)(f"{file}: no such file{remedy}")
        try:
            weights.update(load_file(file))
        except SafetensorError as error:
            raise ValueError(f"{file}: truncated or not safetensors: {error}") from None
    return weights


def _ours(
    path: Path, architecture: Architecture, config: Any, weights: dict[str, Tensor], expected: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Our state dict from their tensors; all mismatched names are reported together."""
    unused, state, wrong = set(weights), {}, []
    for entry in architecture.entries(config):
        parts = []
        for name in entry.theirs:
            found = name if name in weights else name.removeprefix(architecture.prefix)
            unused.discard(found)
            if found not in weights:
                wrong.append(f"{name} is missing")
            elif not weights[found].is_floating_point():
                wrong.append(f"{name} is {weights[found].dtype}, which is not dequantised")
            else:
                part = weights[found][entry.skipped :]
                parts.append(part.t() if entry.transposed else part)
        if len(parts) == len(entry.theirs):
            whole = (torch.cat(parts) if len(parts) > 1 else parts[0]).to(torch.float32).contiguous()
            if not torch.isfinite(whole).all():
                wrong.append(f"{' + '.join(entry.theirs)} has values that are not finite")
            if entry.shape == tuple(whole.shape):
                whole = whole.view(expected[entry.ours].shape)
            state[entry.ours] = whole
            if whole.shape != expected[entry.ours].shape:
                shapes = f"{tuple(whole.shape)}; expected {tuple(expected[entry.ours].shape)}"
                wrong.append(f"{' + '.join(entry.theirs)} has shape {shapes}")
    tied = ("lm_head.weight",) if getattr(config, "tied", False) else ()
    unknown = [name for name in sorted(unused) if not any(part in name for part in (*architecture.ignored, *tied))]
    wrong += [f"{name} is unknown" for name in unknown]
    if wrong:
        raise ValueError(f"{path}: the weights are not those of a {architecture.name}: {'; '.join(wrong)}")
    return state


# GGUF

GGUF_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
GGUF_LAYER_NAMES = {
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


def _read_gguf(path: Path) -> tuple[Any, dict[str, Tensor], Architecture]:
    """A Llama's configuration and tensors, under the names of transformers."""
    from transformer_kernels.pretrained.gguf import GGUF

    file = GGUF(path)
    if (name := file.metadata.get("general.architecture")) != "llama":
        raise ValueError(f"{path}: the architecture of a GGUF file must be 'llama'; got {name!r}")
    theirs = _gguf_config(path, file.metadata)
    heads = {"attn_q": theirs["num_attention_heads"], "attn_k": theirs["num_key_value_heads"]}
    weights = {}
    for stored in file.index:
        _, layer, part, kind = stored.split(".") if stored.startswith("blk.") else ("", "", "", "")
        tensor = file.tensor(stored)
        if part in heads:
            tensor = _halves_together(tensor, heads[part])
        known = GGUF_LAYER_NAMES.get(part)
        named = f"model.layers.{layer}.{known}.{kind}" if known else GGUF_NAMES.get(stored, stored)
        weights[named] = tensor
    architecture = _architecture("llama", path)
    return architecture.configure(theirs, set(weights)), weights, architecture


def _gguf_config(path: Path, metadata: dict[str, Any]) -> dict[str, Any]:
    try:
        given = {name: metadata[f"llama.{name}"] for name in ("block_count", "context_length", "embedding_length")}
        heads, vocabulary = metadata["llama.attention.head_count"], len(metadata["tokenizer.ggml.tokens"])
        return {
            "vocab_size": vocabulary,
            "max_position_embeddings": given["context_length"],
            "hidden_size": given["embedding_length"],
            "num_hidden_layers": given["block_count"],
            "num_attention_heads": heads,
            "num_key_value_heads": metadata.get("llama.attention.head_count_kv", heads),
            "intermediate_size": metadata["llama.feed_forward_length"],
            "rms_norm_eps": metadata["llama.attention.layer_norm_rms_epsilon"],
            "rope_theta": metadata.get("llama.rope.freq_base", 10_000.0),
            "tie_word_embeddings": False,
        }
    except KeyError as error:
        raise ValueError(f"{path}: {error} is missing in the metadata") from None


def _halves_together(weight: Tensor, heads: int) -> Tensor:
    """Convert rows of queries or keys from interleaved rotation pairs (GGUF) to rotated halves."""
    if heads < 1 or weight.shape[0] % (2 * heads):
        raise ValueError(f"{heads} heads cannot share {weight.shape[0]} rows of queries or keys in pairs")
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
