"""Every command, as typed by a user."""

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.support import fresh
from transformer_kernels import cli
from transformer_kernels.training import CharGPTConfig, DataFileError, TrainingDiverged, checkpoint
from transformer_kernels.training._optional import require
from transformer_kernels.training.checkpoint import checkpoint_config, load_checkpoint
from transformer_kernels.training.config import resumed_config
from transformer_kernels.visualization.curves import read_log

CHECKOUT = Path(__file__).resolve().parents[1]
TINY = ["--model", "layers=1", "--model", "width=16", "--model", "heads=2", "--batch-size", "4", "--no-progress"]
REVIEWS = 'review,sentiment\n"a great film",positive\n"a dull film",negative\n'

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("TRANSFORMER_KERNELS_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Contains the data, and a run of each recipe."""
    folder = tmp_path_factory.mktemp("cli")
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 40)
    (folder / "train.csv").write_text(REVIEWS + REVIEWS.partition("\n")[2] * 9)
    (folder / "test.csv").write_text(REVIEWS)
    before = os.environ.get("TRANSFORMER_KERNELS_CACHE")
    os.environ["TRANSFORMER_KERNELS_CACHE"] = str(folder / "cache")
    imdb = ["--data", folder, "--tokenizer", "bytes", "--max-length", "32", "--epochs", "1", "--out", folder / "imdb"]
    assert train(folder, folder / "gpt", "--steps", 4) == run("train", "imdb", *imdb, *TINY) == 0
    os.environ.pop("TRANSFORMER_KERNELS_CACHE") if before is None else os.environ.update(
        TRANSFORMER_KERNELS_CACHE=before
    )
    return folder


def run(*arguments):
    return cli.main([str(argument) for argument in arguments])


def train(folder, out, *options):
    """A run of a tiny character GPT."""
    shared = ["--corpus", folder / "text.txt", "--context", 8, "--out", out, *TINY]
    return run("train", "char-gpt", *shared, *options)


def refused(capsys, *arguments):
    """The error message of a command that fails with status 1."""
    assert run(*arguments) == 1
    message = capsys.readouterr().err
    assert message.startswith("transformer-kernels: error: ")
    assert "Traceback" not in message
    return message


COMMANDS = ["", "train", "train char-gpt", "train imdb", "generate", "classify", "evaluate", "attend", "plot"]
COMMANDS += ["plot words", "tokenize", "sweep", "demo", "speedrun", "info"]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_worth_reading(capsys, command):
    with pytest.raises(SystemExit) as end:
        run(*command.split(), "--help")
    assert end.value.code == 0
    assert len(capsys.readouterr().out) > 150


def test_help_of_training_names_every_option_and_its_default(capsys):
    with pytest.raises(SystemExit):
        run("train", "imdb", "--help")
    message = " ".join(capsys.readouterr().out.split())
    for part in ("--warmup-steps", "--vocab-dir", "rate (default: 4e-3)", "(default: imdb_cpu)", "(default: 32)"):
        assert part in message


def test_resuming_a_finished_run_says_that_nothing_is_left(folder, capsys, tmp_path):
    assert train(folder, tmp_path / "run", "--steps", 2, "--no-sample") == 0
    assert "It writes:" not in capsys.readouterr().out
    assert run("train", "char-gpt", "--resume", tmp_path / "run") == 0
    printed = capsys.readouterr().out
    assert printed.startswith(
        f"{tmp_path / 'run'}: the run has ended (steps) after step 2 of 2, so nothing was trained;"
    )
    assert f"pass --resume {tmp_path / 'run'} with --steps N above 2\n" in printed
    assert "nan" not in printed and "0 tokens/s" not in printed and "validation       loss" in printed


def test_resuming_after_early_stopping_names_patience(folder, capsys, tmp_path):
    stopping = ["--patience", 1, "--eval-every", 1, "--lr", 1e-30, "--no-sample"]
    assert train(folder, tmp_path / "run", "--steps", 50, *stopping) == 0
    capsys.readouterr()
    assert run("train", "char-gpt", "--resume", tmp_path / "run") == 0
    assert "with a larger --patience, or --patience 0" in capsys.readouterr().out.splitlines()[0]


def test_resuming_after_the_time_is_over_names_the_time_limit(folder, capsys, tmp_path):
    assert train(folder, tmp_path / "run", "--time-limit", "0.3s", "--no-sample") == 0
    step = json.loads((tmp_path / "run" / "last" / "trainer.json").read_text())["step"]
    assert capsys.readouterr().out.startswith(f"ended by time limit after step {step}\n")
    assert run("train", "char-gpt", "--resume", tmp_path / "run") == 0
    message = capsys.readouterr().out.splitlines()[0]
    assert f"the run has ended (time limit) after step {step}, so nothing was trained" in message
    assert message.endswith("with a larger --time-limit")


