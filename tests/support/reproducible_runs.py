"""Tiny training runs in reproducible mode: their weights have the same bits on every processor."""

import hashlib
import json
import random
import tempfile
from pathlib import Path

import torch

from transformer_kernels.training import CharGPT, Imdb, Trainer

SMALL = {"layers": 2, "heads": 2, "width": 32, "dropout": 0.1}
RUNS = {
    "char-gpt": (CharGPT, {"context": 24, "model": {**SMALL, "ffn_width": 80}}),
    "char-gpt, muon": (
        CharGPT,
        {
            "context": 70,
            "optimizer": "muon",
            "beta2": 0.99,
            "model": {
                **SMALL,
                "ffn_width": 88,
                "qk_norm": True,
                "activation": "swiglu",
                "norm": "rms",
                "final_norm": True,
                "positions": "rotary",
                "tied": True,
                "attention_bias": False,
                "ffn_bias": False,
                "head_bias": False,
            },
        },
    ),
    "char-gpt, bfloat16": (CharGPT, {"context": 24, "dtype": "bfloat16", "model": {**SMALL, "width": 48}}),
    "imdb, packed": (Imdb, {"batching": "packed", "token_dropout": 0.3, "label_smoothing": 0.1, "model": SMALL}),
    "imdb": (Imdb, {"optimizer": "muon", "batching": "bucketed", "model": {**SMALL, "final_norm": True}}),
}
"""By name: the recipe and its options beside those of `settings`."""

STEPS = 6  # two are eager before a step is recorded


def settings(folder):
    """The options of every run."""
    return {
        "steps": STEPS,
        "batch_size": 4,
        "reproducible": True,
        "lr": 1e-2,
        "warmup_steps": 0,
        "progress": False,
        "out": str(folder / "run"),
        "eval_every": 3,
    }


WORDS = "a an the film great dull moving boring of and was is plot actor scene".split()  # noqa: SIM905


def book(folder):
    """A file of text."""
    path = folder / "book.txt"
    path.write_text(" ".join(random.Random(0).choices(WORDS, k=1500)))
    return {"corpus": str(path), "sample": False}


def reviews(folder):
    """A file of labelled texts."""
    chosen = random.Random(0)
    path = folder / "reviews.jsonl"
    texts = [" ".join(chosen.choices(WORDS, k=chosen.randrange(3, 60))) for _ in range(40)]
    lines = [json.dumps({"text": text, "label": number % 2}) for number, text in enumerate(texts)]
    path.write_text("\n".join(lines))
    return {"data": str(path), "tokenizer": "words", "vocabulary": 40, "max_length": 48}


def trained(name, **options):
    """The trainer of a run, at its end; options replace those of the run."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        recipe, own = RUNS[name]
        data = reviews(folder) if recipe is Imdb else book(folder)
        trainer = Trainer(recipe(recipe.Config(**{**settings(folder), **data, **own, **options})))
        trainer.fit()
        return trainer


def digest(trainer):
    """The hash of a run's weights, and the last validation loss."""
    bits = hashlib.sha256()
    for name, tensor in sorted(trainer.model.state_dict().items()):
        bits.update(name.encode() + tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    bits.update(repr(trainer.validation["loss"]).encode())
    return bits.hexdigest()[:16]
