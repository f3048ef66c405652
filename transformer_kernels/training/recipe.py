"""Recipes: each is one file with a config and a class, registered by name."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from transformer_kernels.pretrained.generation import Choice, Sampling
from transformer_kernels.training.config import TrainingConfig
from transformer_kernels.training.data.sampler import ShuffledSampler
from transformer_kernels.training.data.tokenizers import from_description
from transformer_kernels.training.decoding import Search
from transformer_kernels.training.distributed import Processes
from transformer_kernels.training.step import Batch, evaluation_totals

ENTRIES = {
    "char-gpt": "transformer_kernels.training.recipes.char_gpt:CharGPT",
    "gpt": "transformer_kernels.training.recipes.gpt:GPTRecipe",
    "imdb": "transformer_kernels.training.recipes.imdb:Imdb",
    "mlm": "transformer_kernels.training.recipes.mlm:Mlm",
    "translate": "transformer_kernels.training.recipes.translate:Translate",
    "vit": "transformer_kernels.training.recipes.vit:DigitsViT",
    "word2vec": "transformer_kernels.training.recipes.word2vec:Word2Vec",
}
GROUP = "transformer_kernels.recipes"  # entry-point group of recipes in other packages


class Trained(NamedTuple):
    """A model in evaluation mode with its config, tokenizer and device."""

    model: nn.Module
    tokenizer: Any
    config: Any
    device: torch.device
    step: int
    recipe: type[Recipe]


class Classified(NamedTuple):
    """The class names, and the probabilities (texts, classes), float32 on the CPU."""

    classes: tuple[str, ...]
    probabilities: Tensor


class Translated(NamedTuple):
    """A text, its translation, the ids of both, and the characters that are not in the vocabulary."""

    text: str
    translation: str
    source: list[int]
    target: list[int]
    unseen: str


class Alignment(NamedTuple):
    """Cross-attention weights (layers, H, Lt, Ls), and the Lt and Ls tokens of target and source."""

    weights: Tensor
    target: list[str]
    source: list[str]


class Recipe(ABC):
    """A model with its data. A subclass reads the data in its constructor and sets the attributes.

    Args:
        config: an instance of `Config`.
        tokenizer: of a trained model; None to create a new one.

    Attributes:
        Config: its options; `Config.recipe` is its name on the command line.
        tokenizer: its `describe()` is stored in checkpoints; None for data without tokens.
        train_length: number of training items.
        fingerprint: hash of the training data; a run can resume only on the same data.
        targets_vary: whether batches of equally many items can have different numbers of targets.
        unit: the name of one target; if set, `evaluate` also prints the loss in bits.
        predicts_tokens: whether the loss is the cross-entropy of tokens, whose exponential is the perplexity.
    """

    Config: ClassVar[type[TrainingConfig]]

    targets_vary: ClassVar[bool] = False
    predicts_tokens: ClassVar[bool] = False
    unit: ClassVar[str] = "targets"
    tokenizer: Any = None
    train_length: int
    fingerprint: str

    @abstractmethod
    def __init__(self, config: Any, tokenizer: Any = None) -> None:
        self.config = config

    @classmethod
    @abstractmethod
    def build(cls, config: Any, tokenizer: Any) -> nn.Module:
        """A newly initialised model; on GPUs `flops_per_token(length)` is also called."""

    def build_model(self) -> nn.Module:
        """A newly initialised model for this recipe's config and tokenizer."""
        return self.build(self.config, self.tokenizer)

    def begin(self, model: nn.Module) -> None:  # noqa: B027
        """Initialise a new model before its first step; not called when a checkpoint is loaded."""

    @abstractmethod
    def batch(self, indices: Tensor, device: torch.device) -> Batch:
        """Training items at `indices`; a function of the indices alone."""

    @abstractmethod
    def validation_batches(self, device: torch.device, processes: Processes) -> Iterator[Batch]:
        """This process's share of the validation items; empty if there are none."""

    def loss(self, model: Any, inputs: tuple[Tensor, ...], targets: Tensor) -> Tensor:
        """The mean training loss."""
        return model.loss(*inputs, targets)

    def sampler(self, processes: Processes) -> ShuffledSampler:
        """The order of the training items."""
        config = self.config
        return ShuffledSampler(self.train_length, config.batch_size, config.seed, processes.rank, processes.count)

    def report(self, model: nn.Module, device: torch.device) -> str:
        """The text printed at the end of a run."""
        return ""

    def evaluation_batches(self, device: torch.device) -> Iterator[Batch]:
        """The data that `evaluate` uses."""
        return self.validation_batches(device, Processes())

    @classmethod
    def load_tokenizer(cls, description: dict[str, Any], config: Any) -> Any:
        """The tokenizer that a checkpoint describes; None if it has none."""
        return from_description(description, getattr(config, "vocab_dir", "")) if description else None

    @classmethod
    def evaluate(cls, trained: Trained) -> str:
        """The text that `evaluate` prints."""
        recipe = cls(trained.config, trained.tokenizer)
        totals = evaluation_totals(trained.model, recipe.evaluation_batches(trained.device))
        if not totals.targets:
            raise ValueError(f"{trained.config.recipe}: there is no validation data to evaluate on")
        loss, accuracy = totals.loss / totals.targets, totals.correct / totals.targets
        bits = f", {loss / math.log(2):.4f} bits per {cls.unit[:-1]}" * (cls.unit != Recipe.unit)
        return f"{cls.describe_loss(loss)}{bits}, accuracy {accuracy:.2%} on {totals.targets:.0f} {cls.unit}"

    @classmethod
    def describe_loss(cls, loss: float) -> str:
        """A mean loss as printed, with the perplexity if there is one."""
        perplexity = math.inf if loss > 700 else math.exp(loss)
        return f"loss {loss:.4f}" + f", perplexity {perplexity:.3f}" * cls.predicts_tokens

    @classmethod
    def generate(cls, trained: Trained, prompts: list[str], count: int, sampling: Sampling) -> Iterator[list[Choice]]:
        """Generate `count` tokens after each prompt, step by step; overridden by language models."""
        raise NotImplementedError

    @classmethod
    def classify(cls, trained: Trained, texts: list[str]) -> Classified:
        """The classes of texts; overridden by classifiers."""
        raise NotImplementedError

    @classmethod
    def translate(cls, trained: Trained, texts: list[str], search: Search) -> list[Translated]:
        """The translations of texts; overridden by translators."""
        raise NotImplementedError

    @classmethod
    def alignment(cls, trained: Trained, translated: Translated) -> Alignment:
        """The cross-attention weights of a translation; overridden by translators."""
        raise NotImplementedError

    @classmethod
    def supports(cls, command: str) -> bool:
        """Whether the command ("evaluate", "generate", "classify", "translate") supports models of this recipe."""
        return command == "evaluate" or getattr(cls, command).__func__ is not getattr(Recipe, command).__func__