def test_a_misspelt_model_field_gets_a_suggestion(folder, capsys, tmp_path):
    options = ["--corpus", folder / "text.txt", "--context", 8, "--model", "widht=64"]
    message = refused(capsys, "train", "char-gpt", *options)
    assert message == ("transformer-kernels: error: model: build: char_gpt has no field widht; did you mean width?\n")


def test_a_broken_dependency_is_not_reported_as_missing(monkeypatch, tmp_path):
    (tmp_path / "half_installed.py").write_text("import a_module_that_is_missing\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(
        ImportError, match=r"^half_installed is installed, but its import failed: No module named 'a_mod"
    ):
        require("half_installed")
    with pytest.raises(ImportError, match=r"^sklearn_x is needed for this: pip install sklearn_x$"):
        require("sklearn_x.metrics")


def test_an_empty_text_is_refused(folder, capsys):
    for text in ("", " \t"):
        message = refused(capsys, "classify", "--checkpoint", folder / "imdb", "good", text)
        assert message == f"transformer-kernels: error: classify: text 2 of 2 must not be empty; got {text!r}\n"


def test_a_wrong_checkpoint_names_the_remedy(folder, capsys, tmp_path):
    message = refused(capsys, "generate", "--checkpoint", folder / "nothing")
    assert f"{folder / 'nothing'}: no such checkpoint; pass a folder that `transformer-kernels train` wrote" in message
    (tmp_path / "config.json").write_text("{}")
    message = refused(capsys, "generate", "--checkpoint", tmp_path)
    assert message.endswith("found no manifest.json in it; a pretrained model is passed as --model\n")
    (tmp_path / "config.json").unlink()
    (tmp_path / "log.jsonl").write_text("")
    message = refused(capsys, "generate", "--checkpoint", tmp_path)
    assert message.endswith("found no manifest.json in it; the run has no checkpoint yet\n")


def test_a_model_name_names_the_download(capsys):
    message = refused(capsys, "generate", "--model", "openai-community/gpt2")
    assert "openai-community/gpt2: no such folder or file" in message
    assert "with `hf download openai-community/gpt2 --local-dir gpt2`" in message


def test_training_tells_how_it_ended(folder, capsys):
    out = folder / "message"
    assert train(folder, out, "--steps", 2) == 0
    message = capsys.readouterr().out
    for part in ("ended by steps after step 2 of 2", "validation", "tokens/s", "peak memory", str(out), "It writes:"):
        assert part in message
    assert {"best", "last", "log.jsonl"} <= set(os.listdir(out))


def test_training_on_reviews_reports_on_those_held_out(folder, capsys, tmp_path):
    options = ["--data", folder, "--tokenizer", "bytes", "--max-length", 32, "--steps", 1, "--out", tmp_path / "run"]
    assert run("train", "imdb", *options, "--validation", 0.5, "--baseline", *TINY) == 0
    message = capsys.readouterr().out
    for part in ("precision", "on the 10 reviews held out", "TF-IDF with logistic regression: 100.00%"):
        assert part in message


def test_a_config_file_is_overridden_by_the_command_line(folder, tmp_path, capsys):
    lines = [f"corpus: {folder / 'text.txt'}", "context: 8", "steps: 9", f"out: {tmp_path / 'run'}", "lr: 1e-2"]
    (tmp_path / "run.yaml").write_text("\n".join(lines))
    assert run("train", "char-gpt", "--config", tmp_path / "run.yaml", "--steps", 2, *TINY) == 0
    saved = json.loads((tmp_path / "run" / "last" / "config.json").read_text())
    assert (saved["steps"], saved["lr"], saved["model"]) == (2, 0.01, {"layers": 1, "width": 16, "heads": 2})
    lasting = ["--time-limit", "1h", "--patience", 1, "--eval-every", 1, "--lr", 1e-30, "--overwrite"]
    assert run("train", "char-gpt", "--config", tmp_path / "run.yaml", *lasting, *TINY) == 0
    saved = json.loads((tmp_path / "run" / "last" / "config.json").read_text())
    assert (saved["steps"], saved["time_limit"]) == (None, 3600.0)
    assert "time_limit must be a duration" in refused(capsys, "train", "char-gpt", "--time-limit", "5 minutes")


