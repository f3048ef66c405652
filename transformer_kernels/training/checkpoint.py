"""Checkpoints: a folder of safetensors and JSON with a manifest of sizes and hashes, replaced atomically.

    model.safetensors      the weights, in float32
    optimizer.safetensors  the optimizer state
    config.json            the options of the run
    tokenizer.json         the description of the tokenizer
    trainer.json           step, sampler state, RNG states, best loss
    manifest.json          size and SHA-256 of each of the above; written last

No file is unpickled.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import os
import random
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from transformer_kernels._version import __version__
from transformer_kernels.training._optional import require
from transformer_kernels.training.config import TrainingConfig
from transformer_kernels.training.data.files import write_synced
from transformer_kernels.training.distributed import Processes, choose_device
from transformer_kernels.training.recipe import Trained, find_recipe, make_config, recipes

FORMAT = 1
FILES = ("model.safetensors", "optimizer.safetensors", "config.json", "tokenizer.json", "trainer.json")
MANIFEST = "manifest.json"
MANIFEST_LIMIT = 1 << 20
NAMES = ("best", "last")  # checkpoints in a run folder
LOG = "log.jsonl"
LOCK = ".lock"


class CheckpointError(RuntimeError):
    """A checkpoint is missing, corrupt, malicious, or belongs to another model, vocabulary or run."""


class RunFolderError(RuntimeError):
    """The run folder contains another run, or another process is writing to it."""


@dataclasses.dataclass
class Checkpoint:
    """The contents of a checkpoint folder."""

    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    config: TrainingConfig
    tokenizer: dict[str, Any]
    trainer: dict[str, Any]


def save_checkpoint(folder: str | Path, checkpoint: Checkpoint) -> None:
    """Write `checkpoint` to `folder`. A complete checkpoint can be loaded after an interruption at any point.

    The new folder is flushed to disk before the old one is renamed. If the process ends between the two renames,
    `load_checkpoint` finds the renamed folder. A symbolic link is replaced; its target is kept.
    """
    folder = Path(folder)
    fresh, previous = folder.with_name(f".{folder.name}.partial"), _previous(folder)
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    try:
        _write_files(fresh, checkpoint)
        if folder.exists() or folder.is_symlink():
            _remove(previous)
            os.rename(folder, previous)
        os.rename(fresh, folder)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        if previous.exists() and not folder.exists():
            os.rename(previous, folder)
        raise
    _remove(previous)


def _remove(folder: Path) -> None:
    """Delete a folder, or a symbolic link to one without its target."""
    if folder.is_symlink():
        folder.unlink()
    else:
        shutil.rmtree(folder, ignore_errors=True)


def load_checkpoint(folder: str | Path) -> Checkpoint:
    """Read and verify a checkpoint.

    Raises:
        CheckpointError: a file is missing or invalid, or its size or SHA-256 differs from the manifest.
    """
    folder = _existing(Path(folder))
    expected = _read_manifest(folder)
    contents = {name: _read_verified(folder / name, expected[name]) for name in FILES}
    weights = _tensors(folder / FILES[0], contents[FILES[0]])
    return Checkpoint(
        weights=weights,
        optimizer=_tensors(folder / FILES[1], contents[FILES[1]]),
        config=_config(folder, contents["config.json"], len(weights)),
        tokenizer=_json(folder / "tokenizer.json", contents["tokenizer.json"]),
        trainer=_json(folder / "trainer.json", contents["trainer.json"]),
    )


def weights_hash(folder: str | Path) -> str:
    """The SHA-256 of the file of weights in a checkpoint folder, from its manifest."""
    return str(_read_manifest(_existing(Path(folder)))["model.safetensors"]["sha256"])


def checkpoint_config(folder: str | Path) -> TrainingConfig:
    """The verified config of a checkpoint, without reading the weights; raises the errors of `load_checkpoint`."""
    folder = _existing(Path(folder))
    expected = _read_manifest(folder)
    return _config(
        folder, _read_verified(folder / "config.json", expected["config.json"]), _tensor_count(folder, expected)
    )


def load_weights(model: nn.Module, weights: Mapping[str, Tensor], source: str | Path) -> None:
    """Copy `weights` into `model`; names and shapes must match exactly.

    Raises:
        CheckpointError: lists all missing, unexpected and mismatched parameters.
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
    wrong = [name for name, tensor in weights.items() if not tensor.is_floating_point() or not tensor.isfinite().all()]
    if wrong:
        raise CheckpointError(
            f"{source}: the weights must be finite numbers of a floating-point type: {', '.join(wrong)}"
        )
    model.load_state_dict(weights)


