"""Wrong usages of the command line: an error of at most two lines that names what is wrong and the remedy."""

import shlex

import pytest

from transformer_kernels import cli

USAGES = {  # a command line, and a part of its error
    "": "required: COMMAND",
    "nope": "one of train, generate",
    "train": "required: RECIPE",
    "train chargpt": "did you mean char-gpt?",
    "train char-gpt --steps abc": "--steps: expected a whole number; got 'abc'",
    "train char-gpt --lr abc": "--lr: expected a number; got 'abc'",
    "train char-gpt --steps 0": "steps must be at least 1; got 0",
    "train char-gpt --time-limit 5x": "a duration such as 90, 5m or 1h; got '5x'",
    "train char-gpt --dtype float8": "did you mean float32?",
    "train char-gpt --model width": "NAME=VALUE; got 'width'",
    "train char-gpt --model nope=3": "char_gpt has no field nope",
    "train char-gpt --data nowhere.txt": "there is no file 'nowhere.txt'",
    "train char-gpt --corpus folder": "'folder' is a folder",
    "train char-gpt --data-dir folder": "looked for folder/input.txt",
    "train char-gpt --config nope": "the bundled ones are char_gpt_10m",
    "train char-gpt --config bad.yaml": "bad.yaml, line 1: not valid YAML",
    "train char-gpt --config folder": "folder: a folder; a config is",
    "train word2vec --data nowhere": "there is no file 'nowhere'",
    "train imdb": "--data must be the aclImdb folder",
    "train imdb --data folder": "neither train/pos and train/neg nor",
    "train translate --data nowhere": "cannot be read as sentence pairs",
    "generate": "--checkpoint --model is required",
    "generate --checkpoint folder": "expected a checkpoint folder",
    "generate --model nowhere": "`hf download nowhere",
    "generate --checkpoint folder --model folder": "not allowed with argument --checkpoint",
    "embed --model folder x": "folder/config.json: no such file",
    "nearest --vectors vectors.txt kong": "similar words: king",
    "plot positions --kind word": "one of integer, fraction, binary",
    "plot positions --kind rotary --width 3": "width must be even",
    "plot run folder": "pass the folder of a run",
    "sweep --sizes 16": "such as 64x2; got '16'",
    "demo --seconds 0": "--seconds must be positive, such as 35; got 0",
    "demo --seconds nan": "--seconds must be positive",
    "demo --backend nope": "one of auto, torch, cpu",
}


@pytest.mark.parametrize("usage", USAGES)
def test_an_error_has_two_lines_and_the_remedy(usage, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "bad.yaml").write_text("steps: [1")
    (tmp_path / "vectors.txt").write_text("king 1 2\nqueen 2 1\n")
    try:
        status = cli.main(shlex.split(usage))
    except SystemExit as end:
        status = end.code
    error = capsys.readouterr().err
    assert status in (1, 2) and error.startswith("transformer-kernels") and ": error: " in error
    assert error.count("\n") <= 2 and USAGES[usage] in error, error