def test_training_without_a_config_uses_the_default_of_the_command(folder, tmp_path, capsys):
    assert train(folder, tmp_path / "run", "--steps", 1) == 0
    saved = json.loads((tmp_path / "run" / "last" / "config.json").read_text())
    assert (saved["time_limit"], saved["lr"], saved["beta2"], saved["steps"]) == (0.0, 6e-3, 0.99, 1)
    assert saved["model"].items() > {"width": 16, "norm": "rms", "positions": "rotary"}.items()
    assert train(folder, tmp_path / "run", "--steps", 1, "--config", "notebook", "--overwrite") == 0
    saved = json.loads((tmp_path / "run" / "last" / "config.json").read_text())
    assert (saved["lr"], saved["model"]) == (3e-3, {"layers": 1, "width": 16, "heads": 2})
    capsys.readouterr()
    with pytest.raises(SystemExit):
        run("train", "char-gpt", "--help")
    message = " ".join(capsys.readouterr().out.split())
    for part in ("(default: five_minutes)", "(default: 5m)", "(default: auto)", "peak learning rate (default: 6e-3)"):
        assert part in message


def test_an_unknown_key_in_a_config_file_is_an_error(tmp_path, capsys):
    (tmp_path / "run.toml").write_text("stepz = 3")
    message = refused(capsys, "train", "char-gpt", "--config", tmp_path / "run.toml")
    assert "run.toml: unknown key 'stepz' for char-gpt; did you mean 'steps'?" in message


def test_resuming_goes_on_from_the_last_checkpoint(folder, tmp_path, capsys):
    out = tmp_path / "run"
    assert train(folder, out, "--steps", 2) == 0
    assert run("train", "char-gpt", "--resume", out, "--steps", 4) == 0
    assert "after step 4 of 4" in capsys.readouterr().out
    assert "batch_size cannot change: 4 in the checkpoint, 8 requested" in refused(
        capsys, "train", "char-gpt", "--resume", out, "--batch-size", 8
    )
    assert "written by the recipe char-gpt" in refused(capsys, "train", "imdb", "--resume", out)


def test_resuming_with_the_options_of_the_run(folder, tmp_path, capsys):
    out = tmp_path / "run"
    shared = ["--corpus", folder / "text.txt", "--context", 8, "--model", "ffn_width=20", *TINY]
    assert run("train", "char-gpt", "--out", out, "--steps", 2, *shared) == 0
    assert run("train", "char-gpt", "--resume", out, "--steps", 4, *shared) == 0
    assert "after step 4 of 4" in capsys.readouterr().out
    message = refused(capsys, "train", "char-gpt", "--resume", out, *shared, "--model", "layers=2")
    assert "--resume: model cannot change" in message


def test_what_was_decided_at_the_start_may_be_left_to_be_decided():
    saved = CharGPTConfig(corpus="tinyshakespeare", dtype="float32")
    assert resumed_config(saved, {"corpus": "auto", "dtype": "auto"}) == saved
    with pytest.raises(ValueError, match="corpus cannot change: 'tinyshakespeare' in the checkpoint, 'stdlib' req"):
        resumed_config(saved, {"corpus": "stdlib"})


def test_a_last_checkpoint_behind_a_symbolic_link(folder, tmp_path, capsys):
    """It is read through the link; the next one replaces the link, and its target is kept."""
    out, kept = tmp_path / "run", tmp_path / "kept"
    assert train(folder, out, "--steps", 2) == 0
    (out / "last").rename(kept)
    (out / "last").symlink_to(kept)
    before = sorted((path.name, path.read_bytes()) for path in kept.iterdir())
    for steps in (4, 6):
        assert run("train", "char-gpt", "--resume", out, "--steps", steps) == 0
    assert "after step 6 of 6" in capsys.readouterr().out
    assert not (out / "last").is_symlink() and load_checkpoint(out / "last").trainer["step"] == 6
    assert sorted((path.name, path.read_bytes()) for path in kept.iterdir()) == before
    (out / "last").rename(tmp_path / "moved")
    (out / "last").symlink_to(tmp_path / "moved")
    assert train(folder, out, "--steps", 2, "--overwrite") == 0
    assert load_checkpoint(out / "last").trainer["step"] == 2 and (tmp_path / "moved").is_dir()


def test_a_dangling_link_in_place_of_a_checkpoint(folder, tmp_path):
    out = tmp_path / "run"
    out.mkdir()
    (out / "last").symlink_to(tmp_path / "nowhere")
    assert train(folder, out, "--steps", 2) == 0
    assert load_checkpoint(out / "last").trainer["step"] == 2


