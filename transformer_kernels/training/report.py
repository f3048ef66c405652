"""What the commands print about training and trained models."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from transformer_kernels.training.char_gpt import CharGPT
from transformer_kernels.training.evaluation import evaluation_totals
from transformer_kernels.training.generation import Choice
from transformer_kernels.training.imdb import baseline_accuracy, classification_report, load_part, predict
from transformer_kernels.training.recipes import Trained
from transformer_kernels.training.token_cache import tokenise
from transformer_kernels.training.trainer import Result, Trainer


def describe_result(trainer: Trainer, result: Result) -> str:
    """The end of a run in a few lines."""
    lines = [
        f"ended by {result.ended_by} after step {result.step} of {trainer.total_steps}",
        f"training loss    {result.train_loss:.4f}",
    ]
    if result.validation:
        loss, accuracy = result.validation["loss"], result.validation["accuracy"]
        lines.append(f"validation       loss {loss:.4f}, accuracy {accuracy:.2%}, best loss {result.best_loss:.4f}")
    lines.append(
        f"speed            {result.tokens_per_second:,.0f} tokens/s, {result.compile_seconds:.1f} s to start up"
    )
    if result.model_flop_utilisation is not None:
        lines.append(f"utilisation      {result.model_flop_utilisation:.1%} of the device's peak FLOP/s")
    if result.padding_fraction:
        lines.append(f"padding          {result.padding_fraction:.1%} of what the model worked on")
    lines.append(f"peak memory      {result.peak_memory_bytes / 2**20:,.0f} MiB")
    return "\n".join([*lines, f"checkpoints in   {trainer.config.out}"])


def most_likely(choice: Choice, tokenizer: Any, count: int) -> str:
    """The chosen character, then the `count` most likely ones with their probabilities."""
    top = choice.probabilities.topk(min(count, len(choice.probabilities)))
    pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    listed = "  ".join(f"{tokenizer.decode([index])!r} {probability:.4f}" for index, probability in pairs)
    return f"{tokenizer.decode([choice.token])!r:>6} | {listed}"


def evaluate_char_gpt(trained: Trained, **data: str) -> str:
    """Loss, perplexity, bits per character and accuracy on the validation part, or on all where there is none."""
    recipe = CharGPT(dataclasses.replace(trained.config, **data), trained.tokenizer)
    totals = evaluation_totals(trained.model, recipe.evaluation_batches(trained.device))
    loss = totals.loss / totals.targets
    return (
        f"loss {loss:.4f}, perplexity {math.exp(loss):.3f}, {loss / math.log(2):.4f} bits per character, "
        f"accuracy {totals.correct / totals.targets:.2%} on {totals.targets:.0f} characters"
    )


def evaluate_imdb(trained: Trained, *, baseline: bool, progress: bool = True, **data: str) -> str:
    """scikit-learn's report and the confusion matrix on the test reviews, and what TF-IDF reaches."""
    config = dataclasses.replace(trained.config, **data)
    test = load_part(config, "test")
    reviews = tokenise(test, trained.tokenizer, progress=progress)
    probabilities = predict(trained.model, reviews, trained.tokenizer, config, trained.device)
    accuracy, report = classification_report(test.labels, probabilities)
    lines = [report, f"accuracy {accuracy:.2%} on {len(test.labels)} test reviews"]
    if baseline:
        lines.append(f"TF-IDF with logistic regression: {baseline_accuracy(load_part(config, 'train'), test):.2%}")
    return "\n".join(lines)
