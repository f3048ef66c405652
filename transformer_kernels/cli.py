"""The command line: `transformer-kernels COMMAND`, such as train, generate, attend, info (see `--help`)."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import itertools
import json
import os
import signal
import sys
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from transformer_kernels._version import __version__
from transformer_kernels.training import config as options
from transformer_kernels.training.recipes import find_recipe, make_config, recipes
from transformer_kernels.visualization import commands as visualization

DESCRIPTION = """\
Train small transformers on fused kernels, and use what they learned.

first steps:
  transformer-kernels demo                              two minutes of training, and the speed of each backend
  transformer-kernels train char-gpt --steps 500        learn to write Python from the standard library's source
  transformer-kernels generate --checkpoint runs/char-gpt --prompt "def "
  transformer-kernels train imdb --data aclImdb         learn to tell good film reviews from bad ones
  transformer-kernels classify --checkpoint runs/imdb "What a waste of two hours."
  transformer-kernels train translate --data hin.txt    learn to translate from sentence pairs, a tab between them
  transformer-kernels translate --checkpoint runs/translate "How are you?"
  transformer-kernels info                              what runs on this machine, and why the rest does not
"""

TRAIN_NOTE = """\
Every option can also stand in a --config file under its name (batch_size: 32); the command line wins.
Ctrl-C or SIGTERM writes the last checkpoint and ends with status 130 or 143; continue with --resume FOLDER.
Several processes: --processes 2, or torchrun --nproc-per-node 2 -m transformer_kernels train ... (after Ctrl-C the
status of torchrun itself is 1).
"""

SHARED_ERRORS = ("Interrupted", "RunFolderError")  # every process of a run meets them, and the first prints
NOT_IN_CONFIG = ("run", "arguments", "recipe", "config", "resume", "overwrite", "processes")  # arguments of `train`


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    forwarded = arguments[:1] in (["bench"], ["kernels"])
    chosen = None if forwarded else _parser().parse_args(arguments, argparse.Namespace(arguments=arguments))
    try:
        return _forwarded(arguments[0], arguments[1:]) if chosen is None else chosen.run(chosen) or 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except _expected_errors() as error:
        if os.environ.get("TRANSFORMER_KERNELS_TRACEBACK") == "1":
            raise
        remedy = "; try a smaller --batch-size" if type(error).__name__ == "OutOfMemoryError" else ""
        if os.environ.get("RANK", "0") == "0" or type(error).__name__ not in SHARED_ERRORS:
            print(f"transformer-kernels: error: {error}{remedy}", file=sys.stderr)
        return 128 + error.signum if hasattr(error, "signum") else 1


def _expected_errors() -> tuple[type[BaseException], ...]:
    """Errors that a user can correct: printed without a traceback, unless TRANSFORMER_KERNELS_TRACEBACK=1."""
    import torch

    from transformer_kernels import BackendUnavailable, UnsupportedByBackend, training

    ours = (
        training.CheckpointError,
        training.DataFileError,
        training.Interrupted,
        training.ProcessLost,
        training.RunFolderError,
        training.TrainingDiverged,
    )
    return (*ours, BackendUnavailable, UnsupportedByBackend, torch.OutOfMemoryError, ImportError, OSError, ValueError)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "transformer-kernels", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"transformer_kernels {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_train(commands)
    _add_generate(commands)
    _add_classify(commands)
    _add_translate(commands)
    _add_evaluate(commands)
    _add_embed(commands)
    _add_fill_mask(commands)
    visualization.add_commands(commands, _command, _add_model_options)
    demo = _command(commands, "demo", "train the character GPT for two minutes, then time each backend", _demo)
    demo.add_argument("--seconds", type=float, default=120.0, help="how long to train (default: %(default)g)")
    demo.add_argument("--backend", choices=options.BACKENDS, default="auto", help="for training (default: auto)")
    demo.add_argument("--out", default="", help="folder for checkpoints and the log (default: a new runs/demo)")
    info = _command(
        commands, "info", "versions, devices, backends and why some are missing, state of the kernels", _info
    )
    info.add_argument(
        "--kernels", action="store_true", help="only the kernels: verified on which GPU, or changed since"
    )
    info.add_argument(
        "--static", action="store_true", help="only what compilers made of the GPU kernels: instructions and bounds"
    )
    commands.add_parser("bench", help="run the benchmarks (from a source checkout)", add_help=False)
    commands.add_parser("kernels", help="compile the kernels ahead of time and report on them", add_help=False)
    return parser


def _command(commands: Any, name: str, help: str, run: Callable[[Any], int | None]) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=help, description=help[0].upper() + help[1:] + ".")
    parser.set_defaults(run=run)
    return parser


def _add_train(commands: Any) -> None:
    train = commands.add_parser("train", help="train a model", description="Train a model.")
    commands = train.add_subparsers(metavar="RECIPE", dest="recipe", required=True)
    formatter = argparse.RawDescriptionHelpFormatter
    for name, recipe in recipes().items():
        about = (recipe.Config.__doc__ or "").strip()
        parser = commands.add_parser(name, help=about, description=about, epilog=TRAIN_NOTE, formatter_class=formatter)
        parser.set_defaults(run=_train)
        bundled = ", ".join(options.bundled_configs(name)) or "none"
        told = f"YAML, TOML or JSON file with options, or the name of a bundled one ({bundled})"
        parser.add_argument("--config", metavar="FILE", help=told)
        parser.add_argument("--resume", metavar="FOLDER", help="continue exactly from this run or checkpoint")
        parser.add_argument("--overwrite", action="store_true", help="delete the run that --out holds")
        parser.add_argument("--processes", type=int, default=1, metavar="N", help="train in N processes (default: 1)")
        for spec, kind in options.typed_fields(recipe.Config):
            _add_option(parser, spec, kind, dict([recipe.Config.default_length]).get(spec.name))


def _add_option(parser: argparse.ArgumentParser, spec: Any, kind: Any, default: Any) -> None:
    """One flag for one field of a config; flags not given stay absent, so that a config file can set them."""
    flag = "--" + spec.name.replace("_", "-")
    told = spec.metadata["help"]
    default = spec.default if default is None else default
    if isinstance(default, int | float | str) and not isinstance(default, bool) and default != "":
        told += f" (default: {default})"
    told = told.replace("%", "%%")
    if kind is bool:
        action: Any = argparse.BooleanOptionalAction
        parser.add_argument(flag, action=action, default=argparse.SUPPRESS, help=told)
        return
    if kind is dict:
        parser.add_argument(flag, action="append", metavar="NAME=VALUE", default=argparse.SUPPRESS, help=told)
        return
    base = (typing.get_args(kind) or (kind,))[0]
    metavar = None if spec.metadata["choices"] else {int: "N", float: "X", str: "TEXT"}[base]
    choices = spec.metadata["choices"]
    parser.add_argument(flag, type=base, choices=choices, metavar=metavar, default=argparse.SUPPRESS, help=told)


def _add_model_options(parser: argparse.ArgumentParser, example: str = "", *, pretrained: bool = False) -> None:
    source = parser.add_mutually_exclusive_group(required=True)
    if example:
        source.add_argument("--checkpoint", metavar="FOLDER", help=f"a run or a checkpoint, such as {example}")
    if pretrained:
        told = "pretrained: a folder of transformers with a tokenizer, or a GGUF file"
        source.add_argument("--model", metavar="FOLDER", help=told)
    parser.add_argument("--backend", choices=options.BACKENDS, default="auto", help="whose kernels run the model")
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:1, ... (default: auto)")


def _add_generate(commands: Any) -> None:
    parser = _command(commands, "generate", "write text with a trained language model", _generate)
    _add_model_options(parser, "runs/char-gpt", pretrained=True)
    parser.add_argument(
        "--prompt", action="append", metavar="TEXT", help="the text to continue (default: a line break); repeatable"
    )
    parser.add_argument("--length", type=int, default=500, metavar="N", help="most tokens to write (default: 500)")
    parser.add_argument("--greedy", action="store_true", help="always take the most likely token")
    _add_sampling_options(parser)
    parser.add_argument(
        "--repetition-penalty", type=float, default=1.0, metavar="R", help="above 1, repetitions become less likely"
    )
    parser.add_argument("--stop", default="", metavar="TEXT", help="end before this text would appear")
    parser.add_argument("--top", type=int, default=0, metavar="N", help="list the N most likely tokens at each step")
    _add_later_options(parser, "generate")


def _add_sampling_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--temperature", type=float, default=0.8, help="below 1 is safer, above 1 wilder (default: 0.8)"
    )
    parser.add_argument("--top-k", type=int, default=0, metavar="N", help="draw from the N most likely; 0 means all")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="draw from the fewest that have mass P")
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default: 0)")


def _add_texts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("texts", nargs="*", metavar="TEXT", help="texts; without any, each line of the input is one")


def _add_translate(commands: Any) -> None:
    parser = _command(commands, "translate", "translate sentences with a trained encoder-decoder", _translate)
    _add_model_options(parser, "runs/translate")
    _add_texts(parser)
    how = parser.add_mutually_exclusive_group()
    told = "keep the N likeliest beginnings at each step (default: greedy)"
    how.add_argument("--beam", type=int, metavar="N", help=told)
    how.add_argument("--sample", action="store_true", help="draw each token, as the options below say")
    told = "with --beam: the larger, the longer the translations (default: %(default)s)"
    parser.add_argument("--length-penalty", type=float, default=0.6, metavar="A", help=told)
    _add_sampling_options(parser)
    told = "also draw which source pieces each target piece came from, of one sentence (.png, .svg, .pdf)"
    parser.add_argument("--alignments", metavar="FILE", help=told)


def _add_classify(commands: Any) -> None:
    parser = _command(commands, "classify", "classify texts with a trained classifier", _classify)
    _add_model_options(parser, "runs/imdb")
    _add_texts(parser)
    _add_later_options(parser, "classify")


def _add_evaluate(commands: Any) -> None:
    help = "measure a trained model on its validation or test data"
    parser = _command(commands, "evaluate", help, _evaluate)
    _add_model_options(parser, "runs/imdb")
    _add_later_options(parser, "evaluate")


def _add_embed(commands: Any) -> None:
    parser = _command(commands, "embed", "compare texts by the vectors that a pretrained encoder gives them", _embed)
    _add_model_options(parser, pretrained=True)
    _add_texts(parser)
    parser.add_argument(
        "--pooling", choices=("mean", "cls"), default="mean", help="of all tokens, or the first (default: mean)"
    )
    parser.add_argument("--out", default="", metavar="FILE", help="write the vectors, float32 (texts, width), as .npy")


def _add_fill_mask(commands: Any) -> None:
    parser = _command(commands, "fill-mask", "the likely words at [MASK], by a pretrained encoder", _fill_mask)
    _add_model_options(parser, pretrained=True)
    parser.add_argument("text", metavar="TEXT", help='such as "Paris is the [MASK] of France."')
    parser.add_argument("--top", type=int, default=5, metavar="N", help="how many words (default: %(default)s)")


def _add_later_options(parser: argparse.ArgumentParser, command: str) -> None:
    """The options that recipes take again in this command, each flag once, with the help of every recipe."""
    helps: dict[str, list[str]] = {}
    switches = set()
    for recipe, flag, spec, kind in _later_options(command):
        helps.setdefault(flag, []).append(f"{recipe}: {spec.metadata['help']}")
        if kind is bool:
            switches.add(flag)
    for flag, lines in helps.items():
        action = "store_true" if flag in switches else "store"
        told = "; ".join(lines).replace("%", "%%")
        parser.add_argument("--" + flag.replace("_", "-"), action=action, default=argparse.SUPPRESS, help=told)


def _later_options(command: str) -> Iterator[tuple[str, str, Any, Any]]:
    """Recipe, flag, field and type of each option that recipes take again in this command."""
    for name, recipe in recipes().items():
        for spec, kind in options.typed_fields(recipe.Config):
            if recipe.supports(command) and command in spec.metadata["later"]:
                yield name, spec.metadata["later"][command], spec, kind


def _train(chosen: argparse.Namespace) -> int:
    from transformer_kernels.training.checkpoint import refuse_other_run
    from transformer_kernels.training.distributed import joined_processes, launch
    from transformer_kernels.training.report import describe_result
    from transformer_kernels.training.trainer import Trainer

    if chosen.processes < 1:
        raise ValueError(f"--processes must be at least 1; got {chosen.processes}")
    if chosen.processes > 1 and "WORLD_SIZE" not in os.environ:
        return launch(chosen.processes, chosen.arguments)
    with joined_processes() as processes:
        config, start = _train_config(chosen)
        if config.out and not chosen.overwrite:
            refuse_other_run(Path(config.out), start)
        trainer = Trainer(find_recipe(config.recipe)(config), processes)
        if start is not None:
            trainer.restore(start)
        result = trainer.fit(overwrite=chosen.overwrite)
        if processes.first:
            print(describe_result(trainer, result))
            if told := trainer.recipe.report(trainer.model, trainer.device):
                print(told)
    return 0


def _train_config(chosen: argparse.Namespace) -> tuple[Any, Path | None]:
    """The config from file, command line and resumed checkpoint, and the folder of that checkpoint."""
    from transformer_kernels.training.checkpoint import checkpoint_config, checkpoint_folder

    given = {key: value for key, value in vars(chosen).items() if key not in NOT_IN_CONFIG}
    from_file = options.read_config_file(chosen.config) if chosen.config else {}
    if from_file:
        make_config(chosen.recipe, from_file, chosen.config)
    if "model" in given:
        given["model"] = {**dict(from_file.get("model", {})), **dict(_named_value(text) for text in given["model"])}
    if not chosen.resume:
        return make_config(chosen.recipe, {**from_file, **given}, chosen.config or "command line"), None
    start = checkpoint_folder(chosen.resume, ("last", "best"))
    saved = checkpoint_config(start)
    if saved.recipe != chosen.recipe:
        raise ValueError(f"--resume: {start} was written by the recipe {saved.recipe}, not {chosen.recipe}")
    return options.resumed_config(saved, {"out": str(start.parent), **from_file, **given}), start


def _named_value(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--model takes NAME=VALUE; got {text!r}")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _load_trained(chosen: argparse.Namespace, command: str) -> Any:
    """The trained model, with the options that its recipe takes again in this command."""
    from transformer_kernels.training.checkpoint import checkpoint_config, checkpoint_folder, load_trained

    folder = checkpoint_folder(chosen.checkpoint)
    found = checkpoint_config(folder).recipe
    later = [(flag, spec, kind) for recipe, flag, spec, kind in _later_options(command) if recipe == found]
    allowed = {flag for flag, *_ in later}
    for _, flag, *_ in _later_options(command):
        if hasattr(chosen, flag) and flag not in allowed:
            raise ValueError(f"--{flag.replace('_', '-')} is not an option of {found}")
    changes = {
        spec.name: getattr(chosen, flag, False) for flag, spec, kind in later if hasattr(chosen, flag) or kind is bool
    }
    return load_trained(folder, backend=chosen.backend, device=chosen.device, command=command, options=changes)


def _generate(chosen: argparse.Namespace) -> None:
    from transformer_kernels.training.generation import Sampling, decoded, text_until
    from transformer_kernels.training.report import most_likely

    sampling = Sampling(
        temperature=0.0 if chosen.greedy else chosen.temperature,
        top_k=chosen.top_k,
        top_p=chosen.top_p,
        repetition_penalty=chosen.repetition_penalty,
        seed=chosen.seed,
    )
    prompts = chosen.prompt or ["\n"]
    if chosen.top and len(prompts) > 1:
        raise ValueError(f"--top lists the tokens after one --prompt; got {len(prompts)}")
    trained: Any
    ends: frozenset[int] = frozenset()
    if chosen.model is None:
        trained = _load_trained(chosen, "generate")
        steps = trained.recipe.generate(trained, prompts, chosen.length, sampling)
    else:
        from transformer_kernels.pretrained import commands

        trained = commands.load(chosen.model, chosen.backend, chosen.device)
        ends = trained.ends
        steps = commands.generate(trained, prompts, chosen.length, sampling)
    if chosen.top:
        for choices in steps:
            print(most_likely(choices[0], trained.tokenizer, chosen.top), flush=True)
        return
    if len(prompts) > 1:  # one after the other can be read, all at once cannot
        steps = list(steps)
    for row, prompt in enumerate(prompts):
        print(prompt, end="", flush=True)
        tokens = itertools.takewhile(lambda token: token not in ends, (choices[row].token for choices in steps))
        for piece in text_until(decoded(tokens, trained.tokenizer), chosen.stop):
            print(piece, end="", flush=True)
        print()


def _texts(chosen: argparse.Namespace, what: str) -> list[str]:
    texts = chosen.texts or [line for line in sys.stdin.read().splitlines() if line.strip()]
    if not texts:
        raise ValueError(f"there is nothing to {what}: give texts, or lines on the standard input")
    return texts


def _translate(chosen: argparse.Namespace) -> None:
    from transformer_kernels.training.generation import Sampling
    from transformer_kernels.training.translation import BeamSearch

    search: Any = Sampling(
        temperature=chosen.temperature if chosen.sample else 0.0,
        top_k=chosen.top_k,
        top_p=chosen.top_p,
        seed=chosen.seed,
    )
    if chosen.beam is not None:
        search = BeamSearch(width=chosen.beam, length_penalty=chosen.length_penalty)
    trained = _load_trained(chosen, "translate")
    texts = _texts(chosen, "translate")
    if chosen.alignments and len(texts) > 1:
        raise ValueError(f"--alignments draws one sentence; got {len(texts)}")
    translated = trained.recipe.translate(trained, texts, search)
    for each in translated:
        print(each.translation)
        if each.unseen:
            print(f"never seen in training, so not translated: {each.unseen}", file=sys.stderr)
    if chosen.alignments:
        from transformer_kernels.visualization.alignments import draw_alignment

        told = draw_alignment(trained.recipe.alignment(trained, translated[0]), chosen.alignments)
        print(f"wrote {chosen.alignments}" + f"; {told}" * bool(told), file=sys.stderr)


def _classify(chosen: argparse.Namespace) -> None:
    trained = _load_trained(chosen, "classify")
    texts = _texts(chosen, "classify")
    classes, probabilities = trained.recipe.classify(trained, texts)
    for text, row in zip(texts, probabilities.tolist(), strict=True):
        best = max(range(len(classes)), key=row.__getitem__)
        print(f"{classes[best]:<8} {row[best]:7.2%}  {text if len(text) <= 80 else text[:77] + '...'}")


def _embed(chosen: argparse.Namespace) -> None:
    import numpy

    from transformer_kernels.pretrained import commands

    texts = _texts(chosen, "embed")
    vectors = commands.embed(commands.load(chosen.model, chosen.backend, chosen.device), texts, chosen.pooling)
    print(commands.cosine_table(texts, vectors))
    if chosen.out:
        with Path(chosen.out).open("wb") as file:  # numpy adds its ending to a name, not to a file
            numpy.save(file, vectors.numpy())


def _fill_mask(chosen: argparse.Namespace) -> None:
    from transformer_kernels.pretrained import commands

    loaded = commands.load(chosen.model, chosen.backend, chosen.device)
    for word, probability in commands.fill_mask(loaded, chosen.text, chosen.top):
        print(f"{probability:7.2%}  {word}")


def _evaluate(chosen: argparse.Namespace) -> None:
    trained = _load_trained(chosen, "evaluate")
    print(trained.recipe.evaluate(trained))


def _demo(chosen: argparse.Namespace) -> None:
    from transformer_kernels.training.report import demo

    demo(seconds=chosen.seconds, backend=chosen.backend, out=chosen.out)


def _info(chosen: argparse.Namespace) -> None:
    if chosen.kernels:
        from transformer_kernels.reports.status import verification

        print("\n".join(verification()))
        return
    if chosen.static:
        from transformer_kernels.reports import static

        print("\n".join(map(static.page, static.BACKENDS)), end="")
        for backend in static.BACKENDS:
            if changed := static.changed(backend, static.recorded(backend)):
                print(f"\nThe {static.BACKENDS[backend]} sources of these changed since: {', '.join(changed)}")
        return
    from transformer_kernels.reports.installation import describe_installation

    rest, title, kernels = describe_installation().partition("\n\nkernels\n")
    print(rest + title + "\n".join(_shared_once(kernels.splitlines())))


def _shared_once(lines: list[str]) -> list[str]:
    """Lines of a kernel and its state, with the state that most kernels share said once, in the last line."""
    states: dict[str, list[str]] = {}
    for line in lines:
        states.setdefault(line.strip().partition(" ")[2].strip(), []).append(line)
    shared = max(states, key=lambda state: len(states[state]), default="")
    count = len(states.get(shared, ()))
    if count < 2:
        return lines
    who = f"all {count}" if count == len(lines) else f"the other {count}"
    return [*(line for line in lines if line not in states[shared]), f"  {who:<22} {shared} (each: info --kernels)"]


def _forwarded(command: str, arguments: list[str]) -> int:
    """The benchmarks and the kernel report have command lines of their own."""
    module = {"bench": "benchmarks.cli", "kernels": "transformer_kernels.reports.triton"}[command]
    checkout = Path(__file__).resolve().parents[1]
    if command == "bench" and (checkout / "benchmarks" / "cli.py").is_file():
        sys.path.insert(0, str(checkout))
    try:
        found = importlib.util.find_spec(module) is not None
    except ImportError:
        found = False
    if not found:
        where = "the source checkout (git clone, then pip install -e .)"
        print(f"transformer-kernels: error: {command} needs {where}; {module} is not here", file=sys.stderr)
        return 1
    return importlib.import_module(module).main(arguments) or 0


if __name__ == "__main__":
    raise SystemExit(main())