def test_a_log_that_was_cut_is_continued_and_drawn(folder, tmp_path):
    out = tmp_path / "run"
    assert train(folder, out, "--steps", 2, "--log-every", 1) == 0
    log = out / "log.jsonl"
    log.write_bytes(log.read_bytes()[:-9])
    assert run("train", "char-gpt", "--resume", out, "--steps", 4) == 0
    with pytest.warns(UserWarning, match=r"log\.jsonl, line \d+: cut short, skipped"):
        lines = read_log(out)
    assert [line["step"] for line in lines if line["event"] == "train"][-2:] == [3, 4]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "--checkpoint", "x", "--lenght", "3"], "--lenght: did you mean --length?"),
        (["generate", "--checkpointt", "x"], "is required; --checkpointt: did you mean --checkpoint?"),
        (["train", "imdb", "--batchsize=3"], "unrecognized arguments: --batchsize=3; --batchsize: did you mean"),
        (["plot", "run", "x", "--uot", "y"], "unrecognized arguments: --uot y; --uot: did you mean --out?"),
        (["info", "--nothing-like-it"], "unrecognized arguments: --nothing-like-it\n"),
        (["info", "extra"], "unrecognized arguments: extra\n"),
        (["trian"], "invalid choice: 'trian'; did you mean train?"),
        (["train", "imdb", "--optimizer", "moun"], "invalid choice: 'moun'; did you mean muon?"),
        (["train", "imdb", "--schedule", "xyz"], "invalid choice: 'xyz'; one of constant, cosine"),
    ],
)
def test_a_misspelt_option_gets_a_suggestion_in_two_lines(arguments, message, capsys):
    with pytest.raises(SystemExit) as end:
        run(*arguments)
    error = capsys.readouterr().err
    assert end.value.code == 2 and message in error
    command = " ".join(
        ["transformer-kernels", *(word for word in arguments[:2] if word.isalpha() and word not in ("extra", "trian"))]
    )
    assert error.startswith(f"{command}: error: ") and error.endswith(f"\nsee {command} --help\n")
    assert error.count("\n") == 2


@pytest.mark.parametrize(
    "command",
    [
        ["train", "char-gpt", "--config", "{}/none.yaml"],
        ["train", "char-gpt", "--config", "{}"],
        [
            "train",
            "imdb",
            "--data",
            "{}/train.csv",
            "--test-data",
            "{}/none.csv",
            "--tokenizer",
            "bytes",
            "--init",
            "{}",
        ],
        ["evaluate", "--checkpoint", "{}/imdb", "--data", "{}/train.csv", "--test-data", "{}/none.csv"],
        ["embed", "--model", "{}/none", "a"],
        ["nearest", "--vectors", "{}/none.txt", "a"],
        ["train", "char-gpt", "--corpus", "{}/text.txt", "--out", "{}/text.txt/run", "--steps", "1"],
        ["plot", "activations", "--out", "{}/none/a.png"],
    ],
    ids=lambda command: " ".join(command)[:40],
)
def test_errors_of_the_system_have_no_number(command, folder, capsys):
    message = refused(capsys, *(text.format(folder) for text in command))
    assert "[Errno" not in message and str(folder) in message and message.count("\n") == 1


@pytest.mark.parametrize("width", [2**40, 2**60])
def test_memory_that_the_machine_does_not_have(width, folder, tmp_path, capsys):
    options = ["--corpus", folder / "text.txt", "--context", 8, "--out", tmp_path / "run", *TINY, "--steps", 1]
    message = refused(capsys, "train", "char-gpt", *options, "--model", f"width={width}")
    assert "try a smaller --batch-size" in message and "alloc_cpu" not in message and message.count("\n") == 1


def test_an_initial_run_must_be_a_text_encoder(folder, tmp_path, capsys):
    options = ["--data", folder, "--tokenizer", "bytes", "--out", tmp_path / "run", "--steps", 1]
    message = refused(capsys, "train", "imdb", *options, "--init", folder / "gpt")
    assert "gpt/best: expected a text encoder (train mlm), found one of char-gpt" in message


def test_reviews_of_one_label(tmp_path, capsys):
    (tmp_path / "train.csv").write_text("review,sentiment\n" + '"a great film",positive\n' * 20)
    options = ["--data", tmp_path / "train.csv", "--tokenizer", "bytes", "--out", tmp_path / "run", "--steps", 1]
    assert "train.csv: all 20 reviews for training are positive" in refused(capsys, "train", "imdb", *options, *TINY)


def test_evaluate_names_the_option_that_is_missing(folder, tmp_path, capsys):
    file, out = folder / "train.csv", tmp_path / "run"
    options = ["--data", file, "--tokenizer", "bytes", "--max-length", 32, "--out", out, "--steps", 1]
    assert run("train", "imdb", *options, *TINY) == 0
    message = refused(capsys, "evaluate", "--checkpoint", out)
    assert f"the training data is a file, {file}: give a file of test reviews as --test-data" in message
    message = refused(capsys, "evaluate", "--checkpoint", out, "--data", tmp_path / "moved")
    assert "moved': pass the aclImdb folder" in message


