"""Models and texts small enough for runs of a second."""

import pytest
import torch

from transformer_kernels.training import CharGPTConfig, ImdbConfig

torch.set_num_threads(1)  # tensors of these sizes only lose by more

TINY_MODEL = {"layers": 1, "width": 16, "heads": 2}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache folder of the test's own."""
    monkeypatch.setenv("TRANSFORMER_KERNELS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog\n" * 40, encoding="utf-8")
    return path


@pytest.fixture
def char_config(tmp_path, text_file):
    """Makes configs of a character GPT that trains in a blink."""

    def make(**changes):
        usual = {
            "corpus": str(text_file),
            "out": str(tmp_path / "run"),
            "model": TINY_MODEL,
            "context": 8,
            "batch_size": 4,
            "warmup_steps": 2,
            "steps": 6,
            "log_every": 2,
            "eval_every": 3,
            "save_every": 100,
            "progress": False,
        }
        return CharGPTConfig(**{**usual, **changes})

    return make


@pytest.fixture
def reviews_file(tmp_path):
    path = tmp_path / "reviews.csv"
    good = [f"a great film number {n}, wonderful and moving,positive" for n in range(24)]
    bad = [f"a dull film number {n}, terrible and boring,negative" for n in range(24)]
    rows = [
        f'"{line.rpartition(",")[0]}",{line.rpartition(",")[2]}'
        for pair in zip(good, bad, strict=True)
        for line in pair
    ]
    path.write_text("\n".join(["review,sentiment", *rows]) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def imdb_config(tmp_path, reviews_file):
    """Makes configs of a tiny classifier on bytes."""

    def make(**changes):
        usual = {
            "data": str(reviews_file),
            "test_data": str(reviews_file),
            "out": str(tmp_path / "run"),
            "tokenizer": "bytes",
            "model": TINY_MODEL,
            "max_length": 64,
            "batch_size": 8,
            "warmup_steps": 2,
            "steps": 4,
            "log_every": 2,
            "eval_every": 2,
            "progress": False,
        }
        return ImdbConfig(**{**usual, **changes})

    return make
