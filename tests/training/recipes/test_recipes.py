"""A recipe is one file and one entry, and is then available in every command."""

import dataclasses
import json
import math
import textwrap

import pytest

from transformer_kernels import cli
from transformer_kernels.training import CharGPT, CheckpointError, Trainer, load_trained
from transformer_kernels.training.recipes import ENTRIES, find_recipe, make_config, recipes

PARITY = '''
"""A recipe of another package: whether a run of zeros and ones has an even number of ones."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from transformer_kernels.training.config import TrainingConfig, option
from transformer_kernels.training.recipes import Classified, Recipe
from transformer_kernels.training.step import Batch


@dataclass(kw_only=True)
class ParityConfig(TrainingConfig):
    """Distinguishes even numbers of ones from odd ones."""

    recipe: ClassVar[str] = "parity"
    default_length: ClassVar[tuple[str, int]] = ("steps", 5)

    digits: int = option(4, "zeros and ones in a row", fixed=True)
    shift: int = option(0, "added to the digits", later={"evaluate": "shift"})


class Parity(Recipe):
    Config = ParityConfig

    def __init__(self, config, tokenizer=None):
        self.config, self.train_length, self.fingerprint = config, 2**config.digits, str(config.digits)

    @classmethod
    def build(cls, config, tokenizer):
        return nn.Sequential(nn.Linear(config.digits, 16), nn.ReLU(), nn.Linear(16, 2))

    @staticmethod
    def loss(model, inputs, targets):
        return nn.functional.cross_entropy(model(*inputs), targets)

    def batch(self, indices, device):
        bits = indices[:, None] >> torch.arange(self.config.digits) & 1
        return Batch((bits.float() + self.config.shift,), bits.sum(1) % 2, bits.numel())

    def validation_batches(self, device, processes):
        yield self.batch(torch.arange(self.train_length), device)

    @classmethod
    def classify(cls, trained, texts):
        rows = torch.tensor([[float(digit) for digit in text] for text in texts])
        return Classified(("even", "odd"), trained.model(rows).softmax(-1).detach())
'''


@pytest.fixture
def parity(tmp_path, monkeypatch):
    """Installs a package of one module with one entry point."""
    site = tmp_path / "site"
    (site / "parity-1.0.dist-info").mkdir(parents=True)
    (site / "parity-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: parity\nVersion: 1.0\n")
    points = ["[transformer_kernels.recipes]", "parity = parity_recipe:Parity", "imdb = parity_recipe:Parity"]
    points += ["broken = no_such_module:Broken"]
    (site / "parity-1.0.dist-info" / "entry_points.txt").write_text("\n".join(points))
    (site / "parity_recipe.py").write_text(textwrap.dedent(PARITY))
    monkeypatch.syspath_prepend(site)
    recipes.cache_clear()
    with pytest.warns(UserWarning, match="cannot be loaded"):
        recipes()
    yield
    recipes.cache_clear()


def run(*arguments):
    return cli.main([str(argument) for argument in arguments])


@pytest.mark.usefixtures("parity")
def test_the_recipe_of_another_package_works_in_every_command(tmp_path, capsys):
    out = tmp_path / "run"
    (tmp_path / "run.json").write_text(json.dumps({"digits": 3, "lr": 0.01}))
    assert run("train", "parity", "--config", tmp_path / "run.json", "--batch-size", 4, "--out", out) == 0
    assert "after step 5 of 5" in capsys.readouterr().out
    assert run("train", "parity", "--resume", out, "--steps", 7, "--no-progress") == 0
    assert "after step 7 of 7" in capsys.readouterr().out
    assert run("evaluate", "--checkpoint", out) == 0
    printed = capsys.readouterr().out
    assert "on 8 targets" in printed
    assert run("evaluate", "--checkpoint", out, "--shift", 1) == 0
    assert capsys.readouterr().out != printed
    assert run("classify", "--checkpoint", out, "101", "100") == 0
    assert {line.split()[0] for line in capsys.readouterr().out.splitlines()} <= {"even", "odd"}
    assert run("generate", "--checkpoint", out) == 1
    assert "expected a model of char-gpt or gpt, found one of parity" in capsys.readouterr().err
    assert run("evaluate", "--checkpoint", out, "--baseline") == 1
    assert "--baseline is not an option of parity" in capsys.readouterr().err


@pytest.mark.usefixtures("parity")
def test_help_knows_the_recipe_of_another_package(capsys):
    for arguments, printed in (
        (["train"], "Distinguishes even numbers of ones from odd ones."),
        (["train", "parity"], "zeros and ones in a row (default: 4)"),
        (["train", "parity"], "total number of optimizer steps (default: 5)"),
        (["evaluate"], "parity: added to the digits"),
    ):
        with pytest.raises(SystemExit):
            run(*arguments, "--help")
        assert printed in " ".join(capsys.readouterr().out.split())


@pytest.mark.usefixtures("parity")
def test_an_entry_that_cannot_be_loaded_or_takes_a_name_changes_nothing():
    assert list(recipes()) == [*ENTRIES, "parity"]
    assert find_recipe("imdb").__name__ == "Imdb"


@pytest.mark.parametrize("name", ENTRIES)
def test_every_entry_has_a_description_and_help_for_each_option(name):
    config = find_recipe(name).Config
    assert (config.recipe, bool(config.__doc__)) == (name, True)
    assert all(spec.metadata["help"] for spec in dataclasses.fields(config))


def test_an_unknown_recipe_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"recipe must be one of char-gpt, gpt, imdb.*; got 'gpt-5'"):
        make_config("gpt-5", {})


def test_a_model_of_another_recipe_is_refused(char_config):
    Trainer(CharGPT(char_config())).fit()
    with pytest.raises(CheckpointError, match="expected a model of imdb or vit, found one of char-gpt"):
        load_trained(char_config().out, command="classify")
    with pytest.raises(CheckpointError, match="expected a model of imdb, found one of char-gpt"):
        load_trained(char_config().out, recipe="imdb")


def test_perplexity_is_that_of_tokens_only():
    described = {name: recipe.describe_loss(math.log(2.0)) for name, recipe in recipes().items()}
    of_tokens = {name for name, text in described.items() if text == "loss 0.6931, perplexity 2.000"}
    assert of_tokens == {"char-gpt", "gpt", "mlm", "translate"}
    assert {described[name] for name in described.keys() - of_tokens} == {"loss 0.6931"}
    assert CharGPT.describe_loss(1e4) == "loss 10000.0000, perplexity inf"
    assert CharGPT.describe_loss(math.nan) == "loss nan, perplexity nan"