def checkpoint_folder(folder: str | Path, order: Sequence[str] = NAMES) -> Path:
    """`folder` itself, or, if it is a run folder, its first checkpoint in `order`."""
    folder = Path(folder)
    if (folder / LOG).exists():
        for name in order:
            if (folder / name).is_dir() or _previous(folder / name).is_dir():
                return folder / name
    return folder


def refuse_other_run(folder: Path, start: Path | None) -> None:
    """Raise RunFolderError if `folder` contains a checkpoint other than the resumed one, `start`."""
    if start is not None and start.parent.resolve() == folder.resolve():
        return
    if any(path.exists() for name in NAMES for path in (folder / name, _previous(folder / name))):
        raise RunFolderError(
            f"{folder}: contains a run already; continue it with train --resume {folder}, replace it with --overwrite, "
            "or choose another --out"
        )


@contextmanager
def claimed(folder: Path, start: Path | None = None, *, overwrite: bool = False) -> Iterator[None]:
    """Lock `folder` for a run of this process.

    Args:
        folder: created if missing.
        start: the checkpoint from which the run resumes.
        overwrite: delete an existing run in `folder`, unless it contains `start`.

    Raises:
        RunFolderError: it contains another run, or another process holds its lock.
    """
    from filelock import FileLock, Timeout  # a dependency of torch

    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise RunFolderError(f"{folder}: another process is training into it; choose another --out") from None
    try:
        try:
            refuse_other_run(folder, start)
        except RunFolderError:
            if not overwrite:
                raise
            _delete_run(folder)
        yield
    finally:
        lock.release()


def _delete_run(folder: Path) -> None:
    """Delete checkpoints, log and TensorBoard events of a run; other files are kept."""
    for name in NAMES:
        for path in (folder / name, _previous(folder / name)):
            _remove(path)
    (folder / LOG).unlink(missing_ok=True)
    shutil.rmtree(folder / "tensorboard", ignore_errors=True)


def load_trained(
    folder: str | Path,
    *,
    backend: str = "auto",
    device: str = "auto",
    recipe: str | None = None,
    command: str = "evaluate",
    vocab_dir: str = "",
    options: Mapping[str, Any] | None = None,
) -> Trained:
    """Load the model of a checkpoint, or of the best (else the last) checkpoint of a run, for inference on any backend.

    Args:
        folder: the checkpoint or run folder.
        backend: kernel backend of the model.
        device: cpu, cuda, cuda:1, ...; "auto" selects a GPU if there is one.
        recipe: the only recipe accepted, if given.
        command: "evaluate", "generate" or "classify"; the model's recipe must support it.
        vocab_dir: folder with GPT-2's vocab.bpe, for recipes with this option.
        options: recipe options that replace the checkpoint's.

    Raises:
        CheckpointError: the checkpoint is corrupt, or was written by another recipe.
        ValueError: an option is unknown to the recipe.
    """
    folder = checkpoint_folder(folder)
    checkpoint = load_checkpoint(folder)
    allowed = [recipe] if recipe else [name for name, known in recipes().items() if known.supports(command)]
    name = checkpoint.config.recipe
    if name not in allowed:
        raise CheckpointError(f"{folder}: expected a model of {' or '.join(allowed)}, found one of {name}")
    changes = {**(options or {}), "backend": backend, **({"vocab_dir": vocab_dir} if vocab_dir else {})}
    chosen = {**dataclasses.asdict(checkpoint.config), **changes}
    config, found = make_config(name, chosen, "options"), find_recipe(name)
    try:
        tokenizer = found.load_tokenizer(checkpoint.tokenizer, config)
        model = found.build(config, tokenizer)
        step = int(checkpoint.trainer.get("step", 0))
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise CheckpointError(f"{folder}: config.json, tokenizer.json or trainer.json: {error}") from error
    load_weights(model, checkpoint.weights, folder)
    where = choose_device(device, Processes())
    return Trained(model.to(where).eval(), tokenizer, config, where, step, found)


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
        write_synced(folder / name, data)


