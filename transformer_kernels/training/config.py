"""The options of a training run.

Each recipe has one dataclass, which defines its command line, config file and Python API.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import reprlib
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from transformer_kernels._bind import build
from transformer_kernels.backends.dispatch import BACKENDS as NAMED_BACKENDS
from transformer_kernels.pretrained.folder import read_object, read_text
from transformer_kernels.training._optional import require

BACKENDS = ("auto", *NAMED_BACKENDS, "reference")
DTYPES = ("auto", "float32", "tf32", "bfloat16", "float16")
UNITS = {"s": 1, "m": 60, "h": 3600}
LEAST_1 = ("steps", "epochs", "batch_size", "accumulate", "log_every", "eval_every", "save_every")
LIMITS = {"threads": 4096, "lr": 1e30}  # OpenMP ends a process that cannot start a thread; the rate is a float32
LENGTHS = {"steps": None, "epochs": None, "time_limit": 0.0}  # options that end a run, with the values that do not


def option(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] | None = None,
    fixed: bool = False,
    later: Mapping[str, str] | None = None,
) -> Any:
    """A field with its help text.

    Args:
        default: default value of the field.
        help: text for `train --help`.
        choices: allowed values.
        fixed: the option cannot change when a run is resumed.
        later: commands that accept the option for a trained model, each with the name of its flag there.
    """
    metadata = {"help": help, "choices": choices, "fixed": fixed, "later": dict(later or {})}
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata=metadata)
    return field(default=default, metadata=metadata)


class Duration(float):
    """Seconds, from a number or a text such as `90`, `90s`, `5m` or `1h`."""

    def __new__(cls, value: Any) -> Duration:
        if isinstance(value, str) and value[-1:] in UNITS:
            return super().__new__(cls, float(value[:-1]) * UNITS[value[-1]])
        return super().__new__(cls, value)


@dataclass(kw_only=True)
class TrainingConfig:
    """Options shared by all recipes."""

    out: str = option("", "output folder for checkpoints and log.jsonl (default: runs/RECIPE, or a new runs/RECIPE-N)")
    backend: str = option("auto", "kernel backend", choices=BACKENDS)
    device: str = option("auto", "cpu, cuda, cuda:1, ...; auto selects a GPU if there is one")
    dtype: str = option(
        "float32",
        "training precision; tf32 uses TF32 matrix products where the device supports them, bfloat16 and float16 use "
        "autocast; weights and statistics are float32; auto: bfloat16 where the device multiplies matrices of it",
        choices=DTYPES,
        fixed=True,
    )
    compile: bool = option(False, "compile the model with torch.compile")
    cuda_graph: str = option(
        "auto",
        "replay each step from a CUDA graph, or on a CPU from a recorded call list; auto: where supported",
        choices=("auto", "on", "off"),
    )
    threads: int = option(0, "number of PyTorch CPU threads; 0: PyTorch's default (physical cores or OMP_NUM_THREADS)")
    seed: int = option(0, "random seed of initialisation, data order and dropout", fixed=True)
    deterministic: bool = option(False, "use only deterministic PyTorch operators")
    reproducible: bool = option(
        False, "weights have the same bits on every CPU with AVX2, at any number of threads", fixed=True
    )
    steps: int | None = option(None, "total number of optimizer steps")
    epochs: int | None = option(None, "number of epochs, instead of --steps")
    time_limit: Duration | float = option(  # noqa: RUF009
        Duration(0), "length of the run as time (300, 5m, 1h), over which the schedule anneals; 0: no limit"
    )
    batch_size: int = option(64, "batch size per process", fixed=True)
    accumulate: int = option(1, "compute each batch in N parts and accumulate their gradients, to save memory")
    optimizer: str = option(
        "adamw", "adamw, or muon for the matrices of the blocks", choices=("adamw", "muon"), fixed=True
    )
    lr: float = option(3e-3, "peak learning rate")
    warmup_steps: int = option(100, "linear learning-rate warmup steps, at most a tenth of all steps")
    schedule: str = option(
        "cosine",
        "schedule after warmup; cosine decays to lr / 10, linear to 0",
        choices=("constant", "cosine", "linear"),
    )
    weight_decay: float = option(0.01, "weight decay, applied to matrices only")
    beta2: float = option(0.999, "AdamW beta2: decay rate of the second-moment estimate")
    clip: float = option(1.0, "maximum gradient norm; 0 disables clipping")
    log_every: int = option(20, "log every N steps")
    eval_every: int = option(250, "run validation every N steps")
    save_every: int = option(500, "save the last checkpoint every N steps")
    patience: int = option(0, "stop after N validations without improvement; 0 disables early stopping")
    tensorboard: bool = option(False, "also write TensorBoard events (pip install tensorboard)")
    progress: bool = option(True, "show a progress bar if stderr is a terminal")
    model: dict = option({}, "set a model field, NAME=VALUE as in python_ref (repeatable)", fixed=True)  # noqa: RUF009

    recipe: typing.ClassVar[str] = ""
    default_config: typing.ClassVar[str] = ""  # the bundled config that `train` uses without --config
    default_length: typing.ClassVar[tuple[str, int]] = ("epochs", 1)  # used if no length is given
    counts: typing.ClassVar[tuple[str, ...]] = LEAST_1  # options of at least 1
    fractions: typing.ClassVar[tuple[str, ...]] = ("beta2",)  # options in [0, 1)
    limits: typing.ClassVar[dict[str, float]] = LIMITS  # options and their largest value

    def __post_init__(self) -> None:
        for spec, kind in typed_fields(type(self)):
            value = convert(spec.name, getattr(self, spec.name), kind)
            choices = spec.metadata["choices"]
            if choices and value not in choices:
                raise ValueError(f"{spec.name} must be one of {', '.join(choices)}; got {value!r}")
            setattr(self, spec.name, value)
        if self.steps is not None and self.epochs is not None:
            raise ValueError(f"steps and epochs exclude each other; got steps {self.steps} and epochs {self.epochs}")
        if self.steps is None and self.epochs is None and not self.time_limit:
            setattr(self, *self.default_length)
        for name in self.counts:
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}")
        for name in ("lr", "warmup_steps", "weight_decay", "clip", "patience", "time_limit", "seed", "threads"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be finite and not negative; got {getattr(self, name)}")
        for name, most in self.limits.items():
            if getattr(self, name) > most:
                raise ValueError(f"{name} must be at most {most:,}; got {getattr(self, name)}")
        for name in self.fractions:
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be in [0, 1); got {getattr(self, name)}")

    @classmethod
    def from_values(cls, values: Mapping[str, Any], source: str = "config") -> Any:
        """A copy with these values; an unknown name raises ValueError and suggests the closest known one."""
        names = [spec.name for spec in dataclasses.fields(cls)]
        chosen = {}
        for key, value in values.items():
            name = str(key).replace("-", "_")
            if name == "recipe" and value == cls.recipe:
                continue
            if name == "recipe":
                raise ValueError(f"{source}: written for the recipe {value!r}, not for {cls.recipe!r}")
            if name not in names:
                closest = difflib.get_close_matches(name, names, n=1)
                hint = f"; did you mean {closest[0]!r}?" if closest else f"; known: {', '.join(names)}"
                raise ValueError(f"{source}: unknown key {str(key)!r} for {cls.recipe}{hint}")
            chosen[name] = value
        return cls(**chosen)


def typed_fields(config: type[TrainingConfig]) -> list[tuple[dataclasses.Field, Any]]:
    """The fields of a recipe's config with their types."""
    hints = typing.get_type_hints(config)
    return [(spec, hints[spec.name]) for spec in dataclasses.fields(config)]


