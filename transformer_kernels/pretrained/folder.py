"""Files of a Hugging Face folder: JSON objects and safetensors. Tensors are described first and read one at a time."""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "model.pt", "model.pth")
FLOATS = ("F64", "F32", "F16", "BF16")
MAX_JSON_BYTES = 64 << 20


class Stored(NamedTuple):
    """A tensor in a file: its entry in the header, and a function that reads it."""

    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], Tensor]


def check_regular(path: Path) -> None:
    """FileNotFoundError or ValueError unless `path` is a regular file; a FIFO would block, a device never ends."""
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file")
    if not path.is_file():
        raise ValueError(f"{path}: must be a regular file")


def read_text(path: Path) -> str:
    """The text of a regular file in UTF-8, without a byte order mark.

    Raises:
        ValueError: not UTF-8, or no regular file.
    """
    check_regular(path)
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}") from error


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; NaN and infinities, which are not JSON, and names that are given twice are refused."""
    check_regular(path)
    if (size := path.stat().st_size) > MAX_JSON_BYTES:
        raise ValueError(f"{path}: must have at most {MAX_JSON_BYTES} bytes; got {size}")
    text = read_text(path)
    try:
        value = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: must contain an object; got {type(value).__name__}")
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"the number {name}")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError(f"{Counter(name for name, _ in pairs).most_common(1)[0][0]!r} is given twice")
    return values


def read_weights(folder: Path) -> dict[str, Stored]:
    """The tensors of the folder. As in transformers, model.safetensors takes precedence over an index."""
    adapter = folder / "adapter_config.json"
    if adapter.exists():
        raise ValueError(f"{adapter}: the folder has an adapter; merge it into the weights first (merge_and_unload)")
    if (folder / WEIGHTS).exists():
        if (folder / INDEX).exists():
            warnings.warn(f"{folder}: {WEIGHTS} is read; {INDEX} is ignored, as in transformers", stacklevel=4)
        return _tensors(folder / WEIGHTS)
    if (folder / INDEX).exists():
        return _shards(folder)
    pickle = next((name for name in PICKLES if (folder / name).exists()), None)
    if pickle:
        remedy = f"{pickle} is a pickle, which is never loaded: save the model as safetensors"
        raise ValueError(f"{folder / WEIGHTS}: no such file; {remedy}")
    raise FileNotFoundError(f"{folder / WEIGHTS}: no such file")


def _shards(folder: Path) -> dict[str, Stored]:
    """The tensors of a sharded model, each of the file that the index names for it."""
    index = folder / INDEX
    files = read_object(index).get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
        raise ValueError(f"{index}: no weight_map from tensors to files")
    weights: dict[str, Stored] = {}
    for name in sorted(set(files.values())):
        if Path(name).name != name:
            raise ValueError(f"{index}: weight_map must name files of the folder; got {name!r}")
        found = _tensors(folder / name)
        listed = {tensor for tensor, file in files.items() if file == name}
        if found.keys() != listed:
            raise ValueError(f"{folder / name}: not the tensors that {INDEX} lists: {_some(found.keys() ^ listed)}")
        weights.update(found)
    return weights


def _some(names: Iterable[str], count: int = 5) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:count]) + (f" and {len(ordered) - count} more" if len(ordered) > count else "")


def _tensors(file: Path) -> dict[str, Stored]:
    from safetensors import SafetensorError, safe_open

    check_regular(file)
    try:
        opened = safe_open(file, framework="pt")
        views = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 - not a dict
    except SafetensorError as error:
        raise ValueError(f"{file}: truncated or not safetensors: {error}") from None

    def stored(name: str) -> Stored:
        return Stored(tuple(views[name].get_shape()), views[name].get_dtype(), lambda: opened.get_tensor(name))

    return {name: stored(name) for name in views}
