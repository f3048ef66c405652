"""Checkpoints: a folder of safetensors and JSON with a manifest of sizes and hashes, replaced as a whole or not at all.

    model.safetensors      the weights, in float32
    optimizer.safetensors  the optimizer's tensors
    config.json            the options of the run
    tokenizer.json         what rebuilds the tokenizer
    trainer.json           step, sampler position, random states, best loss
    manifest.json          size and SHA-256 of each of the above; written last

Nothing here is ever unpickled.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from transformer_kernels._version import __version__
from transformer_kernels.training._optional import require
from transformer_kernels.training.config import TrainingConfig, make_config

FORMAT = 1
FILES = ("model.safetensors", "optimizer.safetensors", "config.json", "tokenizer.json", "trainer.json")
MANIFEST = "manifest.json"
MANIFEST_LIMIT = 1 << 20


class CheckpointError(RuntimeError):
    """A checkpoint is missing, damaged, hostile, or belongs to another model, vocabulary or run."""


@dataclasses.dataclass
class Checkpoint:
    """What a checkpoint folder holds."""

    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    config: TrainingConfig
    tokenizer: dict[str, Any]
    trainer: dict[str, Any]


def save_checkpoint(folder: str | Path, checkpoint: Checkpoint) -> None:
    """Write `checkpoint` to `folder`; whatever happens meanwhile, a complete one can be loaded from there afterwards.

    The new folder is complete on the disk before the old one is put aside, and `load_checkpoint` finds the one put
    aside, should the process end between the two renames.
    """
    folder = Path(folder)
    fresh, previous = folder.with_name(f".{folder.name}.partial"), _previous(folder)
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    try:
        _write_files(fresh, checkpoint)
        if folder.exists():
            shutil.rmtree(previous, ignore_errors=True)
            os.rename(folder, previous)
        os.rename(fresh, folder)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        if previous.exists() and not folder.exists():
            os.rename(previous, folder)
        raise
    shutil.rmtree(previous, ignore_errors=True)


def load_checkpoint(folder: str | Path) -> Checkpoint:
    """Read and verify a checkpoint.

    Raises:
        CheckpointError: a file is missing, has another size or SHA-256 than the manifest says, or cannot be understood.
    """
    folder = _existing(Path(folder))
    expected = _read_manifest(folder)
    contents = {name: _read_verified(folder / name, expected[name]) for name in FILES}
    config = _json(folder / "config.json", contents["config.json"])
    try:
        recipe = config.pop("recipe")
        return Checkpoint(
            weights=_tensors(folder / FILES[0], contents[FILES[0]]),
            optimizer=_tensors(folder / FILES[1], contents[FILES[1]]),
            config=make_config(recipe, config, "config.json"),
            tokenizer=_json(folder / "tokenizer.json", contents["tokenizer.json"]),
            trainer=_json(folder / "trainer.json", contents["trainer.json"]),
        )
    except (KeyError, ValueError) as error:
        raise CheckpointError(f"{folder}: config.json does not describe a run: {error}") from error


def load_weights(model: nn.Module, weights: Mapping[str, Tensor], source: str | Path) -> None:
    """Copy `weights` into `model`; every name and shape must agree.

    Raises:
        CheckpointError: lists all that is missing, unexpected and mismatched.
    """
    own = model.state_dict()
    missing = sorted(own.keys() - weights.keys())
    unexpected = sorted(weights.keys() - own.keys())
    mismatched = [
        f"{name} (model {tuple(own[name].shape)}, checkpoint {tuple(weights[name].shape)})"
        for name in sorted(own.keys() & weights.keys())
        if own[name].shape != weights[name].shape
    ]
    found = {"missing": missing, "unexpected": unexpected, "mismatched": mismatched}
    if any(found.values()):
        lists = "; ".join(f"{what}: {', '.join(names)}" for what, names in found.items() if names)
        raise CheckpointError(f"{source}: the weights belong to another model or vocabulary: {lists}")
    model.load_state_dict(weights)


def _write_files(folder: Path, checkpoint: Checkpoint) -> None:
    pack = require("safetensors.torch").save
    contents = {
        "model.safetensors": pack(checkpoint.weights),
        "optimizer.safetensors": pack(checkpoint.optimizer),
        "config.json": _dump({"recipe": checkpoint.config.recipe, **dataclasses.asdict(checkpoint.config)}),
        "tokenizer.json": _dump(checkpoint.tokenizer),
        "trainer.json": _dump(checkpoint.trainer),
    }
    files = {name: {"bytes": len(data), "sha256": _sha256(data)} for name, data in contents.items()}
    contents[MANIFEST] = _dump({"format": FORMAT, "transformer_kernels": __version__, "files": files})
    for name, data in contents.items():
        with open(folder / name, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())


def _previous(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.previous")


def _existing(folder: Path) -> Path:
    """The folder to read: the named one, or the one that an interrupted save put aside."""
    if folder.is_dir():
        return folder
    if folder.exists():
        raise CheckpointError(
            f"{folder}: expected a checkpoint folder, found a file; pickles (.pt, .pth, .bin) are never loaded"
        )
    if _previous(folder).is_dir():
        return _previous(folder)
    raise CheckpointError(f"{folder}: no such checkpoint")


def _read_manifest(folder: Path) -> dict[str, dict[str, Any]]:
    path = folder / MANIFEST
    if not path.is_file():
        raise CheckpointError(f"{folder}: expected a checkpoint folder, found no {MANIFEST} in it")
    if path.stat().st_size > MANIFEST_LIMIT:
        raise CheckpointError(f"{path}: expected at most {MANIFEST_LIMIT} bytes, found {path.stat().st_size}")
    manifest = _json(path, path.read_bytes())
    if manifest.get("format") != FORMAT:
        raise CheckpointError(f"{path}: expected format {FORMAT}, found {manifest.get('format')!r}")
    files = manifest.get("files")
    if not isinstance(files, dict) or sorted(files) != sorted(FILES):
        raise CheckpointError(f"{path}: expected the files {', '.join(FILES)}, found {list(files or [])}")
    if any(not isinstance(entry, dict) or not {"bytes", "sha256"} <= entry.keys() for entry in files.values()):
        raise CheckpointError(f"{path}: expected bytes and sha256 of each file")
    return files


def _read_verified(path: Path, expected: Mapping[str, Any]) -> bytes:
    if not path.is_file():
        raise CheckpointError(f"{path}: expected {expected['bytes']} bytes, found no such file")
    size = path.stat().st_size
    if size != expected["bytes"]:
        raise CheckpointError(f"{path}: expected {expected['bytes']} bytes, found {size}")
    data = path.read_bytes()
    if _sha256(data) != expected["sha256"]:
        raise CheckpointError(f"{path}: expected SHA-256 {expected['sha256']}, found {_sha256(data)}")
    return data


def _tensors(path: Path, data: bytes) -> dict[str, Tensor]:
    try:
        return require("safetensors.torch").load(data)
    except (require("safetensors").SafetensorError, ValueError) as error:
        raise CheckpointError(f"{path}: not a safetensors file: {error}") from error


def _json(path: Path, data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError as error:
        raise CheckpointError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected an object, found a {type(value).__name__}")
    return value


def _dump(value: dict[str, Any]) -> bytes:
    return json.dumps(value, indent=1).encode()


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