def _previous(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.previous")


def _existing(folder: Path) -> Path:
    """The folder to read: `folder`, or the renamed one that an interrupted save left."""
    if folder.is_dir():
        return folder
    if folder.exists():
        raise CheckpointError(
            f"{folder}: expected a checkpoint folder, found a file; pickles (.pt, .pth, .bin) are never loaded"
        )
    if _previous(folder).is_dir():
        return _previous(folder)
    remedy = "pass a folder that `transformer-kernels train` wrote, such as runs/char-gpt"
    raise CheckpointError(f"{folder}: no such checkpoint; {remedy}")


def _read_manifest(folder: Path) -> dict[str, dict[str, Any]]:
    path = folder / MANIFEST
    if not path.is_file():
        pretrained, run = (folder / "config.json").exists(), (folder / LOG).exists()
        remedy = "; a pretrained model is passed as --model" if pretrained else ""
        remedy = "; the run has no checkpoint yet" if run else remedy
        raise CheckpointError(f"{folder}: expected a checkpoint folder, found no {MANIFEST} in it{remedy}")
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


def _check_size(path: Path, expected: Mapping[str, Any]) -> None:
    if not path.is_file():
        raise CheckpointError(f"{path}: expected {expected['bytes']} bytes, found no such file")
    size = path.stat().st_size
    if size != expected["bytes"]:
        raise CheckpointError(f"{path}: expected {expected['bytes']} bytes, found {size}")


def _read_verified(path: Path, expected: Mapping[str, Any]) -> bytes:
    _check_size(path, expected)
    data = path.read_bytes()
    if _sha256(data) != expected["sha256"]:
        raise CheckpointError(f"{path}: expected SHA-256 {expected['sha256']}, found {_sha256(data)}")
    return data


def _config(folder: Path, data: bytes, tensors: int) -> TrainingConfig:
    """The config; CheckpointError if its model has more layers than there are `tensors`, which would not end."""
    values = _json(folder / "config.json", data)
    try:
        config = make_config(values.pop("recipe"), values, "config.json")
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise CheckpointError(f"{folder}: config.json does not describe a run: {error}") from error
    layers = config.model.get("layers", 1)
    if isinstance(layers, int) and layers > tensors:
        raise CheckpointError(f"{folder}: config.json: {layers} layers are configured; there are {tensors} tensors")
    return config


def _tensor_count(folder: Path, expected: Mapping[str, Mapping[str, Any]]) -> int:
    safetensors, path = require("safetensors"), folder / FILES[0]
    _check_size(path, expected[FILES[0]])
    try:
        return len(safetensors.safe_open(path, framework="pt").keys())
    except safetensors.SafetensorError as error:
        raise CheckpointError(f"{path}: not a safetensors file: {error}") from error


def _tensors(path: Path, data: bytes) -> dict[str, Tensor]:
    try:
        return require("safetensors.torch").load(data)
    except (require("safetensors").SafetensorError, ValueError) as error:
        raise CheckpointError(f"{path}: not a safetensors file: {error}") from error


def _json(path: Path, data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected an object, found a {type(value).__name__}")
    return value


def _dump(value: dict[str, Any]) -> bytes:
    return json.dumps(value, indent=1).encode()


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def random_state(device: torch.device) -> dict[str, Any]:
    """The states of the Python, NumPy and PyTorch generators and of the device's generator, as JSON values."""
    version, words, gauss = random.getstate()
    numpy_state: Any = numpy.random.get_state(legacy=True)
    _, numpy_words, position, has_gauss, cached = numpy_state
    state = {
        "python": [version, list(words), gauss],
        "numpy": [numpy_words.tolist(), position, has_gauss, cached],
        "torch": _base64(torch.get_rng_state()),
    }
    if device.type == "cuda":
        state["cuda"] = _base64(torch.cuda.get_rng_state(device))
    return state


def restore_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Restore every generator to the state that `random_state` returned."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    numpy_words, position, has_gauss, cached = state["numpy"]
    if not 0 <= position <= len(numpy_words):  # NumPy would read beyond the state
        raise ValueError(f"random: NumPy's position must be at most {len(numpy_words)}; got {position}")
    numpy.random.set_state(("MT19937", numpy.array(numpy_words, dtype=numpy.uint32), position, has_gauss, cached))
    torch.set_rng_state(_from_base64(state["torch"]))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(_from_base64(state["cuda"]), device)


def _base64(tensor: Tensor) -> str:
    return base64.b64encode(tensor.numpy().tobytes()).decode()


def _from_base64(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
