"""The command-line interface: `transformer-kernels COMMAND`, such as train, generate, attend, info (see `--help`)."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import importlib.util
import itertools
import json
import os
import re
import signal
import sys
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from transformer_kernels import __version__
from transformer_kernels.training import config as options
from transformer_kernels.training.config import add_option
from transformer_kernels.training.data.files import is_unicode
from transformer_kernels.training.recipes import find_recipe, make_config, recipes
from transformer_kernels.visualization import commands as visualization

DESCRIPTION = """\
Train small transformers on fused kernels and run the trained models.

examples:
  transformer-kernels demo                              train beside the reference, compare the backends: two minutes
  transformer-kernels train char-gpt                    train a character GPT on Tiny Shakespeare for five minutes
  transformer-kernels generate --checkpoint runs/char-gpt --prompt "ROMEO:"
  transformer-kernels train imdb --data aclImdb         train a sentiment classifier on film reviews
  transformer-kernels classify --checkpoint runs/imdb "What a waste of two hours."
  transformer-kernels train translate --data hin.txt    train a translator on tab-separated sentence pairs
  transformer-kernels translate --checkpoint runs/translate "How are you?"
  transformer-kernels info                              list the available backends, and why others are unavailable
"""

TRAIN_NOTE = """\
Options can also be set in a --config file by name (batch_size: 32). Command-line options take precedence.
Ctrl-C and SIGTERM save a checkpoint and exit with status 130 or 143; --resume FOLDER continues the run.
Multi-process training: --processes 2, or torchrun --nproc-per-node 2 -m transformer_kernels train ... (torchrun itself
exits with status 1 after Ctrl-C); a run that torchrun restarts (--max-restarts) continues from its last checkpoint.
"""

EXAMPLES = {
    "char-gpt": "char-gpt --data book.txt --time-limit 2m",
    "gpt": "gpt --data book.txt --vocab-dir gpt2_bpe",
    "imdb": "imdb --data aclImdb --epochs 2",
    "mlm": "mlm --data aclImdb --steps 2000",
    "translate": "translate --data hin.txt",
    "vit": "vit --epochs 20",
    "word2vec": "word2vec --data reviews.txt --epochs 12",
}
GROUPS = {  # of the options of every recipe; the others belong to the recipe
    "length": ("steps", "epochs", "time_limit", "patience"),
    "optimisation": (
        *("batch_size", "accumulate", "optimizer", "lr", "warmup_steps", "schedule", "weight_decay", "beta2", "clip"),
        *("seed", "model"),
    ),
    "speed and precision": (
        *("backend", "device", "dtype", "compile", "cuda_graph", "threads", "deterministic", "reproducible"),
    ),
    "output": ("out", "log_every", "eval_every", "save_every", "tensorboard", "progress"),
}
TEXTS = {"texts", "text", "pair", "prompt", "stop", "sentences", "word", "expression", "to"}  # arguments that are read
METAVARS = {int: "N", float: "X", str: "TEXT", options.Duration: "TIME", dict: "NAME=VALUE"}
SAME = {"corpus": "--data", "text": "--data"}  # fields whose option has this name, too

KERNEL_BACKENDS = ("cpu", "triton", "cuda")
NOT_IN_CONFIG = ("run", "arguments", "recipe", "config", "resume", "overwrite", "processes", "certify")  # of `train`


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments[:1] == ["run"]:  # someone else's program, whose errors are its own
        from transformer_kernels import certify
        from transformer_kernels.patching._run import main as run

        return run(arguments[1:], certify)
    forwarded = arguments[:1] in (["bench"], ["kernels"])
    chosen = None if forwarded else _parser().parse_args(arguments, argparse.Namespace(arguments=arguments))
    try:
        if chosen is None:
            return _forwarded(arguments[0], arguments[1:])
        _check_texts(chosen)
        return chosen.run(chosen) or 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        expected = isinstance(error, _expected_errors()) or _is_out_of_memory(error)
        if os.environ.get("TRANSFORMER_KERNELS_TRACEBACK") == "1" or not expected:
            raise
        name = type(error).__name__
        if not getattr(error, "reported", False):  # by another process of the run
            text = f"{'' if name == 'Interrupted' else 'error: '}{_message(error)}"
            shown = "".join(
                character if character.isprintable() or character == "\n" else ascii(character)[1:-1]
                for character in text
            )
            print(f"transformer-kernels: {shown}", file=sys.stderr)  # a path may have a terminal's escape sequences
        return 128 + error.signum if hasattr(error, "signum") else 1


def _check_texts(chosen: argparse.Namespace) -> None:
    """ValueError for a text of the command line in another encoding than UTF-8, unless it is the name of a file."""
    for name in TEXTS & vars(chosen).keys():
        given = getattr(chosen, name) or ()
        for text in [given] if isinstance(given, str) else given:
            if not (is_unicode(text) or os.path.exists(text)):
                raise ValueError(f"{name}: not UTF-8 text: {text!r}")


def _is_out_of_memory(error: Exception) -> bool:
    """PyTorch raises a bare RuntimeError for memory that a CPU does not have or no tensor can have."""
    texts = ("can't allocate memory", "not enough memory", "Storage size calculation overflowed", "numel: integer")
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError)
        and (type(error).__name__ == "OutOfMemoryError" or any(text in str(error) for text in texts))
    )


def _message(error: Exception) -> str:
    """The text of an expected error: an OSError without its number, and a remedy where memory is short."""
    if _is_out_of_memory(error):
        size = re.search(r"allocate (\d+) bytes", str(error))
        reason = f"{int(size[1]) / 2**30:,.1f} GiB cannot be allocated" if size else str(error).partition("\n")[0]
        return f"out of memory: {reason}; try a smaller --batch-size or a smaller model"
    if isinstance(error, OSError) and error.strerror:
        names = " -> ".join(str(name) for name in (error.filename, error.filename2) if name is not None)
        return f"{names}: {error.strerror}" if names else error.strerror
    return str(error)


class _Parser(argparse.ArgumentParser):
    """Errors come from the parser of the command, in two lines; an unknown option or choice gets the closest one."""

    given: Sequence[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        self.given = args or ()
        chosen, rest = super().parse_known_args(args, namespace)
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        return chosen, rest

    def error(self, message: str) -> typing.NoReturn:
        options = list(self._option_string_actions)
        for name in (text.partition("=")[0] for text in self.given if text.startswith("--")):
            if not any(option.startswith(name) for option in options):
                closest = difflib.get_close_matches(name, options, n=1)
                message += f"; {name}: did you mean {closest[0]}?" if closest else ""
        message = re.sub(r"invalid int value: (.*)", r"expected a whole number; got \1", message)
        message = re.sub(r"invalid float value: (.*)", r"expected a number; got \1", message)
        self.exit(2, f"{self.prog}: error: {message}\nsee {self.prog} --help\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        allowed = [str(choice) for choice in action.choices]
        closest = difflib.get_close_matches(str(value), allowed, n=1)
        remedy = f"did you mean {closest[0]}?" if closest else f"one of {', '.join(allowed)}"
        raise argparse.ArgumentError(action, f"invalid choice: {value!r}; {remedy}")


def _expected_errors() -> tuple[type[BaseException], ...]:
    """Errors that the user can correct: printed without a traceback, unless TRANSFORMER_KERNELS_TRACEBACK=1."""
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
    parser = _Parser(
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
    visualization.add_commands(commands, _command, _add_model_options, _add_field)
    demo = _command(commands, "demo", "train a character GPT beside the reference, then time each backend", _demo)
    add_option(demo, "--seconds", 35.0, "training time of each model")
    add_option(demo, "--backend", "auto", "training backend", choices=options.BACKENDS)
    add_option(demo, "--out", "", "output folder for the checkpoint (default: a new runs/demo)")
    _add_speedrun(commands)
    verify = _command(commands, "verify-device", "run each kernel once on this device, for `auto`", _verify_device)
    add_option(verify, "--device", "cuda", "default: cuda", choices=("cpu", "cuda"))
    repeated: dict[str, Any] = {"action": "append", "choices": KERNEL_BACKENDS}
    add_option(verify, "--backend", None, "only this one (repeatable; default: all available)", **repeated)
    help_text = "check the saved sample of a certificate again, on the device that it is from"
    add_option(verify, "--sample", None, help_text, "FILE")
    add_option(verify, "--op", None, "only this operation (repeatable)", "NAME", action="append")
    about = "print versions, devices, available backends and the verification state of the kernels"
    info = _command(commands, "info", about, _info)
    add_option(info, "--kernels", False, "print only the kernels: the GPU that verified each, or changes since")
    add_option(info, "--static", False, "print only the compilers' reports on the GPU kernels")
    commands.add_parser("run", help="run a Python program on these kernels, unchanged", add_help=False)
    commands.add_parser("bench", help="run the benchmark suite (requires a source checkout)", add_help=False)
    commands.add_parser("kernels", help="compile the kernels ahead of time and print a report", add_help=False)
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
        note = f"example:\n  transformer-kernels train {EXAMPLES.get(name, name)}\n\n{TRAIN_NOTE}"
        usage = "%(prog)s [--config FILE] [--resume FOLDER] [OPTION ...]"
        parser = commands.add_parser(
            name, help=about, description=about, epilog=note, formatter_class=formatter, usage=usage
        )
        parser.set_defaults(run=_train)
        bundled = ", ".join(options.bundled_configs(name)) or "none"
        help_text = f"YAML, TOML or JSON file with options, or the name of a bundled config ({bundled})"
        defaults = dict([recipe.Config.default_length])
        if default := recipe.Config.default_config:
            help_text += f" (default: {default})"
            with contextlib.suppress(ImportError):  # without PyYAML there is no training
                defaults = options.read_config_file(options.bundled_configs()[default])
        add_option(parser, "--config", None, help_text, "FILE")
        add_option(parser, "--resume", None, "resume training from this run or checkpoint", "FOLDER")
        add_option(parser, "--overwrite", False, "delete an existing run in --out")
        add_option(parser, "--processes", 1, "number of processes", "N")
        help_text = "check operations against float64 during the run, and write certificate.json into its folder"
        add_option(parser, "--certify", False, help_text)
        groups = {title: parser.add_argument_group(title) for title in (name, *GROUPS)}
        for spec, kind in options.typed_fields(recipe.Config):
            title = next((title for title, names in GROUPS.items() if spec.name in names), name)
            _add_field(groups[title], spec, kind, defaults.get(spec.name))


def _add_speedrun(commands: Any) -> None:
    help_text = "train for a fixed time, evaluate on all held-out text, and add a line to a board"
    parser = _command(commands, "speedrun", help_text, _speedrun)
    add_option(parser, "--budget", "5m", "wall time of the training", "TIME")
    add_option(parser, "--threads", 2, "number of threads", "N")
    add_option(parser, "--seed", 0, "random seed", "N")
    add_option(parser, "--config", "five_minutes", "recipe: a config file or bundled config of char-gpt", "FILE")
    help_text = "set a model field of the recipe (repeatable); the line names it"
    parser.add_argument("--model", action="append", metavar="NAME=VALUE", default=[], help=help_text)
    add_option(parser, "--data-dir", "", "folder with another copy of tinyshakespeare's input.txt")
    add_option(parser, "--backend", "auto", "kernel backend", choices=options.BACKENDS)
    add_option(parser, "--out", "", "run folder (default: a new runs/char-gpt)", "FOLDER")
    add_option(parser, "--board", "runs/speedrun.md", "Markdown table to which the line is added", "FILE")


def _add_field(parser: Any, spec: Any, kind: Any, default: Any) -> None:
    """One flag per config field; flags that are not given stay absent, so that a config file can set them."""
    flags = [*filter(None, [SAME.get(spec.name)]), "--" + spec.name.replace("_", "-")]
    help_text, choices = spec.metadata["help"], spec.metadata["choices"]
    default = spec.default if default is None else default
    if isinstance(default, bool):
        help_text += f" (default: {'on' if default else 'off'})"
    elif isinstance(default, int | float | str) and default != "":
        help_text += f" (default: {default})"
    elif "default:" not in help_text:
        help_text += " (default: none)"
    base = (typing.get_args(kind) or (kind,))[0]
    more: dict[str, Any] = {"choices": choices, "metavar": None if choices else METAVARS.get(base)}
    if kind is bool:
        more = {"action": argparse.BooleanOptionalAction}
    elif kind is dict:
        more["action"] = "append"
    else:
        more["type"] = str if base is options.Duration else base  # the config converts it, with its own message
    help_text = help_text.replace("%", "%%")
    parser.add_argument(*flags, dest=spec.name, default=argparse.SUPPRESS, help=help_text, **more)


def _add_model_options(
    parser: argparse.ArgumentParser, example: str = "", *, pretrained: bool = False, vectors: bool = False
) -> None:
    source = parser.add_mutually_exclusive_group(required=True)
    if example:
        add_option(source, "--checkpoint", None, f"run or checkpoint folder, such as {example}", "FOLDER")
    if pretrained:
        help_text = "pretrained model: a Hugging Face folder with a tokenizer, or a GGUF file"
        add_option(source, "--model", None, help_text, "FOLDER")
    if vectors:
        add_option(source, "--vectors", None, "word vectors as text, such as glove.6B.100d.txt", "FILE")
    add_option(parser, "--backend", "auto", "kernel backend", choices=options.BACKENDS)
    add_option(parser, "--device", "auto", "cpu, cuda, cuda:1, ...")


def _add_generate(commands: Any) -> None:
    parser = _command(commands, "generate", "generate text with a language model", _generate)
    _add_model_options(parser, "runs/char-gpt", pretrained=True)
    add_option(parser, "--prompt", None, "prompt (default: a line break); repeatable", "TEXT", action="append")
    add_option(parser, "--length", 500, "maximum new tokens", "N")
    add_option(parser, "--greedy", False, "greedy decoding: always take the most likely token")
    _add_sampling_options(parser)
    add_option(parser, "--repetition-penalty", 1.0, "repetition penalty; 1 disables it", "R")
    add_option(parser, "--stop", "", "stop before this text is generated", "TEXT")
    add_option(parser, "--top", 0, "print the N most likely tokens at each step", "N")
    _add_later_options(parser, "generate")


def _add_sampling_options(parser: argparse.ArgumentParser) -> None:
    add_option(parser, "--temperature", 0.8, "sampling temperature; 0 is greedy decoding")
    add_option(parser, "--top-k", 0, "sample from the top N tokens; 0: all", "N")
    add_option(parser, "--top-p", 1.0, "nucleus sampling probability", "P")
    add_option(parser, "--seed", 0, "sampling seed")


def _add_texts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("texts", nargs="*", metavar="TEXT", help="input texts (default: the lines of standard input)")


def _add_translate(commands: Any) -> None:
    parser = _command(commands, "translate", "translate sentences with a trained encoder-decoder", _translate)
    _add_model_options(parser, "runs/translate")
    _add_texts(parser)
    how = parser.add_mutually_exclusive_group()
    add_option(how, "--beam", None, "beam search with N beams (default: greedy decoding)", "N", type=int)
    help_text = "minimum-Bayes-risk decoding: of N sampled translations, the one with the highest mean chrF"
    add_option(how, "--mbr", None, help_text, "N", type=int)
    add_option(how, "--sample", False, "sample, using the sampling options below")
    help_text = "length penalty of beam search; larger values favour longer translations"
    add_option(parser, "--length-penalty", 0.6, help_text, "A")
    _add_sampling_options(parser)
    help_text = "also plot the cross-attention alignment of one sentence to this file (.png, .svg, .pdf; .html: a page)"
    add_option(parser, "--alignments", None, help_text, "FILE")


def _add_classify(commands: Any) -> None:
    parser = _command(commands, "classify", "classify texts or images with a trained classifier", _classify)
    _add_model_options(parser, "runs/imdb")
    _add_texts(parser)
    _add_later_options(parser, "classify")


def _add_evaluate(commands: Any) -> None:
    help = "evaluate a trained model on its validation or test data"
    parser = _command(commands, "evaluate", help, _evaluate)
    _add_model_options(parser, "runs/imdb")
    _add_later_options(parser, "evaluate")


def _add_embed(commands: Any) -> None:
    parser = _command(commands, "embed", "compute sentence embeddings and their cosine similarities", _embed)
    _add_model_options(parser, pretrained=True)
    _add_texts(parser)
    add_option(parser, "--pooling", "mean", "mean over tokens, or first token", choices=("mean", "cls"))
    help_text = "contextual vectors of the tokens instead, each with the token of the largest cosine"
    add_option(parser, "--tokens", False, help_text)
    add_option(parser, "--out", "", "save the embeddings as .npy, float32 (texts or tokens, width)", "FILE")


def _add_fill_mask(commands: Any) -> None:
    parser = _command(commands, "fill-mask", "predict the token at [MASK]", _fill_mask)
    _add_model_options(parser, "runs/mlm", pretrained=True)
    parser.add_argument("text", metavar="TEXT", help='text with one [MASK]: "Paris is the [MASK] of France."')
    add_option(parser, "--top", 5, "number of predictions", "N")


def _add_later_options(parser: argparse.ArgumentParser, command: str) -> None:
    """The recipe options that this command accepts, one flag each, with the help of every recipe."""
    helps: dict[str, dict[str, list[str]]] = {}  # flag -> help text -> recipes
    switches = set()
    for recipe, flag, spec, kind in _later_options(command):
        helps.setdefault(flag, {}).setdefault(spec.metadata["help"], []).append(recipe)
        if kind is bool:
            switches.add(flag)
    for flag, texts in helps.items():
        action = "store_true" if flag in switches else "store"
        help_text = "; ".join(f"{', '.join(names)}: {text}" for text, names in texts.items()).replace("%", "%%")
        parser.add_argument("--" + flag.replace("_", "-"), action=action, default=argparse.SUPPRESS, help=help_text)


def _later_options(command: str) -> Iterator[tuple[str, str, Any, Any]]:
    """Recipe, flag, field and type of each option that this command accepts for a trained model."""
    for name, recipe in recipes().items():
        for spec, kind in options.typed_fields(recipe.Config):
            if recipe.supports(command) and command in spec.metadata["later"]:
                yield name, spec.metadata["later"][command], spec, kind


def _train(chosen: argparse.Namespace) -> int:
    from transformer_kernels.training.checkpoint import checkpoint_folder, refuse_other_run
    from transformer_kernels.training.distributed import joined_processes, launch
    from transformer_kernels.training.loop.launched import restarted_run
    from transformer_kernels.training.loop.trainer import Trainer
    from transformer_kernels.training.report import describe_result

    if chosen.processes < 1:
        raise ValueError(f"--processes must be at least 1; got {chosen.processes}")
    if chosen.processes > 1 and "WORLD_SIZE" not in os.environ:
        return launch(chosen.processes, chosen.arguments)
    with joined_processes() as processes:
        if folder := restarted_run(_run_folder(chosen), chosen.recipe, processes):
            chosen.overwrite, chosen.out = False, str(folder)
            if checkpoint_folder(folder, ("last", "best")) != folder:
                chosen.resume = str(folder)
        config, start = _train_config(chosen)
        if config.out and not chosen.overwrite:
            refuse_other_run(Path(config.out), start)
        trainer = Trainer(find_recipe(config.recipe)(config), processes)
        if start is not None:
            trainer.restore(start)
        around = _certified(trainer) if chosen.certify and processes.first else contextlib.nullcontext()
        result = trainer.fit(overwrite=chosen.overwrite, around=around)
        if processes.first:
            print(describe_result(trainer, result))
            if report := trainer.recipe.report(trainer.model, trainer.device):
                print(report)
    return 0


@contextlib.contextmanager
def _certified(trainer: Any) -> Iterator[None]:
    """A certificate of the run in its folder; of a run that diverges, with what made the first non-finite value."""
    from transformer_kernels import certify
    from transformer_kernels.training import TrainingDiverged

    certificate: Any = None
    try:
        with certify(trainer.folder / "certificate.json") as certificate:
            certificate.name(trainer.model)
            try:
                yield
            except TrainingDiverged:
                certificate.find_non_finite(trainer.repeat)
                raise
    finally:
        if certificate is not None:
            print(f"certificate: {certificate}", file=sys.stderr)


def _run_folder(chosen: argparse.Namespace) -> str:
    """The folder of the run, as far as the command line names it."""
    from transformer_kernels.training.checkpoint import checkpoint_folder

    resumed = str(checkpoint_folder(chosen.resume, ("last", "best")).parent) if chosen.resume else ""
    return getattr(chosen, "out", "") or resumed


def _train_config(chosen: argparse.Namespace) -> tuple[Any, Path | None]:
    """The config merged from file, command line and resumed checkpoint, and the folder of that checkpoint."""
    from transformer_kernels.training.checkpoint import checkpoint_config, checkpoint_folder

    given = {key: value for key, value in vars(chosen).items() if key not in NOT_IN_CONFIG}
    source = chosen.config
    if not source and not chosen.resume and not given.get("init") and not given.get("preset"):  # which choose the model
        source = options.bundled_configs().get(find_recipe(chosen.recipe).Config.default_config)
    from_file = options.read_config_file(source) if source else {}
    if from_file:
        make_config(chosen.recipe, from_file, str(source))
    given = options.replaced_length(given)
    fields = dict(_named_value(text) for text in given.pop("model", ()))
    if not chosen.resume:
        given |= {"model": {**dict(from_file.get("model", {})), **fields}} if fields else {}
        return make_config(chosen.recipe, {**from_file, **given}, chosen.config or "command line"), None
    start = checkpoint_folder(chosen.resume, ("last", "best"))
    saved = checkpoint_config(start)
    if saved.recipe != chosen.recipe:
        raise ValueError(f"--resume: {start} was written by the recipe {saved.recipe}, not {chosen.recipe}")
    given["model"] = {**saved.model, **dict(from_file.get("model", {})), **fields}
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
    """The trained model, with the options that this command overrides."""
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
    from transformer_kernels.training.report import decoded, most_likely, text_until

    sampling = _sampling(chosen, chosen.greedy, repetition_penalty=chosen.repetition_penalty)
    prompts = chosen.prompt or ["\n"]
    if chosen.top < 0:
        raise ValueError(f"--top must not be negative; got {chosen.top}")
    if chosen.top and len(prompts) > 1:
        raise ValueError(f"--top lists the tokens after one --prompt; got {len(prompts)}")
    trained: Any
    ends: frozenset[int] = frozenset()
    if chosen.model is None:
        trained = _load_trained(chosen, "generate")
        steps = trained.recipe.generate(trained, prompts, chosen.length, sampling)
    else:
        from transformer_kernels.training import pretrained_commands as commands

        trained = commands.load(chosen.model, chosen.backend, chosen.device)
        ends = trained.ends
        steps = commands.generate(trained, prompts, chosen.length, sampling)
    if chosen.top:
        for choices in steps:
            print(most_likely(choices[0], trained.tokenizer, chosen.top), flush=True)
        return
    if len(prompts) > 1:  # print one continuation after the other; only a single one is streamed
        steps = list(steps)
    for row, prompt in enumerate(prompts):
        print(prompt, end="", flush=True)
        tokens = itertools.takewhile(lambda token: token not in ends, (choices[row].token for choices in steps))
        for piece in text_until(decoded(tokens, trained.tokenizer), chosen.stop):
            print(piece, end="", flush=True)
        print()


def _sampling(chosen: argparse.Namespace, greedy: bool, **more: float) -> Any:
    from transformer_kernels.training import Sampling

    temperature = 0.0 if greedy else chosen.temperature
    return Sampling(temperature=temperature, top_k=chosen.top_k, top_p=chosen.top_p, seed=chosen.seed, **more)


def _texts(chosen: argparse.Namespace, what: str) -> list[str]:
    try:
        texts = chosen.texts or [line for line in sys.stdin.read().splitlines() if line.strip()]
    except UnicodeDecodeError as error:
        raise ValueError(f"{what}: standard input is not UTF-8 text: {error.reason} at byte {error.start}") from error
    if not texts:
        raise ValueError(f"there is nothing to {what}: pass texts as arguments, or lines on standard input")
    for number, text in enumerate(texts, 1):
        if not text.strip():
            raise ValueError(f"{what}: text {number} of {len(texts)} must not be empty; got {text!r}")
    return texts


def _translate(chosen: argparse.Namespace) -> None:
    from transformer_kernels.training.decoding import BeamSearch, MinimumBayesRisk, Search

    search: Search = _sampling(chosen, greedy=not chosen.sample)
    if chosen.mbr is not None:
        search = MinimumBayesRisk(samples=chosen.mbr)
    elif chosen.beam is not None:
        search = BeamSearch(width=chosen.beam, length_penalty=chosen.length_penalty)
    trained = _load_trained(chosen, "translate")
    texts = _texts(chosen, "translate")
    if chosen.alignments and len(texts) > 1:
        raise ValueError(f"--alignments draws one sentence; got {len(texts)}")
    translated = trained.recipe.translate(trained, texts, search)
    for result in translated:
        print(result.translation)
        if result.unseen:
            print(f"characters not in the training vocabulary: {result.unseen}", file=sys.stderr)
    if chosen.alignments:
        from transformer_kernels.visualization.alignments import draw_alignment

        warning = draw_alignment(trained.recipe.alignment(trained, translated[0]), chosen.alignments)
        print(f"wrote {chosen.alignments}" + f"; {warning}" * bool(warning), file=sys.stderr)


def _classify(chosen: argparse.Namespace) -> None:
    trained = _load_trained(chosen, "classify")
    texts = _texts(chosen, "classify")
    classes, probabilities = trained.recipe.classify(trained, texts)
    for text, row in zip(texts, probabilities.tolist(), strict=True):
        best = max(range(len(classes)), key=row.__getitem__)
        print(f"{classes[best]:<8} {row[best]:7.2%}  {text if len(text) <= 80 else text[:77] + '...'}")


def _embed(chosen: argparse.Namespace) -> None:
    import numpy

    from transformer_kernels.training import pretrained_commands as commands

    texts = _texts(chosen, "embed")
    loaded = commands.load(chosen.model, chosen.backend, chosen.device)
    if chosen.tokens:
        names, vectors = commands.token_states(loaded, texts)
        print(commands.closest_tokens(names, vectors))
    else:
        vectors = commands.embed(loaded, texts, chosen.pooling)
        print(commands.cosine_table(texts, vectors))
    if chosen.out:
        with Path(chosen.out).open("wb") as file:  # numpy.save appends .npy to a name, but not to a file object
            numpy.save(file, vectors.numpy())


def _fill_mask(chosen: argparse.Namespace) -> None:
    from transformer_kernels.training import pretrained_commands as commands

    if chosen.top < 1:
        raise ValueError(f"--top must be at least 1; got {chosen.top}")
    if chosen.model is None:
        from transformer_kernels.training.checkpoint import load_trained
        from transformer_kernels.training.recipes.mlm import Mlm

        trained = load_trained(chosen.checkpoint, backend=chosen.backend, device=chosen.device, recipe="mlm")
        likely = Mlm.fill_mask(trained, chosen.text, chosen.top)
    else:
        loaded = commands.load(chosen.model, chosen.backend, chosen.device)
        likely = commands.fill_mask(loaded, chosen.text, chosen.top)
    for word, probability in likely:
        print(f"{probability:7.2%}  {word}")


def _evaluate(chosen: argparse.Namespace) -> None:
    trained = _load_trained(chosen, "evaluate")
    print(trained.recipe.evaluate(trained))


def _demo(chosen: argparse.Namespace) -> None:
    from transformer_kernels.training.demo import demo

    demo(seconds=chosen.seconds, backend=chosen.backend, out=chosen.out)


def _speedrun(chosen: argparse.Namespace) -> None:
    import torch

    from transformer_kernels.training.speedrun import add_line, speedrun

    environment = _of_the_checkout("benchmarks.environment", "speedrun")  # names the processor and the commit
    Path(chosen.board).parent.mkdir(parents=True, exist_ok=True)
    Path(chosen.board).open("a").close()  # before the training, not after it
    given = {name: getattr(chosen, name) for name in ("threads", "seed", "data_dir", "backend", "out")}
    given |= options.replaced_length({"time_limit": chosen.budget}) | {"device": "cpu"}
    from_file = options.read_config_file(chosen.config)
    given["model"] = {**dict(from_file.get("model", {})), **dict(_named_value(text) for text in chosen.model)}
    row = speedrun(make_config("char-gpt", {**from_file, **given}, chosen.config))
    processor = environment.device_name(torch.device("cpu")).rpartition(",")[0]
    recipe = ", ".join([Path(chosen.config).stem, *chosen.model])
    row |= {"processor": processor, "commit": environment.commit() or __version__, "recipe": recipe}
    add_line(Path(chosen.board), row)
    print("\n".join(f"{name:<19} {value}" for name, value in row.items()) + f"\nadded to            {chosen.board}")


def _info(chosen: argparse.Namespace) -> None:
    if chosen.kernels:
        print("\n".join(_of_the_checkout("benchmarks.compilers.status", "info --kernels").verification()))
        return
    if chosen.static:
        static = _of_the_checkout("benchmarks.compilers.static", "info --static")
        print("\n".join(map(static.page, static.BACKENDS)), end="")
        for backend in static.BACKENDS:
            if changed := static.changed(backend, static.recorded(backend)):
                print(f"\nThe {static.BACKENDS[backend]} sources of these changed since: {', '.join(changed)}")
        return
    from transformer_kernels.info import describe_installation

    print(f"transformer_kernels {__version__}\n\n{describe_installation()}")
    with contextlib.suppress(ImportError):
        status = _of_the_checkout("benchmarks.compilers.status", "info")
        print("\nkernels\n" + "\n".join(f"  {line}" for line in status.summary()))


def _verify_device(chosen: argparse.Namespace) -> int:
    import torch

    from transformer_kernels.verification import trust

    if chosen.sample:
        from transformer_kernels.verification.certificate import replay

        return 0 if replay(chosen.sample) else 1
    return trust.verify_device(torch.device(chosen.device), chosen.backend, chosen.op or None)


def _of_the_checkout(module: str, command: str) -> ModuleType:
    """A module of the source checkout that is not part of the wheel.

    Raises:
        ImportError: the package is not installed from a checkout.
    """
    checkout = Path(__file__).resolve().parents[1]
    if (checkout / "benchmarks" / "cli.py").is_file() and str(checkout) not in sys.path:
        sys.path.insert(0, str(checkout))
    try:
        found = importlib.util.find_spec(module) is not None
    except ImportError:
        found = False
    if not found:
        where = "the source checkout (git clone, then pip install -e .)"
        raise ImportError(f"{command} needs {where}; {module} is not here")
    return importlib.import_module(module)


def _forwarded(command: str, arguments: list[str]) -> int:
    """The benchmarks and the kernel report have command lines of their own."""
    module = {"bench": "benchmarks.cli", "kernels": "benchmarks.compilers.triton"}[command]
    return _of_the_checkout(module, command).main(arguments) or 0


if __name__ == "__main__":
    raise SystemExit(main())
