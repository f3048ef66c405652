"""Pretrained weights: conversion between Hugging Face folders or GGUF files and this package's models.

model = transformer_kernels.load_pretrained("distilgpt2")
print(model.generate("Once upon a time", max_new_tokens=40))
"""

from __future__ import annotations

import json
import os
import re
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from transformer_kernels._bind import bind
from transformer_kernels.pretrained.folder import FLOATS, Stored, read_object, read_weights
from transformer_kernels.pretrained.tokenizers import download_remedy, load_tokenizer
from transformer_kernels.pretrained.tutorials import load_tutorial

if TYPE_CHECKING:
    from python_ref.encoder import Encoder
    from python_ref.vit import ViT
    from transformer_kernels.pretrained.architectures import Architecture, Entry
    from transformer_kernels.pretrained.language_model import PretrainedGPT

__all__ = ["export_pretrained", "load_pretrained", "load_tokenizer", "load_tutorial"]

UNUSABLE = (TypeError, AttributeError, ArithmeticError, RecursionError, MemoryError, RuntimeError)
"""Exceptions raised for invalid numbers or nesting in a file."""
PICKLED = (".pt", ".pth", ".bin")


def load_pretrained(path: str | os.PathLike[str], backend: str | None = None) -> PretrainedGPT | Encoder | ViT:
    """Load a pretrained model.

    Args:
        path: a folder with config.json and safetensors of GPT-2, DistilGPT-2, BERT (MiniLM), RoBERTa, DistilBERT, Llama
            or ViT with its classifier in the format of transformers, or a GGUF file of a Llama with tensors in any
            format of the package `gguf` (extra `gguf`).
        backend: as in `build`.

    Returns:
        `PretrainedGPT`, a `python_ref.GPT`: tokens (B, L) -> logits (B, L, V), with `generate` for text and tokens;
        `python_ref.Encoder`: tokens, padding_mask -> hidden states (B, L, E), with the heads whose weights exist; or
        `python_ref.ViT`. RoBERTa's positions start at 0, so padding must follow the text. Parameters are float32; the
        model is in evaluation mode.

    Raises:
        FileNotFoundError: the folder or one of its files is missing.
        ImportError: the package `gguf` is missing.
        ValueError: an architecture or option that is not supported (named), damaged files, tensors that are missing,
            unknown, of another shape, of integers or not finite (all are listed), a tied tensor that is stored with
            other values, or pickled weights, which are never loaded.

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
    config, weights, architecture = _read_folder(path) if path.is_dir() else _read_gguf(path)
    if config.layers > len(weights):
        raise ValueError(f"{path}: {config.layers} layers are configured; there are {len(weights)} tensors")
    try:
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


def _read_gguf(path: Path) -> tuple[Any, dict[str, Stored], Architecture]:
    from transformer_kernels.pretrained.gguf import read_llama

    theirs, weights = read_llama(path)
    architecture = _architecture("llama", path)
    return _configured(path, architecture, theirs, set(weights)), weights, architecture


def _read_folder(folder: Path) -> tuple[Any, dict[str, Stored], Architecture]:
    path = folder / "config.json"
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file; a Hugging Face folder contains one")
    theirs = read_object(path)
    architecture = _architecture(str(theirs.get("model_type")), path)
    weights = read_weights(folder)
    names = {*weights, *(architecture.prefix + name for name in weights)}
    return _configured(path, architecture, theirs, names), weights, architecture


def _configured(path: Path, architecture: Architecture, theirs: dict[str, Any], names: set[str]) -> Any:
    """The configuration in our words; the errors of `architecture.configure` with the file."""
    try:
        return architecture.configure(theirs, names)
    except KeyError as error:
        raise ValueError(f"{path}: {error} is missing") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    except UNUSABLE as error:
        raise ValueError(f"{path}: it contains values that no model has: {error}") from error


def _ours(
    path: Path, architecture: Architecture, config: Any, weights: dict[str, Stored], expected: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Our state dict from their tensors; all mismatched names and shapes are reported before a tensor is read."""
    from transformer_kernels.pretrained.architectures import NEXT_SENTENCE

    entries = list(architecture.entries(config))
    sources = {entry.ours: [_found(name, architecture, weights) for name in entry.theirs] for entry in entries}
    used = set().union(*sources.values())
    wrong = [text for entry in entries for text in _mismatched(entry, sources[entry.ours], weights, expected)]
    copies = architecture.copies(config)
    ignored = {name for name in weights if any(re.fullmatch(pattern, name) for pattern in architecture.ignored)}
    wrong += [f"{name} is unknown" for name in sorted(weights.keys() - used - ignored - copies.keys())]
    if not wrong:
        wrong = [text for name, other in copies.items() for text in _differs(name, other, architecture, weights)]
    state = {}
    for entry in entries if not wrong else ():
        whole = _joined(entry, [weights[name].read() for name in sources[entry.ours]]).to(torch.float32).contiguous()
        if not torch.isfinite(whole).all():
            wrong.append(f"{' + '.join(entry.theirs)} has values that are not finite")
        state[entry.ours] = whole.view(expected[entry.ours].shape)
    if wrong:
        raise ValueError(f"{path}: the weights are not those of a {architecture.name}: {'; '.join(wrong)}")
    if unused := sorted(name for name in ignored if re.fullmatch(NEXT_SENTENCE, name)):
        warnings.warn(f"{path}: not used: {', '.join(unused)}", stacklevel=3)
    return state


def _found(name: str, architecture: Architecture, weights: dict[str, Stored]) -> str:
    """The name as it is stored: a model without a head has no prefix."""
    return name if name in weights else name.removeprefix(architecture.prefix)


def _joined(entry: Entry, parts: list[Tensor]) -> Tensor:
    parts = [part[entry.skipped :].t() if entry.transposed else part[entry.skipped :] for part in parts]
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _mismatched(entry: Entry, names: list[str], weights: dict[str, Stored], expected: dict[str, Tensor]) -> list[str]:
    """The errors in the tensors of an entry, from the headers of their files."""
    missing = [f"{full} is missing" for full, name in zip(entry.theirs, names, strict=True) if name not in weights]
    if missing:
        return missing
    parts = [weights[name] for name in names]
    wrong = [
        f"{name} is {part.dtype}, which is not dequantised"
        for name, part in zip(entry.theirs, parts, strict=True)
        if part.dtype not in FLOATS
    ]
    shapes = ", ".join(str(part.shape) for part in parts)
    wanted = entry.shape or tuple(expected[entry.ours].shape)
    try:
        shape = tuple(_joined(entry, [torch.empty(part.shape, device="meta") for part in parts]).shape)
    except (RuntimeError, IndexError):
        shape = None
    if shape != wanted:
        wanted = wanted[::-1] if entry.transposed else wanted
        wrong.append(f"{' + '.join(entry.theirs)} has shape {shapes}; expected {wanted}")
    return wrong


def _differs(name: str, other: str, architecture: Architecture, weights: dict[str, Stored]) -> list[str]:
    """The error in `name`, which is stored again as `other` or not at all."""
    if name not in weights:
        return []
    same = torch.equal(weights[name].read().float(), weights[_found(other, architecture, weights)].read().float())
    return [] if same else [f"{name} has other values than {other}, with which it is tied"]
