"""`transformer-kernels attend`, `nearest`, `tokenize`, `plot` and `sweep`."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformer_kernels.training.config import add_option, typed_fields
from transformer_kernels.training.recipes.char_gpt import CharGPTConfig
from transformer_kernels.visualization.curves import KINDS

Add = Callable[..., argparse.ArgumentParser]
PASSED_ON = ("corpus", "data_dir", "context", "batch_size", "lr", "seed", "backend", "device")  # options of char-gpt


def add_commands(
    commands: Any, command: Add, model_options: Callable[..., None], field_option: Callable[..., None]
) -> None:
    """Add these commands to a command line.

    Args:
        commands: the result of `add_subparsers`.
        command: creates a parser from (commands, name, help, function).
        model_options: adds --model, --checkpoint, --backend and --device to a parser.
        field_option: adds the option of a field of a config to a parser.
    """
    attend = command(commands, "attend", "plot the attention maps of a text, for every layer and head", _attend)
    model_options(attend, "runs/char-gpt", pretrained=True)
    attend.add_argument("text", metavar="TEXT", help="input text, at most 256 tokens; of a trained ViT an image file")
    attend.add_argument("pair", nargs="?", default="", metavar="PAIR", help="second text, of a pretrained encoder")
    add_option(attend, "--out", "attention.png", "output figure", "FILE")
    add_option(attend, "--layer", None, "draw this layer only, from 0 (default: all)", "N", type=int)
    add_option(attend, "--head", None, 'draw this head only, from 0, or "mean" (default: all)', "N")
    help_text = "output HTML page, interactive and self-contained (default: beside the figure)"
    add_option(attend, "--html", "", help_text, "FILE")
    about = "list the nearest words of a word or an analogy in a table of vectors"
    parser = command(commands, "nearest", about, _nearest)
    model_options(parser, "runs/word2vec", pretrained=True, vectors=True)
    help_text = "a word, or sums and differences of words: king - man + woman"
    parser.add_argument("expression", nargs="+", metavar="WORD", help=help_text)
    add_option(parser, "--top", 10, "number of words", "N")
    add_option(parser, "--keep", False, "list the words of the expression, too")
    add_option(parser, "--to", None, "print only the cosine of the expression with this word", "WORD")
    add_option(parser, "--plot", None, "also plot the words in two dimensions (.png, .svg, .pdf)", "FILE")
    parser = command(commands, "tokenize", "split texts into tokens: names, ids and counts", _tokenize)
    source = parser.add_mutually_exclusive_group()
    add_option(source, "--checkpoint", None, "with the tokenizer of a run or checkpoint", "FOLDER")
    add_option(source, "--model", None, "with that of a Hugging Face folder or a GGUF file", "FOLDER")
    help_text = "else in every way, learned from this text file (default: the bundled tinyshakespeare)"
    add_option(source, "--data", "tinyshakespeare", help_text, "FILE")
    add_option(parser, "--vocabulary", 2000, "size of the vocabularies that are learned", "N")
    parser.add_argument("texts", nargs="+", metavar="TEXT", help="input texts")
    help_text = "plot positions, activations, gradients, random features, words in context, training curves, sweeps"
    plot = commands.add_parser("plot", help=help_text, description=f"{help_text.capitalize()}.")
    _add_plots(plot.add_subparsers(metavar="WHAT", required=True), command, model_options)
    _add_sweep(commands, command, field_option)


def _add_plots(plots: Any, command: Add, model_options: Callable[..., None]) -> None:
    positions = command(plots, "positions", "plot position codes and the similarity of positions", _positions)
    add_option(positions, "--kind", "sinusoidal", "(default: sinusoidal)", choices=KINDS)
    add_option(positions, "--length", 100, "positions", "N")
    add_option(positions, "--width", 64, "columns", "N")
    words = command(plots, "words", "plot a word's hidden states in several sentences, and their cosines", _words)
    model_options(words, "runs/char-gpt", pretrained=True)
    words.add_argument("--word", required=True, help="a word that occurs in each sentence")
    help_text = "sentences with at least two occurrences in all"
    words.add_argument("sentences", nargs="+", metavar="SENTENCE", help=help_text)
    run = command(plots, "run", "plot loss and accuracy of training runs", _run)
    run.add_argument("folders", nargs="+", metavar="FOLDER", help="run folder, such as runs/char-gpt")
    sweep = command(plots, "sweep", "plot the points and the scaling law of a sweep", _plot_sweep)
    sweep.add_argument("folder", metavar="FOLDER", help="sweep folder, such as runs/sweep")
    command(plots, "activations", "plot ReLU and GELU and their derivatives", _activations)
    help_text = "plot the gradients of each layer, with and without shortcut connections"
    gradients = command(plots, "gradients", help_text, _gradients)
    help_text = "plot the loss around trained weights, with and without shortcut connections"
    landscape = command(plots, "landscape", help_text, _landscape)
    command(plots, "performer", "plot the error of Performer's random features", _performer)
    for parser, layers in ((gradients, 20), (landscape, 8)):
        add_option(parser, "--layers", layers, "layers", "N")
    for name, parser in plots.choices.items():
        add_option(parser, "--out", f"{name}.png", "output figure", "FILE")


def _add_sweep(commands: Any, command: Add, field_option: Callable[..., None]) -> None:
    help_text = "train character GPTs of several sizes and token budgets, and fit a scaling law"
    parser = command(commands, "sweep", help_text, _sweep)
    sizes, budgets = ["16x1", "32x1", "32x2", "64x2"], [65536, 131072, 262144]
    help_text = f"model sizes (default: {' '.join(sizes)})"
    add_option(parser, "--sizes", sizes, help_text, "WIDTHxLAYERS", nargs="+", type=str)
    help_text = f"training tokens (default: {' '.join(map(str, budgets))})"
    add_option(parser, "--tokens", budgets, help_text, "N", nargs="+", type=int)
    add_option(parser, "--out", "", "output folder (default: a new runs/sweep)", "FOLDER")
    help_text = "continue an interrupted sweep with its recorded sizes, tokens and options"
    add_option(parser, "--resume", "", help_text, "FOLDER")
    for spec, kind in typed_fields(CharGPTConfig):
        if spec.name in PASSED_ON:
            field_option(parser, spec, kind, spec.default)
            parser.set_defaults(**{spec.name: spec.default})


def _load(chosen: argparse.Namespace) -> Any:
    """A pretrained or trained model with its tokenizer and device."""
    if chosen.model is not None:
        from transformer_kernels.training import pretrained_commands as commands

        return commands.load(chosen.model, chosen.backend, chosen.device)
    from transformer_kernels.training.checkpoint import load_trained

    return load_trained(chosen.checkpoint, backend=chosen.backend, device=chosen.device)


def _attend(chosen: argparse.Namespace) -> None:
    from python_ref import GPT
    from transformer_kernels.visualization.attention import Operands, attention_maps, draw_maps, next_tokens, write_page
    from transformer_kernels.visualization.tokens import read

    loaded = _load(chosen)
    operands: list[Operands] = []
    maps, tokens = attention_maps(loaded, chosen.text, chosen.pair, operands)
    reading = read(loaded, chosen.text, chosen.pair)
    layers, heads = maps.shape[:2]
    rows, columns = _selected("layer", chosen.layer, layers), _selected("head", chosen.head, heads)
    drawn = maps[rows].mean(1, keepdim=True) if chosen.head == "mean" else maps[rows][:, columns]
    names = [f"layer {row}" for row in rows]
    names += ["mean over heads"] if chosen.head == "mean" else [f"head {column}" for column in columns]
    source = Path(chosen.checkpoint if chosen.model is None else chosen.model)
    title = f"Attention of {source.absolute().name}"
    page = chosen.html or Path(chosen.out).with_suffix(".html")
    text = reading.text if len(reading.text) <= 80 else reading.text[:79] + "…"
    draw_maps(drawn, tokens, tokens, chosen.out, title=f"{title}\n{text}", names=names)
    special = [index for index, (start, end) in enumerate(reading.spans) if start == end == 0]
    extra: dict[str, Any] = {"causal": isinstance(loaded.model, GPT), "special": (special, special)}
    extra |= {"predictions": next_tokens(loaded, chosen.text), "sentences": reading.sentences}
    write_page(maps, tokens, tokens, page, title=title, text=reading.text, operands=operands, **extra)
    print(f"layers: {layers}, heads: {heads}, tokens: {len(tokens)}: {chosen.out}, {page}")


def _nearest(chosen: argparse.Namespace) -> None:
    from transformer_kernels.training.data.vectors import (
        cosine,
        nearest,
        parse_expression,
        read_vectors,
        table_of_model,
    )
    from transformer_kernels.visualization.words import draw_nearest

    expression = " ".join(chosen.expression)
    terms = parse_expression(expression)
    table = read_vectors(chosen.vectors) if chosen.vectors is not None else table_of_model(_load(chosen))
    if chosen.to is not None:
        print(f"{cosine(table, terms, chosen.to):7.4f}  {chosen.to}")
        return
    found = nearest(table, terms, chosen.top, keep=chosen.keep)
    for word, similarity in found:
        print(f"{similarity:7.4f}  {word}")
    if chosen.plot:
        draw_nearest(table, terms, [word for word, _ in found], chosen.plot)
        print(f"{expression}: {chosen.plot}")


def _tokenize(chosen: argparse.Namespace) -> None:
    from transformer_kernels.training import load_trained
    from transformer_kernels.training.data.corpus import read_corpus
    from transformer_kernels.training.pretrained_commands import load_tokenizer
    from transformer_kernels.visualization.tokens import split_by, split_in_every_way

    source = chosen.model or chosen.checkpoint
    if source is None:
        splits = split_in_every_way(chosen.texts, read_corpus(chosen.data), chosen.vocabulary)
    else:
        trained = chosen.model is None
        tokenizer = load_trained(source, backend="torch", device="cpu").tokenizer if trained else load_tokenizer(source)
        splits = [[split_by(tokenizer, text, Path(source).absolute().name)] for text in chosen.texts]
    for text, ways in zip(chosen.texts, splits, strict=True):
        print("\n".join([text, *map(str, ways)]))


def _selected(what: str, number: int | str | None, count: int) -> list[int]:
    """The numbers of the selected layers or heads: all of `count`, or one."""
    if number is None or number == "mean":
        return list(range(count))
    if not str(number).isdecimal() or int(number) >= count:
        raise ValueError(f"attend: --{what} must be from 0 to {count - 1}; got {number}")
    return [int(number)]


def _positions(chosen: argparse.Namespace) -> None:
    from transformer_kernels.visualization.curves import draw_positions

    draw_positions(chosen.kind, chosen.length, chosen.width, chosen.out)
    print(f"{chosen.kind} positions: {chosen.out}")


def _activations(chosen: argparse.Namespace) -> None:
    from transformer_kernels.visualization.networks import draw_activations

    draw_activations(chosen.out)
    print(f"ReLU and GELU: {chosen.out}")


def _gradients(chosen: argparse.Namespace) -> None:
    from transformer_kernels.visualization.networks import KINDS, draw_gradients

    for shortcuts, sizes in draw_gradients(chosen.layers, chosen.out).items():
        print(f"mean |gradient| {KINDS[shortcuts]}: first layer {sizes[0]:.2e}, last layer {sizes[-1]:.2e}")
    print(f"{chosen.layers} layers: {chosen.out}")


def _landscape(chosen: argparse.Namespace) -> None:
    from transformer_kernels.visualization.networks import KINDS, draw_landscape

    for shortcuts, loss in draw_landscape(chosen.layers, chosen.out).items():
        print(f"loss {KINDS[shortcuts]}: {loss:.4f}")
    print(f"{chosen.layers} layers: {chosen.out}")


def _performer(chosen: argparse.Namespace) -> None:
    from transformer_kernels.visualization.networks import FEATURES, draw_performer

    print("features".rjust(18), *(f"{count:7}" for count in FEATURES))
    for deviation, errors in draw_performer(chosen.out).items():
        print(f"deviation {deviation:.2f}".rjust(18), *(f"{error:7.3f}" for error in errors))
    print(f"Performer: {chosen.out}")


def _words(chosen: argparse.Namespace) -> None:
    import torch
    import torch.nn.functional as F

    from transformer_kernels.training.pretrained_commands import cosine_table
    from transformer_kernels.visualization.words import draw_words, word_in_context

    loaded = _load(chosen)
    found = [word_in_context(loaded, chosen.word, sentence) for sentence in chosen.sentences]
    occurrences = [
        f"{number}.{k}: {context.sentence}" if len(context.indices) > 1 else f"{number}: {context.sentence}"
        for number, context in enumerate(found, 1)
        for k in range(1, len(context.indices) + 1)
    ]
    if len(occurrences) < 2:
        raise ValueError(f"plot words: at least two occurrences are compared; {chosen.word!r} occurs once")
    for kind in ("contextual", "static"):
        vectors = F.normalize(torch.cat([getattr(context, kind) for context in found]), dim=-1)
        print(f"cosine, {kind}\n{cosine_table(occurrences, vectors)}")
    draw_words(found, chosen.word, chosen.out)
    sentences = "sentence" if len(found) == 1 else "sentences"
    print(f"{chosen.word!r}: {len(occurrences)} occurrences in {len(found)} {sentences}: {chosen.out}")


def _run(chosen: argparse.Namespace) -> None:
    from transformer_kernels.visualization.curves import draw_runs

    draw_runs(chosen.folders, chosen.out)
    runs = len(chosen.folders)
    print(f"{runs} run{'s' * (runs != 1)}: {chosen.out}")


def _plot_sweep(chosen: argparse.Namespace) -> None:
    from transformer_kernels.visualization.sweep import draw_sweep, fit_power_law, read_sweep

    points = read_sweep(chosen.folder).points
    law = fit_power_law(points)
    draw_sweep(points, law, chosen.out)
    print(f"{law}\n{len(points)} points: {chosen.out}")


def _sweep(chosen: argparse.Namespace) -> None:
    from transformer_kernels.training._optional import require
    from transformer_kernels.training.data.files import numbered_folder
    from transformer_kernels.training.distributed import Interrupted
    from transformer_kernels.visualization.sweep import Sweep, draw_sweep, fit_power_law, read_sweep, train_points

    require("matplotlib.figure")  # before hours of training, not after
    if chosen.resume:
        folder = Path(chosen.resume)
        sweep = read_sweep(folder)
    else:
        sweep = Sweep(chosen.sizes, chosen.tokens, {name: getattr(chosen, name) for name in PASSED_ON}, [])
        sweep.check()
        folder = Path(chosen.out) if chosen.out else numbered_folder("runs/sweep")
    try:
        for point in train_points(sweep, folder, resume=bool(chosen.resume), progress=True):
            size = f"{point.size:>8} {point.parameters:>12,} parameters"
            print(f"{size} {point.tokens:>12,} tokens   loss {point.loss:.4f}", flush=True)
    except Interrupted as stopped:
        command = f"sweep --resume {shlex.quote(str(folder))}"
        raise Interrupted(stopped.signum, stopped.step, stopped.checkpoint, command) from None
    law = fit_power_law(sweep.points)
    draw_sweep(sweep.points, law, folder / "sweep.png")
    print(f"{law}\nin {folder}: sweep.json, sweep.png, and the runs")