def convert(name: str, value: Any, kind: Any) -> Any:
    """`value` converted to `kind`: YAML parses 3e-4 as text, and command-line values are text."""
    allowed = typing.get_args(kind) or (kind,)
    if value is None and type(None) in allowed:
        return None
    kind = allowed[0]
    if kind is bool and isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    try:
        converted = kind(value)
    except (TypeError, ValueError):
        converted = None
    lost = converted is None or (kind in (int, str, bool) and not isinstance(value, str) and converted != value)
    if lost or isinstance(value, bool) != (kind is bool) or (kind is str and "\0" in converted):
        wanted = "a duration such as 90, 5m or 1h" if kind is Duration else f"of type {kind.__name__}"
        raise ValueError(f"{name} must be {wanted}; got {reprlib.repr(value)}")
    if kind is int and not -(2**63) <= converted < 2**63:
        raise ValueError(f"{name} must be an integer of 64 bits; got {reprlib.repr(converted)}")
    return converted


def bundled_configs(recipe: str = "") -> dict[str, Path]:
    """The bundled config files by name: all, or those written for `recipe`."""
    paths = sorted((Path(__file__).parent / "configs").glob("*.yaml"))
    return {path.stem: path for path in paths if not recipe or f"recipe: {recipe}\n" in path.read_text("utf-8")}


