"""The GPT on byte pairs learns Shakespeare, as far as two hundred steps go."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from transformer_kernels.training import Trainer
from transformer_kernels.training.recipes.gpt import GPTRecipe, GPTRecipeConfig


@pytest.mark.slow
def test_byte_pairs_of_shakespeare(tmp_path):
    checkout = Path(__file__).parents[3]
    data = Path(os.environ.get("TRANSFORMER_KERNELS_DATA") or checkout.parent / "shared" / "data")
    if not (data / "gpt2_bpe").is_dir():
        pytest.skip("no real data: set TRANSFORMER_KERNELS_DATA to a folder with gpt2_bpe and tinyshakespeare")
    options = {"corpus": "tinyshakespeare", "data_dir": str(data), "vocab_dir": str(data / "gpt2_bpe")}
    sizes = {"width": 64, "layers": 2, "heads": 2}
    run = {"steps": 200, "batch_size": 16, "context": 64, "lr": 3e-3, "progress": False, "out": str(tmp_path / "run")}
    recipe = GPTRecipe(GPTRecipeConfig(**options, **run, model=sizes))
    assert (len(recipe.training.tokens), len(recipe.validation.tokens)) == (301_966, 36_059)
    assert Trainer(recipe).fit().best_loss < 6.3
