"""Tokenizers of pretrained models, by the package `tokenizers`: WordPiece, byte pairs, Llama's."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

BYTE_PAIRS = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))


def download_remedy(path: str | Path) -> str:
    """What to do if `path` is a model's name, not a folder."""
    path = Path(path)
    return f"models are read from local folders: download it first, with `hf download {path} --local-dir {path.name}`"


def load_tokenizer(path: str | os.PathLike[str], vocab_size: int | None = None) -> Any:
    """Load the tokenizer of a pretrained model.

    Args:
        path: a folder with tokenizer.json, or with vocab.txt (WordPiece), or with GPT-2's byte pairs as vocab.json and
            merges.txt or as encoder.json and vocab.bpe; or a GGUF file.
        vocab_size: of the model; a tokenizer with more tokens raises ValueError.
    Returns:
        a `tokenizers.Tokenizer`: `encode(text).ids`, `decode(ids)`.
    Raises:
        ImportError: the package `tokenizers` is missing.
        FileNotFoundError: the folder or all supported files are missing.
        ValueError: the file is invalid, or the tokenizer belongs to another model.
    """
    try:
        import tokenizers
    except ImportError as error:
        raise ImportError("load_tokenizer needs the package tokenizers: pip install tokenizers") from error
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such folder or file; {download_remedy(path)}")
    try:
        made = _from_gguf(path) if path.is_file() else _from_folder(tokenizers, path)
    except FileNotFoundError:
        raise
    except Exception as error:  # the package raises bare Exceptions
        raise ValueError(f"{path}: the tokenizer cannot be loaded: {error}") from error
    known = made.get_vocab_size()
    if vocab_size is not None and known > vocab_size:
        raise ValueError(
            f"{path}: the tokenizer has {known} tokens, the model only {vocab_size}; it belongs to another model"
        )
    made.no_padding()
    made.no_truncation()
    return made


def end_tokens(path: str | os.PathLike[str]) -> frozenset[int]:
    """The end-of-text ids of a pretrained model, from its folder or GGUF file; empty if not specified."""
    path = Path(path)
    given: Any = None
    if path.is_file():
        from transformer_kernels.pretrained.gguf import GGUF

        given = GGUF(path).metadata.get("tokenizer.ggml.eos_token_id")
    for file in (path / "generation_config.json", path / "config.json"):
        if given is None and file.is_file():
            given = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
    return frozenset(given if isinstance(given, list) else [] if given is None else [given])


def _from_folder(tokenizers: Any, folder: Path) -> Any:
    if (folder / "tokenizer.json").exists():
        return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    if (folder / "vocab.txt").exists():
        lower = True
        if (settings := folder / "tokenizer_config.json").exists():
            lower = json.loads(settings.read_text()).get("do_lower_case", True)
        made = tokenizers.BertWordPieceTokenizer(str(folder / "vocab.txt"), lowercase=lower)
        return made._tokenizer
    for tokens, merges in BYTE_PAIRS:
        if (folder / tokens).exists() and (folder / merges).exists():
            vocabulary = json.loads((folder / tokens).read_text(encoding="utf-8"))
            lines = (folder / merges).read_text(encoding="utf-8").split("\n")
            return _byte_pairs(vocabulary, [line for line in lines if line and not line.startswith("#version")])
    raise FileNotFoundError(f"{folder}: no tokenizer.json, vocab.txt, or vocab.json with merges.txt")


def _byte_pairs(vocabulary: dict[str, int], merges: list[str], digits: bool = False) -> Any:
    """GPT-2's byte pairs; `digits` splits numbers into single digits first."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    steps = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    made.pre_tokenizer = pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    made.decoder = decoders.ByteLevel()
    return made


def _from_gguf(path: Path) -> Any:
    from transformer_kernels.pretrained.gguf import GGUF

    metadata = GGUF(path).metadata
    if (kind := metadata.get("tokenizer.ggml.model")) != "gpt2":
        raise ValueError(f"the tokenizer of a GGUF file must be of type 'gpt2'; got {kind!r}")
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata.get("tokenizer.ggml.token_type", [])
    vocabulary = {token: index for index, token in enumerate(tokens)}
    digits = metadata.get("tokenizer.ggml.pre") == "smollm"
    made = _byte_pairs(vocabulary, metadata["tokenizer.ggml.merges"], digits)
    control = 3
    made.add_special_tokens([token for token, kind in zip(tokens, kinds, strict=False) if kind == control])
    return made
