"""The GPT on byte pairs learns Shakespeare, as far as two hundred steps go."""

import os
from pathlib import Path

import pytest

from tests.support.day import on_turn
from transformer_kernels import cli
from transformer_kernels.training import Trainer, load_trained
from transformer_kernels.training.recipes.gpt import GPTRecipe, GPTRecipeConfig


@pytest.mark.slow
@on_turn(1)
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


@pytest.mark.parametrize("recipe", ["char-gpt", "gpt"])
def test_the_definition_with_experts_trains_resumes_and_writes(recipe, tmp_path, capsys):
    (tmp_path / "text.txt").write_text("the cat sat on the mat. " * 40)
    out = str(tmp_path / "run")
    tokenizer = ["--tokenizer", "bytes"] if recipe == "gpt" else []
    sizes = [part for size in ("width=16", "heads=2", "layers=2", "ffn_width=16") for part in ("--model", size)]
    options = [
        "--steps",
        "6",
        "--batch-size",
        "4",
        "--context",
        "16",
        "--no-sample",
        "--no-progress",
        *sizes,
        *tokenizer,
    ]
    train = ["train", recipe, "--preset", "deepseek", "--corpus", str(tmp_path / "text.txt"), "--out", out, *options]
    assert cli.main(train) == 0
    model = load_trained(out).model
    assert type(model).__name__ == "Deepseek"
    assert model.blocks[1].feed_forward.balance.abs().max() > 0  # saved with the weights
    assert cli.main(["train", recipe, "--resume", out, "--steps", "8"]) == 0
    capsys.readouterr()
    assert cli.main(["generate", "--checkpoint", out, "--prompt", "the ", "--length", "8"]) == 0
    assert capsys.readouterr().out.startswith("the ")
