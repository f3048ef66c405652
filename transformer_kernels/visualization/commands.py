"""`transformer-kernels attend`, `plot` and `sweep`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformer_kernels.training.config import typed_fields
from transformer_kernels.training.recipes.char_gpt import CharGPTConfig

Add = Callable[..., argparse.ArgumentParser]
PASSED_ON = ("corpus", "data_dir", "context", "batch_size", "lr", "seed", "backend", "device")  # to char-gpt by `sweep`


def add_commands(commands: Any, command: Add, model_options: Callable[..., None]) -> None:
    """Add the three to a command line.

    Args:
        commands: what `add_subparsers` returned.
        command: makes a parser of (commands, name, help, function).
        model_options: adds --model, --checkpoint, --backend and --device to a parser.
    """
    attend = command(commands, "attend", "draw what each token of a text attends to, in every layer and head", _attend)
    model_options(attend, "runs/char-gpt", pretrained=True)
    attend.add_argument("text", metavar="TEXT", help="what the model reads, such as a sentence")
    attend.add_argument("--out", default="attention.png", metavar="FILE", help="the picture (default: %(default)s)")
    told = "a page to click through, which needs no network (default: beside the picture)"
    attend.add_argument("--html", default="", metavar="FILE", help=told)
    told = "draw positions, words in context, or training curves"
    plot = commands.add_parser("plot", help=told, description=f"D{told[1:]}.")
    _add_plots(plot.add_subparsers(metavar="WHAT", required=True), command, model_options)
    _add_sweep(commands, command)


def _add_plots(plots: Any, command: Add, model_options: Callable[..., None]) -> None:
    positions = command(plots, "positions", "how positions are told apart, and how similar two of them are", _positions)
    positions.add_argument(
        "--kind", choices=("sinusoidal", "rotary"), default="sinusoidal", help="(default: sinusoidal)"
    )
    positions.add_argument("--length", type=int, default=100, metavar="N", help="positions (default: %(default)s)")
    positions.add_argument("--width", type=int, default=64, metavar="N", help="columns (default: %(default)s)")
    words = command(plots, "words", "a word in several sentences, in two dimensions, with its cosines", _words)
    model_options(words, "runs/char-gpt", pretrained=True)
    words.add_argument("--word", required=True, help="a word that stands in each sentence")
    words.add_argument("sentences", nargs="+", metavar="SENTENCE", help="at least two")
    run = command(plots, "run", "the loss and accuracy of training runs, from their logs", _run)
    run.add_argument("folders", nargs="+", metavar="FOLDER", help="of a run, such as runs/char-gpt")
    for name, parser in (("positions", positions), ("words", words), ("run", run)):
        parser.add_argument("--out", default=f"{name}.png", metavar="FILE", help="the picture (default: %(default)s)")


def _add_sweep(commands: Any, command: Add) -> None:
    told = "train character GPTs of several sizes, and fit how the loss falls with parameters and tokens"
    parser = command(commands, "sweep", told, _sweep)
    sizes, budgets = ["16x1", "32x1", "32x2", "64x2"], [65536, 131072, 262144]
    parser.add_argument(
        "--sizes", nargs="+", default=sizes, metavar="WIDTHxLAYERS", help=f"of the models (default: {' '.join(sizes)})"
    )
    shown = " ".join(map(str, budgets))
    parser.add_argument(
        "--tokens", nargs="+", type=int, default=budgets, metavar="N", help=f"to train on (default: {shown})"
    )
    parser.add_argument(
        "--out", default="", metavar="FOLDER", help="for runs, sweep.json, sweep.png (a new runs/sweep)"
    )
    for spec, kind in typed_fields(CharGPTConfig):
        if spec.name in PASSED_ON:
            flag, default = "--" + spec.name.replace("_", "-"), spec.default
            shown = f"{spec.metadata['help']} (default: {default})" if default != "" else spec.metadata["help"]
            parser.add_argument(flag, type=kind, choices=spec.metadata["choices"], default=default, help=shown)


def _load(chosen: argparse.Namespace) -> Any:
    """A pretrained model or a trained one, with its tokenizer and device."""
    if chosen.model is not None:
        from transformer_kernels.pretrained import commands

        return commands.load(chosen.model, chosen.backend, chosen.device)
    from transformer_kernels.training.checkpoint import load_trained

    return load_trained(chosen.checkpoint, backend=chosen.backend, device=chosen.device)


def _attend(chosen: argparse.Namespace) -> None:
    from transformer_kernels.visualization.attention import attention_maps, draw_maps, write_page

    page = chosen.html or Path(chosen.out).with_suffix(".html")
    maps, names = attention_maps(_load(chosen), chosen.text)
    draw_maps(maps, names, names, chosen.out)
    write_page(maps, names, names, page)
    print(f"{len(maps)} layers of {maps.shape[1]} heads on {len(names)} tokens: {chosen.out}, {page}")


def _positions(chosen: argparse.Namespace) -> None:
    from transformer_kernels.visualization.curves import draw_positions

    draw_positions(chosen.kind, chosen.length, chosen.width, chosen.out)
    print(f"{chosen.kind} positions: {chosen.out}")


def _words(chosen: argparse.Namespace) -> None:
    import torch
    import torch.nn.functional as F

    from transformer_kernels.pretrained.commands import cosine_table
    from transformer_kernels.visualization.words import draw_words, word_in_context

    if len(chosen.sentences) < 2:
        raise ValueError("plot words: at least two sentences are compared; got one")
    loaded = _load(chosen)
    found = [word_in_context(loaded, chosen.word, sentence) for sentence in chosen.sentences]
    for kind in ("contextual", "static"):
        vectors = F.normalize(torch.stack([getattr(each, kind) for each in found]), dim=-1)
        print(f"cosine, {kind}\n{cosine_table(chosen.sentences, vectors)}")
    draw_words(found, chosen.out)
    print(f"{chosen.word!r} in {len(found)} sentences: {chosen.out}")


def _run(chosen: argparse.Namespace) -> None:
    from transformer_kernels.visualization.curves import draw_runs

    draw_runs(chosen.folders, chosen.out)
    print(f"{len(chosen.folders)} runs: {chosen.out}")


def _sweep(chosen: argparse.Namespace) -> None:
    from transformer_kernels.training.files import numbered_folder
    from transformer_kernels.visualization.sweep import fit_power_law, train_points, write_sweep

    folder = Path(chosen.out) if chosen.out else numbered_folder("runs/sweep")
    passed_on, points = {name: getattr(chosen, name) for name in PASSED_ON}, []
    for point in train_points(chosen.sizes, chosen.tokens, folder, **passed_on):
        size = f"{point.size:>8} {point.parameters:>12,} parameters"
        print(f"{size} {point.tokens:>12,} tokens   loss {point.loss:.4f}", flush=True)
        points.append(point)
    law = fit_power_law(points)
    write_sweep(points, law, folder)
    print(f"{law}\nin {folder}: sweep.json, sweep.png, and the runs")