@functools.cache
def recipes() -> Mapping[str, type[Recipe]]:
    """All recipes by name: `ENTRIES`, then the entry points of other packages."""
    found = {name: _load(name, value) for name, value in ENTRIES.items()}
    for entry in importlib.metadata.entry_points(group=GROUP):
        try:
            if entry.name in found:
                raise TypeError("the name is taken by another recipe")
            found[entry.name] = _load(entry.name, entry.value)
        except (ImportError, AttributeError, TypeError) as error:
            warnings.warn(f"recipe {entry.name!r} ({entry.value}) cannot be loaded: {error}", stacklevel=2)
    return found


def _load(name: str, value: str) -> type[Recipe]:
    module, _, attribute = value.partition(":")
    recipe = getattr(importlib.import_module(module), attribute)
    if not (isinstance(recipe, type) and issubclass(recipe, Recipe) and recipe.Config.recipe == name):
        raise TypeError(f"expected a subclass of Recipe with Config.recipe = {name!r}")
    return recipe


def find_recipe(name: str) -> type[Recipe]:
    """The recipe called `name`; ValueError lists the known ones."""
    if name not in recipes():
        raise ValueError(f"recipe must be one of {', '.join(recipes())}; got {name!r}")
    return recipes()[name]


def make_config(recipe: str, values: Mapping[str, Any], source: str = "config") -> Any:
    """The config of the recipe called `recipe`, from option names and values."""
    return find_recipe(recipe).Config.from_values(values, source)