def read_config_file(path: str | Path) -> dict[str, Any]:
    """The names and values in a YAML, TOML or JSON file, or in the bundled config of that name."""
    bundled, path = bundled_configs(), Path(path)
    if not path.is_file():
        path = bundled.get(str(path), path)
    if not path.suffix and not path.exists():
        raise ValueError(f"{path}: no such config file; the bundled ones are {', '.join(bundled)}")
    if path.is_dir():
        raise ValueError(f"{path}: a folder; a config is a .yaml, .toml or .json file, or one of {', '.join(bundled)}")
    if path.suffix not in READERS:
        raise ValueError(f"{path}: a config file ends in .yaml, .yml, .toml or .json")
    values = READERS[path.suffix](path)
    if not isinstance(values, dict | None):
        raise ValueError(f"{path}: expected names and values at the top level; got a {type(values).__name__}")
    return values or {}


def _read_toml(path: Path) -> Any:
    try:
        import tomllib
    except ImportError:
        tomllib = require("tomli")
    text = read_text(path)
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not valid TOML: {error}") from error


def _read_yaml(path: Path) -> Any:
    yaml: Any = require("yaml")

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            seen = set()
            for name in (name.value for name, _ in node.value if isinstance(name, yaml.ScalarNode)):
                if name in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"{name} is given twice", node.start_mark)
                seen.add(name)
            return super().construct_mapping(node, deep)

    text = read_text(path)
    try:
        return yaml.load(text, Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        raise ValueError(f"{path}{where}: not valid YAML: {getattr(error, 'problem', None) or error}") from error


READERS = {".yaml": _read_yaml, ".yml": _read_yaml, ".toml": _read_toml, ".json": read_object}


def resumed_config(saved: TrainingConfig, changes: Mapping[str, Any]) -> Any:
    """The config of a checkpoint with `changes`; ValueError if one of them would prevent exact resumption."""
    automatic = [spec.name for spec in dataclasses.fields(saved) if spec.metadata["fixed"]]  # decided at the start
    changes = {name: value for name, value in changes.items() if value != "auto" or name not in automatic}
    merged = saved.from_values({**dataclasses.asdict(saved), **replaced_length(changes)}, "--resume")
    for spec in dataclasses.fields(saved):
        before, after = getattr(saved, spec.name), getattr(merged, spec.name)
        if spec.metadata["fixed"] and before != after:
            raise ValueError(f"--resume: {spec.name} cannot change: {before!r} in the checkpoint, {after!r} requested")
    return merged


def add_option(parser: Any, name: str, default: Any, help: str, metavar: str | None = None, **more: Any) -> None:
    """Add an option to a parser: of the type of its default, which the help states, or a switch if that is False."""
    if default is False:
        parser.add_argument(name, action="store_true", help=help)
        return
    shown = f"{default:g}" if isinstance(default, float) else default
    if default not in (None, "") and "default:" not in help:
        help += f" (default: {shown})"
    more = {"type": str if default is None else type(default)} | more
    parser.add_argument(name, default=default, metavar=metavar, help=help, **more)


def replaced_length(changes: Mapping[str, Any]) -> dict[str, Any]:
    """`changes` with the other lengths unset if there is one among them: --steps replaces --epochs and --time-limit."""
    return {**(LENGTHS if LENGTHS.keys() & changes.keys() else {}), **changes}


def build_preset(name: str, config: TrainingConfig, **decided: int) -> nn.Module:
    """A newly initialised `transformer_kernels.build(name)` with `config.model` applied to the preset.

    Args:
        name: of the preset.
        config: `backend` and `model` are used.
        decided: fields that are determined by the data or other options, such as vocab_size and context.

    Raises:
        ValueError: a field does not exist, is invalid, or is one of `decided`.
    """
    if taken := sorted(decided.keys() & config.model.keys()):
        raise ValueError(f"model: {', '.join(taken)} cannot be set here: the data and the other options decide")
    try:
        return build(name, backend=config.backend, **decided, **config.model)
    except TypeError as error:
        reason = str(error).partition("\n")[0]  # PyTorch adds a stack of C++ where a number is too large
        raise ValueError(f"model: {reason}") from error
