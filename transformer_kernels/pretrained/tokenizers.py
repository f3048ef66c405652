"""Tokenizers of pretrained models, by the packages `tokenizers` and `transformers`."""

from __future__ import annotations

import os
import reprlib
from pathlib import Path
from typing import Any

from transformer_kernels.pretrained.folder import check_regular, read_object

BYTE_PAIRS = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))
SENTENCE_PIECES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
INSTALL = "pip install 'transformer_kernels[huggingface]'"
SETTINGS = ("config.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
END_OF_TEXT = "<|endoftext|>"
GPT2_SPECIAL = ("unk_token", "bos_token", "eos_token")  # END_OF_TEXT, which transformers adds where it is not known
NORMALIZER = {"do_lower_case": "lowercase", "strip_accents": "strip_accents"}
NORMALIZER |= {"tokenize_chinese_chars": "handle_chinese_chars"}  # of tokenizer_config.json and tokenizer.json


def download_remedy(path: str | Path) -> str:
    """The remedy if `path` is a model's name, not a folder."""
    path = Path(path)
    return f"models are read from local folders: download it first, with `hf download {path} --local-dir {path.name}`"


def load_tokenizer(path: str | os.PathLike[str], vocab_size: int | None = None) -> Any:
    """Load the tokenizer of a pretrained model.

    Args:
        path: a folder with tokenizer.json, or, read by transformers' AutoTokenizer, with vocab.txt (WordPiece), byte
            pairs (vocab.json and merges.txt, or encoder.json and vocab.bpe) or SentencePiece; or a GGUF file with byte
            pairs.
        vocab_size: of the model; a tokenizer with more tokens raises ValueError.
    Returns:
        a `tokenizers.Tokenizer`: `encode(text).ids`, `decode(ids)`.
    Raises:
        ImportError: a package is missing; the extra to install is named.
        FileNotFoundError: the folder or all supported files are missing.
        ValueError: the file is invalid or has an option that is not understood, or the tokenizer belongs to another
            model.
    """
    try:
        import tokenizers
    except ImportError as error:
        raise ImportError(f"load_tokenizer needs the package tokenizers: {INSTALL}") from error
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such folder or file; {download_remedy(path)}")
    try:
        made = _from_folder(tokenizers, path) if path.is_dir() else _from_gguf(tokenizers, path)
    except (FileNotFoundError, ImportError):
        raise
    except Exception as error:  # the package raises bare Exceptions
        where = "" if str(error).startswith(str(path)) else f"{path}: "
        raise ValueError(f"{where}the tokenizer cannot be loaded: {error}") from error
    largest = max(made.get_vocab().values(), default=-1)
    if vocab_size is not None and largest >= vocab_size:
        raise ValueError(
            f"{path}: the tokenizer has {largest + 1} tokens, the model only {vocab_size}; it belongs to another model"
        )
    made.no_padding()
    made.no_truncation()
    return made


def end_tokens(path: str | os.PathLike[str]) -> frozenset[int]:
    """The end-of-text ids of a pretrained model, from its folder or GGUF file; empty if not specified.

    Raises:
        ValueError: they are not integers, or the file is invalid.
    """
    path = Path(path)
    if not path.is_dir():
        from transformer_kernels.pretrained.gguf import Reader

        metadata = Reader(path).metadata
        names = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot")]
        return frozenset(_token_id(metadata[name], f"{path}: {name}") for name in names if name in metadata)
    for file in (path / "generation_config.json", path / "config.json"):
        given = read_object(file).get("eos_token_id") if file.exists() else None
        if given is not None:
            ids = given if isinstance(given, list) else [given]
            return frozenset(_token_id(token, f"{file}: eos_token_id") for token in ids)
    return frozenset()


def _token_id(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name} must be a token id; got {value!r}")
    return value


def _from_folder(tokenizers: Any, folder: Path) -> Any:
    settings = {name: read_object(folder / name) for name in SETTINGS if (folder / name).exists()}
    options = settings.get("tokenizer_config.json", {})
    whole = folder / "tokenizer.json"
    if whole.exists():
        check_regular(whole)
        made = tokenizers.Tokenizer.from_file(str(whole))
        return made if _agree(options, read_object(whole)) else _by_transformers(folder)
    pairs = next((pair for pair in BYTE_PAIRS if all((folder / name).exists() for name in pair)), ())
    files = [name for name in ("vocab.txt", *SENTENCE_PIECES, *pairs) if (folder / name).exists()]
    if not files:
        raise FileNotFoundError(f"{folder}: no tokenizer.json, vocab.txt, or vocab.json with merges.txt")
    for name in files:
        check_regular(folder / name)
    if "auto_map" in options:
        raise ValueError("tokenizer_config.json: auto_map names code, which is never run")
    kind = settings.get("config.json", {}).get("model_type") or options.get("tokenizer_class")
    if pairs and (kind or "gpt2").lower().startswith("gpt2"):
        absent = END_OF_TEXT not in read_object(folder / pairs[0])
        special = {name: None for name in GPT2_SPECIAL if absent and name not in options}
        if pairs == BYTE_PAIRS[1]:
            made = _transformers(folder).GPT2Tokenizer(*(str(folder / name) for name in pairs), **special)
            return made.backend_tokenizer
        return _by_transformers(folder, **special, **({} if kind else {"tokenizer_type": "gpt2"}))
    return _by_transformers(folder, **({} if kind else {"tokenizer_type": "bert" if "vocab.txt" in files else "llama"}))


def _transformers(folder: Path) -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ImportError(f"{folder}: this tokenizer needs the package transformers: {INSTALL}") from error
    return transformers


def _by_transformers(folder: Path, **options: Any) -> Any:
    auto = _transformers(folder).AutoTokenizer
    made = auto.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **options)
    if not hasattr(made, "backend_tokenizer"):
        raise ValueError(f"a {type(made).__name__} has no fast version")
    return made.backend_tokenizer


