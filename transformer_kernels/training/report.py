"""Console output: the summary of a run, likely next tokens, and text as it is generated."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

from transformer_kernels.pretrained.generation import Choice
from transformer_kernels.training.checkpoint import weights_hash
from transformer_kernels.training.loop.trainer import Result, Trainer

MAX_CHARACTER_BYTES = 4  # bytes of a UTF-8 character, hence its maximum number of tokens


def describe_result(trainer: Trainer, result: Result) -> str:
    """The summary of a run in a few lines."""
    trained = not math.isnan(result.train_loss)
    lines = [f"ended by {result.ended_by} after {_progress(trainer, result)}"]
    if trained:
        lines.append(f"training loss    {result.train_loss:.4f}")
    else:
        lines = [_nothing_left(trainer, result)]
    if result.validation:
        loss, accuracy = result.validation["loss"], result.validation["accuracy"]
        described = trainer.recipe.describe_loss(loss)
        lines.append(f"validation       {described}, accuracy {accuracy:.2%}, best loss {result.best_loss:.4f}")
    if trained:
        speed = f"{result.tokens_per_second:,.0f} tokens/s, {result.compile_seconds:.1f} s startup"
        lines.append(f"speed            {speed}")
    if result.model_flop_utilisation is not None:
        lines.append(f"utilisation      {result.model_flop_utilisation:.1%} of the device's peak FLOP/s")
    if result.padding_fraction:
        lines.append(f"padding          {result.padding_fraction:.1%} of the computed positions")
    lines.append(f"peak memory      {result.peak_memory_bytes / 2**20:,.0f} MiB")
    if trainer.config.reproducible:
        lines.append(f"weights          SHA-256 {weights_hash(trainer.folder / 'last')}")
    return "\n".join([*lines, f"checkpoints in   {trainer.folder}"])


def _nothing_left(trainer: Trainer, result: Result) -> str:
    """The report of resuming a finished run."""
    options = {"steps": f"--steps N above {result.step}", "patience": "a larger --patience, or --patience 0"}
    return (
        f"{trainer.folder}: the run has ended ({result.ended_by}) after {_progress(trainer, result)}, "
        f"so nothing was trained; to continue it, pass --resume {trainer.folder} with "
        f"{options.get(result.ended_by, 'a larger --time-limit')}"
    )


def _progress(trainer: Trainer, result: Result) -> str:
    return f"step {result.step}" + ("" if math.isinf(trainer.total_steps) else f" of {trainer.total_steps}")


def most_likely(choice: Choice, tokenizer: Any, count: int) -> str:
    """The sampled token, followed by the `count` most likely tokens with their probabilities."""
    top = choice.probabilities.topk(min(count, len(choice.probabilities)))
    pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    listed = "  ".join(f"{tokenizer.decode([index])!r} {probability:.4f}" for index, probability in pairs)
    return f"{tokenizer.decode([choice.token])!r:>6} | {listed}"


def decoded(tokens: Iterable[int], tokenizer: Any) -> Iterator[str]:
    """The decoded text, token by token; an incomplete UTF-8 character is buffered until its last byte arrives."""
    buffered: list[int] = []
    for token in tokens:
        buffered.append(token)
        piece = tokenizer.decode(buffered)
        if not piece.endswith("\ufffd") or len(buffered) == MAX_CHARACTER_BYTES:
            yield piece
            buffered = []
    if buffered:
        yield tokenizer.decode(buffered)


def text_until(pieces: Iterable[str], stop: str = "") -> Iterator[str]:
    """The text before `stop`, streamed; a possible beginning of `stop` is buffered."""
    buffered = ""
    for piece in pieces:
        buffered += piece
        if stop and stop in buffered:
            buffered = buffered[: buffered.index(stop)]
            break
        safe = len(buffered) - _overlap(buffered, stop)
        if safe:
            yield buffered[:safe]
        buffered = buffered[safe:]
    if buffered:
        yield buffered


def _overlap(text: str, stop: str) -> int:
    """The length of the longest suffix of `text` that is a prefix of `stop`."""
    return next((n for n in range(min(len(text), len(stop)), 0, -1) if text.endswith(stop[:n])), 0)