@pytest.mark.parametrize("command", [["generate", "--top", "-1"], ["fill-mask", "a [MASK]", "--top", "0"]])
def test_a_number_of_tokens_that_cannot_be_listed(command, folder, capsys):
    assert "--top must " in refused(capsys, *command, "--checkpoint", folder / "gpt")


def test_generate_streams_the_prompt_and_as_many_characters_as_asked(folder, capsys):
    for extra in (["--greedy"], ["--temperature", "1.2", "--top-k", "5", "--top-p", "0.9", "--seed", "3"]):
        assert run("generate", "--checkpoint", folder / "gpt", "--prompt", "the ", "--length", 20, *extra) == 0
        message = capsys.readouterr().out
        assert message.startswith("the ")
        assert len(message) == 4 + 20 + 1


def test_generate_continues_several_prompts(folder, capsys):
    generate = ["generate", "--checkpoint", folder / "gpt", "--length", 12, "--greedy", "--repetition-penalty", 1.2]
    prompts = ["the ", "q", "brown fox jumps "]
    alone = []
    for prompt in prompts:
        assert run(*generate, "--prompt", prompt) == 0
        alone.append(capsys.readouterr().out)
    assert run(*generate, *(word for prompt in prompts for word in ("--prompt", prompt))) == 0
    assert capsys.readouterr().out == "".join(alone)
    message = refused(capsys, *generate, "--prompt", "a", "--prompt", "b", "--top", 3)
    assert "--top lists the tokens after one --prompt; got 2" in message


def test_generate_stops_before_the_stop_text(folder, capsys):
    command = ["generate", "--checkpoint", folder / "gpt", "--prompt", "the ", "--length", 30, "--seed", 1]
    run(*command)
    whole = capsys.readouterr().out[4:-1]
    run(*command, "--stop", whole[10:13])
    assert capsys.readouterr().out == "the " + whole[: whole.index(whole[10:13])] + "\n"


def test_generate_lists_the_most_likely_characters(folder, capsys):
    assert run("generate", "--checkpoint", folder / "gpt", "--prompt", "q", "--length", 2, "--top", 10, "--greedy") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    chosen, _, listed = lines[0].partition(" | ")
    probabilities = [float(part) for part in listed.split() if part.startswith("0.")]
    assert len(probabilities) == 10
    assert probabilities == sorted(probabilities, reverse=True)
    assert listed.startswith(chosen.strip())


def test_generate_refuses_what_it_cannot_read(folder, capsys):
    assert "outside the model's vocabulary: ['Ä']" in refused(
        capsys, "generate", "--checkpoint", folder / "gpt", "--prompt", "Ä"
    )
    assert "the prompt must have" in refused(capsys, "generate", "--checkpoint", folder / "gpt", "--prompt", "")
    assert "no such checkpoint" in refused(capsys, "generate", "--checkpoint", folder / "nothing")
    message = refused(capsys, "generate", "--checkpoint", folder / "imdb")
    assert "expected a model of char-gpt or gpt, found one of imdb" in message


def test_classify_takes_arguments_or_lines(folder, capsys, monkeypatch):
    assert run("classify", "--checkpoint", folder / "imdb", "a great film", "x" * 200) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] in ("positive", "negative") for line in lines] == [True, True]
    assert all("%" in line and len(line) < 100 for line in lines)
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n\ntwo\n"))
    assert run("classify", "--checkpoint", folder / "imdb") == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert "nothing to classify" in refused(capsys, "classify", "--checkpoint", folder / "imdb")


def test_evaluate_reports_on_the_test_reviews(folder, capsys):
    assert run("evaluate", "--checkpoint", folder / "imdb", "--baseline") == 0
    message = capsys.readouterr().out
    for part in ("precision", "negative", "accuracy", "on 2 test reviews", "TF-IDF with logistic regression: 100.00%"):
        assert part in message


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_a_model_runs_with_another_backend(folder, capsys, backend):
    assert run("evaluate", "--checkpoint", folder / "gpt", "--backend", backend) == 0
    message = capsys.readouterr().out
    assert "loss 3." in message and "bits per character" in message and "on 168 characters" in message


def test_info_tells_versions_backends_and_reasons(capsys, monkeypatch):
    monkeypatch.delenv("TRANSFORMER_KERNELS_EMULATE", raising=False)
    assert run("info") == 0
    message = capsys.readouterr().out
    for part in ("transformer_kernels 0", "torch ", "supported: 3.4 or newer", "backends on", "triton", "cuda", "auto"):
        assert part in message


