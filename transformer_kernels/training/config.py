"""What a training run can be told.

One dataclass per recipe is its command line, its config file and its Python API.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformer_kernels.training._optional import require

BACKENDS = ("auto", "torch", "triton", "cuda", "reference")
DTYPES = ("float32", "tf32", "bfloat16", "float16")


def option(default: Any, help: str, *, choices: tuple[str, ...] | None = None, fixed: bool = False) -> Any:
    """A field with its help text; `fixed` marks what a resumed run may not change."""
    metadata = {"help": help, "choices": choices, "fixed": fixed}
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(kw_only=True)
class TrainingConfig:
    """What every recipe understands."""

    out: str = option("", "folder for checkpoints and log.jsonl (default: runs/<recipe>)")
    backend: str = option("auto", "whose kernels run the model", choices=BACKENDS)
    device: str = option("auto", "cpu, cuda, cuda:1, ...; auto takes the GPU if there is one")
    dtype: str = option(
        "float32",
        "tf32 rounds the factors of matrix products, where the device can; the half precisions are autocast's; weights "
        "and statistics stay float32",
        choices=DTYPES,
        fixed=True,
    )
    compile: bool = option(False, "compile the model with torch.compile")
    cuda_graph: str = option(
        "auto",
        "replay each step as one CUDA graph; auto does so on a GPU where it can, and else tells why not",
        choices=("auto", "on", "off"),
    )
    threads: int = option(0, "CPU threads of PyTorch; 0 leaves its own choice, the physical cores or OMP_NUM_THREADS")
    seed: int = option(0, "of the initial weights, the order of the data and dropout", fixed=True)
    deterministic: bool = option(False, "use only PyTorch operators that give the same bits every time")
    steps: int | None = option(None, "optimizer steps in all (default: char-gpt 2000)")
    epochs: int | None = option(None, "passes over the data, in place of --steps (default: imdb 3)")
    time_limit: float = option(0.0, "stop after so many seconds of training; 0 means never")
    batch_size: int = option(64, "items a step, in each process", fixed=True)
    lr: float = option(3e-3, "peak learning rate of AdamW")
    warmup_steps: int = option(100, "steps in which the learning rate rises from zero, a tenth of all steps at most")
    schedule: str = option("cosine", "what follows the warm-up; cosine ends at a tenth", choices=("constant", "cosine"))
    weight_decay: float = option(0.01, "of AdamW, on matrices only")
    beta2: float = option(0.999, "of AdamW: how much of the mean of squared gradients a step keeps")
    clip: float = option(1.0, "largest norm of all gradients together; 0 means no clipping")
    log_every: int = option(20, "steps between lines of the log")
    eval_every: int = option(250, "steps between validations")
    save_every: int = option(500, "steps between saves of the last checkpoint")
    patience: int = option(0, "stop after so many validations without a better loss; 0 means never")
    tensorboard: bool = option(False, "also write TensorBoard events (pip install 'transformer_kernels[tensorboard]')")
    progress: bool = option(True, "show a progress bar")
    model: dict = option({}, "another model size, NAME=VALUE as in python_ref (repeatable)", fixed=True)  # noqa: RUF009

    recipe: typing.ClassVar[str] = ""

    def __post_init__(self) -> None:
        for spec, kind in typed_fields(type(self)):
            value = convert(spec.name, getattr(self, spec.name), kind)
            choices = spec.metadata["choices"]
            if choices and value not in choices:
                raise ValueError(f"{spec.name} must be one of {', '.join(choices)}; got {value!r}")
            setattr(self, spec.name, value)
        self.out = self.out or f"runs/{self.recipe}"
        if self.steps is not None and self.epochs is not None:
            raise ValueError(f"steps and epochs exclude each other; got steps {self.steps} and epochs {self.epochs}")
        for name in ("steps", "epochs", "batch_size", "log_every", "eval_every", "save_every"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}")
        for name in ("lr", "warmup_steps", "weight_decay", "clip", "patience", "time_limit", "seed", "threads"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be finite and not negative; got {getattr(self, name)}")

        if not 0 <= self.beta2 < 1:
            raise ValueError(f"beta2 must be in [0, 1); got {self.beta2}")


@dataclass(kw_only=True)
class CharGPTConfig(TrainingConfig):
    """A GPT that reads and writes one character at a time."""

    recipe: typing.ClassVar[str] = "char-gpt"

    corpus: str = option(
        "stdlib",
        "stdlib (the source text of Python's standard library), tinyshakespeare (downloaded once), or a text file",
        fixed=True,
    )
    data_dir: str = option("", "folder that holds tinyshakespeare's input.txt already")
    split: str = option(
        "90/10", "keep the last tenth for validation, or train on every offset", choices=("90/10", "none"), fixed=True
    )
    context: int = option(64, "characters that the model sees", fixed=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps is None and self.epochs is None:
            self.steps = 2000


@dataclass(kw_only=True)
class ImdbConfig(TrainingConfig):
    """A BERT that tells good film reviews from bad ones."""

    recipe: typing.ClassVar[str] = "imdb"

    batch_size: int = option(16, "reviews a step, in each process", fixed=True)
    lr: float = option(3e-4, "peak learning rate of AdamW")
    data: str = option(
        "",
        "the aclImdb folder, a folder with train.* and test.*, or a train file (CSV, JSONL, Parquet; .gz, .xz)",
    )
    test_data: str = option("", "the test file, when --data is a file")
    validation: float = option(0.1, "part of the training reviews kept for validation", fixed=True)
    tokenizer: str = option("gpt2", "GPT-2 byte pairs, or plain bytes", choices=("gpt2", "bytes"), fixed=True)
    vocab_dir: str = option("", "folder with GPT-2's vocab.bpe, for machines without a network")
    max_length: int = option(256, "tokens of a review, CLS and SEP included", fixed=True)
    truncation: str = option("head", "which part of a long review is read", choices=("head", "head+tail"), fixed=True)
    batching: str = option(
        "shuffled",
        "which reviews meet in a batch: any; those of similar length, so that less is padded; or such that the lengths "
        "add up alike, to lie one after the other without padding, in batches of one shape",
        choices=("shuffled", "bucketed", "packed"),
        fixed=True,
    )
    padding: str = option(
        "longest",
        "pad to the longest review of the batch, that length up to a multiple of 32 (few shapes, for CUDA graphs), or "
        "always to --max-length",
        choices=("longest", "multiple", "max"),
        fixed=True,
    )
    sparse_embedding: bool = option(
        False,
        "update only the batch's rows of the token embedding; this changes the mathematics: moments of absent rows do "
        "not decay, and the rows stay as they are; one process only",
        fixed=True,
    )
    baseline: bool = option(False, "also report the accuracy of TF-IDF with logistic regression")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps is None and self.epochs is None:
            self.epochs = 3
        if not 0 <= self.validation < 1:
            raise ValueError(f"validation must be in [0, 1); got {self.validation}")
        if self.max_length < 3:
            raise ValueError(f"max_length must leave room for CLS, SEP and a token: at least 3; got {self.max_length}")


CONFIGS: dict[str, type[TrainingConfig]] = {"char-gpt": CharGPTConfig, "imdb": ImdbConfig}


def typed_fields(config: type[TrainingConfig]) -> list[tuple[dataclasses.Field, Any]]:
    """The options of a recipe with their types."""
    hints = typing.get_type_hints(config)
    return [(spec, hints[spec.name]) for spec in dataclasses.fields(config)]


def convert(name: str, value: Any, kind: Any) -> Any:
    """`value` as `kind`: YAML reads 3e-4 as text, and a command line gives nothing else."""
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
    if lost or (kind is bool and not isinstance(value, bool)):
        raise ValueError(f"{name} must be of type {kind.__name__}; got {value!r}")
    return converted


def make_config(recipe: str, values: Mapping[str, Any], source: str = "config") -> Any:
    """The config of `recipe` from names and values; an unknown name is an error that tells the closest one."""
    if recipe not in CONFIGS:
        raise ValueError(f"recipe must be one of {', '.join(CONFIGS)}; got {recipe!r}")
    names = [spec.name for spec in dataclasses.fields(CONFIGS[recipe])]
    chosen = {}
    for key, value in values.items():
        name = str(key).replace("-", "_")
        if name not in names:
            closest = difflib.get_close_matches(name, names, n=1)
            hint = f"; did you mean {closest[0]!r}?" if closest else f"; known: {', '.join(names)}"
            raise ValueError(f"{source}: unknown key {str(key)!r} for {recipe}{hint}")
        chosen[name] = value
    return CONFIGS[recipe](**chosen)


def shipped_configs() -> dict[str, Path]:
    """The config files that come with the package, by name."""
    return {path.stem: path for path in sorted((Path(__file__).parent / "configs").glob("*.yaml"))}


def read_config_file(path: str | Path) -> dict[str, Any]:
    """The flat table of names and values in a YAML or TOML (or JSON) file, or in the one that comes by that name."""
    shipped, path = shipped_configs(), Path(path)
    if not path.is_file():
        path = shipped.get(str(path), path)
    if not path.suffix and not path.exists():
        raise ValueError(
            f"{path}: no such config file, and the names of those that come along are {', '.join(shipped)}"
        )
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".toml":
        try:
            import tomllib
        except ImportError:
            tomllib = require("tomli")
        values = tomllib.loads(text)
    elif path.suffix == ".json":
        values = json.loads(text)
    elif path.suffix in (".yaml", ".yml"):
        yaml = require("yaml")
        try:
            values = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ValueError(f"{path}: not valid YAML: {error}") from error
    else:
        raise ValueError(f"{path}: a config file ends in .yaml, .yml, .toml or .json")
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ValueError(f"{path}: expected names and values at the top level; got a {type(values).__name__}")
    return values


def resumed_config(saved: TrainingConfig, changes: Mapping[str, Any]) -> Any:
    """The config of a checkpoint with `changes`, of which none may touch what exact resumption needs unchanged."""
    merged = make_config(saved.recipe, {**dataclasses.asdict(saved), **_one_length(changes)}, "--resume")
    for spec in dataclasses.fields(saved):
        before, after = getattr(saved, spec.name), getattr(merged, spec.name)
        if spec.metadata["fixed"] and before != after:
            raise ValueError(f"--resume: {spec.name} cannot change: {before!r} in the checkpoint, {after!r} asked for")
    return merged


def _one_length(changes: Mapping[str, Any]) -> dict[str, Any]:
    """A new --steps displaces saved --epochs, and the other way round."""
    other = {"steps": "epochs", "epochs": "steps"}
    return {**{other[name]: None for name in changes if name in other}, **changes}