def _agree(options: dict[str, Any], whole: dict[str, Any]) -> bool:
    """Whether tokenizer_config.json has the options of tokenizer.json; transformers follows the former."""
    normalizer, pre = whole.get("normalizer") or {}, whole.get("pre_tokenizer") or {}
    if normalizer.get("type") == "BertNormalizer" and any(
        options[name] != normalizer.get(own) for name, own in NORMALIZER.items() if name in options
    ):
        return False
    for step in pre.get("pretokenizers", [pre]):
        if step.get("type") == "ByteLevel" and options.get("add_prefix_space") not in (None, step["add_prefix_space"]):
            return False
    return True


# GGUF

CONTROL, USER_DEFINED = 3, 4  # token types: matched as a whole; special or not
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PRE_TOKENIZERS = {"gpt-2": "", "smollm": "", "llama-bpe": LLAMA3, "llama3": LLAMA3, "llama-v3": LLAMA3}
"""Patterns that split a text before the merges; empty: the pattern of GPT-2."""
FOR_TEXT = {"model", "pre", "tokens", "token_type", "merges", "add_bos_token", "add_eos_token"}
NOT_FOR_BYTE_PAIRS = {"scores", "token_type_count"}
OFF = {"add_space_prefix", "remove_extra_whitespaces", "add_sep_token"}  # options of other types of tokenizers


def _from_gguf(tokenizers: Any, path: Path) -> Any:
    """Byte pairs as the file describes them; ValueError for an option that is not understood."""
    from transformer_kernels.pretrained.gguf import Reader

    given: dict[str, Any] = {
        name.removeprefix("tokenizer.ggml."): value
        for name, value in Reader(path).metadata.items()
        if name.startswith("tokenizer.") and not name.startswith("tokenizer.chat_template")
    }
    if (kind := given.get("model")) != "gpt2":
        raise ValueError(f"tokenizer.ggml.model must be 'gpt2'; got {kind!r}")
    if (pre := given.get("pre")) not in PRE_TOKENIZERS:
        raise ValueError(f"tokenizer.ggml.pre must be one of {', '.join(PRE_TOKENIZERS)}; got {pre!r}")
    for name in given.keys() - FOR_TEXT - NOT_FOR_BYTE_PAIRS:
        if not name.endswith("_token_id") and not (name in OFF and given[name] is False):
            raise ValueError(f"tokenizer.ggml.{name} = {reprlib.repr(given[name])} is not supported")
    tokens, merges = _strings(given, "tokens"), _strings(given, "merges")
    if len(set(tokens)) < len(tokens):
        raise ValueError("tokenizer.ggml.tokens has a token twice")
    kinds = given.get("token_type", [1] * len(tokens))
    if not isinstance(kinds, list) or len(kinds) != len(tokens):
        raise ValueError("tokenizer.ggml.token_type must have one number for each token")
    pairs = [tuple(merge.split(" ")) for merge in merges]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, pairs, ignore_merges=bool(PRE_TOKENIZERS[pre])))
    made.pre_tokenizer = _pre_tokenizer(tokenizers, pre)
    made.decoder = tokenizers.decoders.ByteLevel()
    whole = [(token, kind) for token, kind in zip(tokens, kinds, strict=True) if kind in (CONTROL, USER_DEFINED)]
    made.add_tokens([tokenizers.AddedToken(token, normalized=False, special=kind == CONTROL) for token, kind in whole])
    _add_ends(tokenizers, made, given)
    return made


def _strings(given: dict[str, Any], name: str) -> list[str]:
    value = given.get(name)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValueError(f"tokenizer.ggml.{name} must be a list of texts; got {reprlib.repr(value)}")
    return value


def _pre_tokenizer(tokenizers: Any, name: str) -> Any:
    steps = tokenizers.pre_tokenizers
    if pattern := PRE_TOKENIZERS[name]:
        first = [steps.Split(tokenizers.Regex(pattern), "isolated")]
    else:
        first = [steps.Digits(individual_digits=True)] if name == "smollm" else []
    return steps.Sequence([*first, steps.ByteLevel(add_prefix_space=False, use_regex=not pattern)])


def _add_ends(tokenizers: Any, made: Any, given: dict[str, Any]) -> None:
    """Begin and end each text with the tokens that the file names."""
    if "add_bos_token" not in given and "bos_token_id" in given and PRE_TOKENIZERS[given["pre"]]:
        # llama.cpp adds BOS for these pre-tokenizers, transformers does not.
        raise ValueError("tokenizer.ggml.add_bos_token is missing: whether a text begins with BOS is not known")
    ends = {}
    for name in ("bos", "eos"):
        wanted, number = given.get(f"add_{name}_token", False), given.get(f"{name}_token_id")
        if not isinstance(wanted, bool):
            raise ValueError(f"tokenizer.ggml.add_{name}_token must be true or false; got {reprlib.repr(wanted)}")
        if wanted:
            ends[name] = _token_id(number, f"tokenizer.ggml.{name}_token_id")
            if made.id_to_token(number) is None:
                raise ValueError(f"tokenizer.ggml.{name}_token_id = {number} is not a token")
    if ends:
        tokens = {name: made.id_to_token(number) for name, number in ends.items()}
        single = [*([tokens["bos"]] if "bos" in ends else []), "$A", *([tokens["eos"]] if "eos" in ends else [])]
        special = [(tokens[name], number) for name, number in ends.items()]
        made.post_processor = tokenizers.processors.TemplateProcessing(single=single, special_tokens=special)