def test_info_says_once_what_kernels_share(capsys, monkeypatch):
    from benchmarks.compilers import status

    states = {"softmax/cuda": "verified on a GPU", **dict.fromkeys(("gelu/cuda", "gelu/triton"), "on no GPU yet")}
    monkeypatch.setattr(
        status, "verification", lambda *_: [f"{kernel:<22} {state}" for kernel, state in states.items()]
    )
    assert run("info") == 0
    message = capsys.readouterr().out.splitlines()
    assert message[message.index("kernels") + 1 :] == [
        f"  {'softmax/cuda':<22} verified on a GPU",
        f"  {'the other 2':<22} on no GPU yet (each: info --kernels)",
    ]
    assert run("info", "--kernels") == 0
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_info_of_a_machine_without_a_gpu_says_so_once():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    as_installed = dict.fromkeys(("TRITON_INTERPRET", "TRANSFORMER_KERNELS_EMULATE"))
    message = fresh.checked("from transformer_kernels.cli import main; main(['info'])", **as_installed)
    assert message.count("backend='auto' runs on the CPU") == 1
    assert "triton     needs a CUDA device" in message


def final(runs):
    """The learning rate of the last step of each run."""
    return [run.trainer._latest.learning_rate for run in runs]


def test_demo_trains_beside_the_reference_and_compares(capsys, monkeypatch, tmp_path):
    from transformer_kernels.training import demo

    monkeypatch.setattr(demo, "BACKENDS", ("torch",))
    monkeypatch.setattr(demo, "TIMED_SECONDS", 0.0)
    monkeypatch.setattr(demo, "MODEL", {"layers": 1, "width": 16, "heads": 2, "ffn_width": 24})
    monkeypatch.setattr(demo, "SHORT", {"context": 16, "batch_size": 4})
    rates, train = [], demo.train
    monkeypatch.setattr(demo, "train", lambda runs, seconds: (train(runs, seconds), rates.extend(final(runs))))
    monkeypatch.delenv("TRANSFORMER_KERNELS_DATA", raising=False)  # the text is bundled
    assert run("demo", "--seconds", "0.5", "--backend", "torch", "--out", tmp_path / "demo") == 0
    assert max(rates) < 0.2 * 6e-3  # the last step is near the end of the time, where the rate is 0
    printed = capsys.readouterr().out
    steps = dict(re.findall(r"^  (reference|torch) +\d\.\d{4}   after ([\d,]+) steps$", printed, re.MULTILINE))
    assert set(steps) == {"reference", "torch"} and "0" not in steps.values(), printed
    assert re.search(r"^  reference +[\d,]+   #+ 1\.00x$", printed.replace("█", "#"), re.MULTILINE), printed
    assert re.search(r"^  torch +[\d,]+   #+ \d+\.\d\dx$", printed.replace("█", "#"), re.MULTILINE), printed
    assert re.search(r"^  ROMEO:.* [│|] ROMEO:", printed, re.MULTILINE), printed
    assert len(re.findall(r"^ +\d\.\d\d [│|]", printed, re.MULTILINE)) == 8, printed
    assert f"generate --checkpoint {tmp_path / 'demo' / 'last'} --prompt" in printed
    assert run("generate", "--checkpoint", tmp_path / "demo" / "last", "--prompt", "class ", "--length", "5") == 0


def test_a_speedrun_adds_a_line_to_the_board(folder, capsys, tmp_path):
    lines = [f"corpus: {folder / 'text.txt'}", "context: 8", "batch_size: 4", "steps: 9", "progress: false"]
    lines.append("eval_every: 1")
    (tmp_path / "recipe.yaml").write_text("\n".join([*lines, "model: {layers: 1, width: 16, heads: 2}"]))
    board = tmp_path / "boards" / "speedrun.md"
    threads = torch.get_num_threads()
    for seed in (0, 1):
        options = ["--budget", "0.5s", "--threads", threads, "--seed", seed, "--out", tmp_path / f"run{seed}"]
        options += ["--model", f"ffn_width={24 + seed}"]
        assert run("speedrun", *options, "--config", tmp_path / "recipe.yaml", "--board", board) == 0
    assert f"added to            {board}" in capsys.readouterr().out
    header, rule, *rows = [line.strip("| ").split(" | ") for line in board.read_text().splitlines()]
    assert len(rows) == 2 and set(rule) == {"---"}
    recorded = Path(cli.__file__).parents[1] / "benchmarks/results/speedrun.md"  # to which lines are added
    assert " | ".join(header) in recorded.read_text()
    for seed, cells in enumerate(rows):
        row = dict(zip(header, cells, strict=True))
        step = json.loads((tmp_path / f"run{seed}" / "last" / "trainer.json").read_text())["step"]
        assert row["characters seen"] == f"{step * 32:,}" and step > 0
        assert float(row["bits per character"]) == pytest.approx(float(row["loss"]) / 0.693147, abs=2e-4)
        assert (row["budget, s"], row["threads"], row["seed"]) == ("0.5", str(threads), str(seed))
        assert row["evaluated on"] == f"168 of {folder / 'text.txt'}"  # 21 windows of 8 of the last 176 characters
        assert float(row["CPU seconds"]) > 0 and row["processor"] and row["commit"]
        assert row["recipe"] == f"recipe, ffn_width={24 + seed}"
        events = [json.loads(line)["event"] for line in (tmp_path / f"run{seed}" / "log.jsonl").open()]
        assert events.count("validation") == 1  # at the end; those of the recipe would use up the budget
        config = checkpoint_config(tmp_path / f"run{seed}" / "last")
        assert config.model == {"layers": 1, "width": 16, "heads": 2, "ffn_width": 24 + seed}
    capsys.readouterr()
    assert run("evaluate", "--checkpoint", tmp_path / "run1" / "last") == 0
    assert f"loss {row['loss']}, " in capsys.readouterr().out


def test_a_speedrun_refuses_other_lengths(capsys, tmp_path):
    out = ["--out", tmp_path / "run"]
    assert "expected a budget and a held-out part; got 0, 90/10" in refused(capsys, "speedrun", "--budget", 0, *out)


@pytest.mark.parametrize("command", ["bench", "kernels"])
def test_commands_of_other_modules_are_forwarded_or_reported(command, capsys, monkeypatch):
    calls = []
    module = SimpleNamespace(main=calls.append)
    found = SimpleNamespace(find_spec=lambda name: module)
    monkeypatch.setattr(cli, "importlib", SimpleNamespace(util=found, import_module=lambda name: module))
    assert run(command, "--quick", "x") == 0
    assert calls == [["--quick", "x"]]
    found.find_spec = lambda name: None
    assert "needs the source checkout" in refused(capsys, command)


@pytest.mark.parametrize(
    "raised, status, message",
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB"), 1, "--batch-size"),
        (DataFileError("no file"), 1, "error: no file"),
        (TrainingDiverged("the loss is nan"), 1, "error: the loss is nan"),
        (ImportError("tqdm is needed"), 1, "error: tqdm is needed"),
    ],
)
def test_failures_set_the_status_and_print_no_traceback(raised, status, message, capsys, monkeypatch):
    def fail():
        raise raised

    monkeypatch.setattr("transformer_kernels.info.describe_installation", fail)
    assert run("info") == status
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, status, message", [(["--help"], 0, "--budget"), (["--plot"], 2, "pip install matplotlib")]
)
def test_bench_without_matplotlib_prints_help_and_the_reason(arguments, status, message, capsys, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] in ("benchmarks", "matplotlib")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    try:
        ended = run("bench", *arguments)
    except SystemExit as end:
        ended = end.code
    assert ended == status
    printed = "".join(capsys.readouterr())
    assert message in printed
    assert "Traceback" not in printed


def test_a_gpt_on_bytes_is_trained_and_writes(folder, capsys, tmp_path):
    options = ["--corpus", folder / "text.txt", "--tokenizer", "bytes", "--context", 8, "--steps", 30, *TINY]
    assert run("train", "gpt", *options, "--out", tmp_path / "gpt", "--no-sample") == 0
    capsys.readouterr()
    assert run("evaluate", "--checkpoint", tmp_path / "gpt") == 0
    message = capsys.readouterr().out
    assert message.endswith("on 168 tokens\n") and "bits per token" in message
    assert run("generate", "--checkpoint", tmp_path / "gpt", "--prompt", "fü", "--length", 5) == 0
    assert capsys.readouterr().out.startswith("fü")
    config = json.loads((tmp_path / "gpt" / "last" / "config.json").read_text())
    chosen = {"layers": 1, "width": 16, "heads": 2}  # the small size is not written over it
    assert config["model"].items() > chosen.items() and config["optimizer"] == "muon"


VALUES = {bool: ((), True), str: (("x",), "x"), int: (("3",), "3"), float: (("0.5",), "0.5")}
"""The arguments of a flag, and the value that the recipe's config receives."""


@pytest.mark.parametrize("command", ["generate", "classify", "evaluate"])
def test_options_of_a_trained_model_are_those_of_the_command_line(command, monkeypatch):
    """A switch that is not given is off, whatever the training run had."""
    later = list(cli._later_options(command))
    monkeypatch.setattr(checkpoint, "load_trained", lambda folder, options, **_: options)
    for recipe in {name for name, *_ in later}:
        monkeypatch.setattr(
            checkpoint, "checkpoint_config", lambda folder, recipe=recipe: SimpleNamespace(recipe=recipe)
        )
        own = [(flag, spec.name, kind) for name, flag, spec, kind in later if name == recipe]
        off = {field: False for _, field, kind in own if kind is bool}
        for flag, field, kind in own:
            arguments, value = VALUES[kind]
            given = ["--" + flag.replace("_", "-"), *arguments]
            found = [
                cli._load_trained(cli._parser().parse_args([command, "--checkpoint", "run", *each]), command)
                for each in ([], given)
            ]
            assert found == [off, off | {field: value}]


def test_an_option_of_another_recipe_is_refused_by_evaluate(folder, capsys):
    message = refused(capsys, "evaluate", "--checkpoint", folder / "gpt", "--baseline")
    assert "--baseline is not an option of char-gpt" in message
    assert run("evaluate", "--checkpoint", folder / "gpt", "--data", folder / "train.csv") == 1
    assert "outside the model's vocabulary" in capsys.readouterr().err


def test_escape_sequences_of_a_path_are_shown_not_sent(capsys):
    assert cli.main(["generate", "--checkpoint", "runs/\x1b[31mred"]) == 1
    errors = capsys.readouterr().err
    assert "\x1b" not in errors and "\\x1b[31mred" in errors


def test_a_closed_pipe_is_no_error():
    """As in `transformer-kernels info | head -1`."""
    environment = {**os.environ, "TRANSFORMER_KERNELS_EMULATE": "0", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "transformer_kernels", "info"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, cwd=CHECKOUT)
    process.stdout.close()
    errors = process.stderr.read()
    assert process.wait(120) == 1 and b"Traceback" not in errors and b"Exception ignored" not in errors, errors


def test_a_certificate_of_a_run(folder, capsys, tmp_path):
    """The loss of each step is that of a run without it; the certificate is in the run's folder."""
    assert train(folder, tmp_path / "plain", "--steps", 6) == 0
    assert train(folder, tmp_path / "run", "--steps", 6, "--certify") == 0
    assert re.search(r"certificate: 0\.\d+ of the budget; 0 of \d+ samples beyond it; ", capsys.readouterr().err)
    written = json.loads((tmp_path / "run" / "certificate.json").read_text())
    assert (
        written["samples"] > 0 and not written["unchecked"] and any("attention" in each for each in written["layers"])
    )
    weights = [(tmp_path / name / "last" / "model.safetensors").read_bytes() for name in ("plain", "run")]
    assert weights[0] == weights[1]


def test_a_certificate_names_what_made_a_run_diverge(folder, capsys, tmp_path):
    """The step is run again on the weights that gave a loss that is not finite."""
    assert train(folder, tmp_path / "run", "--steps", 40, "--lr", 1e30, "--clip", 0, "--certify") == 1
    error = capsys.readouterr().err
    assert re.search(r"not finite: \S+ in \S+, (forward|backward), row \(.*\); ", error), error
    written = json.loads((tmp_path / "run" / "certificate.json").read_text())
    assert written["non_finite"]["layer"] and written["non_finite"]["operator"]


@pytest.mark.parametrize(
    "command", [["generate", "--prompt", "\udcff"], ["tokenize", "\udcff"], ["attend", "\udcff"]], ids=" ".join
)
def test_a_text_in_another_encoding(command, folder, capsys):
    assert "not UTF-8 text: '\\udcff'" in refused(capsys, *command, "--checkpoint", folder / "run")


def test_an_environment_without_its_launcher(folder, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    given = ["train", "char-gpt", "--corpus", folder / "text.txt", "--out", tmp_path / "run", *TINY]
    message = refused(capsys, *given)
    assert "WORLD_SIZE is set, but not RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT" in message
    monkeypatch.setenv("WORLD_SIZE", "many")
    assert "WORLD_SIZE must be a whole number; got 'many'" in refused(capsys, *given)


def test_a_certificate_does_not_replace_that_of_a_run_in_progress(folder, capsys, tmp_path):
    with checkpoint.claimed(tmp_path):
        (tmp_path / "certificate.json").write_text("theirs")
        given = ["train", "char-gpt", "--corpus", folder / "text.txt", "--out", tmp_path, "--steps", 2, *TINY]
        assert "another process is training into it" in refused(capsys, *given, "--context", 8, "--certify")
    assert (tmp_path / "certificate.json").read_text() == "theirs"


def test_a_board_that_cannot_be_written_is_refused_before_the_run(capsys, tmp_path):
    assert f"{tmp_path}: Is a directory" in refused(capsys, "speedrun", "--board", tmp_path, "--budget", "1h")
