"""`attend`, `plot` and `sweep`, as a user types them."""

import json
import os
import signal
import sys

import matplotlib.image
import pytest
import torch

from transformer_kernels import cli
from transformer_kernels.training.loop.trainer import Trainer
from transformer_kernels.visualization import networks

torch.set_num_threads(1)
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "happy", "dog", "##s", "sad", "."]
TEXT = "the quick brown fox jumps over the lazy dog\n" * 40


def run(capsys, *arguments):
    """What a command prints."""
    assert cli.main([str(argument) for argument in arguments]) == 0
    return capsys.readouterr().out


def refused(capsys, *arguments):
    assert cli.main([str(argument) for argument in arguments]) == 1
    printed = capsys.readouterr().err
    assert printed.startswith("transformer-kernels: error: ") and "Traceback" not in printed
    return printed


def is_picture(path):
    return matplotlib.image.imread(path)[..., :3].std() > 0.01


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    pytest.importorskip("transformers", reason="transformers is not installed (extra `test`)")
    from tests.support.transformers_models import save_encoder

    return save_encoder(tmp_path_factory.mktemp("encoder"), "BertModel", WORDS)


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """A sweep of three small models, and its folder."""
    folder = tmp_path_factory.mktemp("sweep")
    (folder / "text.txt").write_text(TEXT)
    shared = ["--corpus", folder / "text.txt", "--context", 8, "--batch-size", 4, "--lr", 1e-2, "--backend", "torch"]
    arguments = ["sweep", "--sizes", "16x1", "32x1", "32x2", "--tokens", 64, "--out", folder / "out", *shared]
    assert cli.main([str(argument) for argument in arguments]) == 0
    return folder / "out"


def test_attend_to_a_pretrained_model(encoder, tmp_path, capsys):
    out = tmp_path / "maps.png"
    printed = run(capsys, "attend", "--model", encoder, "a happy dogs .", "--out", out)
    assert printed == f"layers: 1, heads: 2, tokens: 7: {out}, {tmp_path / 'maps.html'}\n"
    assert is_picture(out) and '"queries": ["[CLS]", "a", "happy", "dog", "##s"' in (tmp_path / "maps.html").read_text()


def test_attend_to_two_texts(encoder, sweep, tmp_path, capsys):
    import transformers

    from transformer_kernels.training.pretrained_commands import load
    from transformer_kernels.visualization.attention import attention_maps

    theirs = transformers.BertModel.from_pretrained(encoder, attn_implementation="eager").eval()
    tokens, segments = torch.tensor([[2, 5, 7, 3, 5, 6, 3]]), torch.tensor([[0, 0, 0, 0, 1, 1, 1]])
    with torch.no_grad():
        expected = torch.cat(theirs(tokens, token_type_ids=segments, output_attentions=True).attentions)
    maps, names = attention_maps(load(str(encoder), "auto", "cpu"), "a dog", "a happy")
    assert names == ["[CLS]", "a", "dog", "[SEP]", "a", "happy", "[SEP]"]
    torch.testing.assert_close(maps, expected, atol=1e-5, rtol=0)
    run(capsys, "attend", "--model", encoder, "a dog", "a happy", "--out", tmp_path / "maps.png")
    assert '"sentences": [0, 0, 0, 0, 1, 1, 1]' in (tmp_path / "maps.html").read_text()
    refusal = refused(capsys, "attend", "--checkpoint", sweep / "16x1-64", "the", "fox")
    assert "two texts are read together by a pretrained encoder such as BERT; pass one text" in refusal


def test_attend_to_a_trained_model(sweep, tmp_path, capsys):
    page = tmp_path / "page.html"
    arguments = ["--checkpoint", sweep / "32x2-64", "the fox", "--out", tmp_path / "maps.svg", "--html", page]
    assert "layers: 2, heads: 1, tokens: 7" in run(capsys, "attend", *arguments)
    assert (tmp_path / "maps.svg").read_text().startswith("<?xml") and '"t", "h", "e", "\\u2423"' in page.read_text()


def test_a_word_in_two_sentences(encoder, tmp_path, capsys):
    out = tmp_path / "words.png"
    arguments = ["--word", "dog", "a happy dog .", "a sad dog .", "--out", out]
    lines = run(capsys, "plot", "words", "--model", encoder, *arguments).splitlines()
    contextual, static = lines[1].split()[-1], lines[4].split()[-1]
    assert lines[0] == "cosine, contextual" and lines[3] == "cosine, static"
    assert static == "1.0000" and -1 < float(contextual) < 0.9999
    assert lines[-1] == f"'dog': 2 occurrences in 2 sentences: {out}" and is_picture(out)
    arguments = ["--word", "dog", "a dog , a dog", "--out", out]
    lines = run(capsys, "plot", "words", "--model", encoder, *arguments).splitlines()
    assert [line.split(":")[0] for line in lines[1:3]] == ["1.1", "1.2"] and lines[-1].startswith("'dog': 2 occ")


def test_tokens_of_a_folder_a_run_and_every_kind(encoder, sweep, tmp_path, capsys):
    printed = run(capsys, "tokenize", "--model", encoder, "a happy dog").splitlines()
    assert printed[0] == "a happy dog" and printed[1].endswith("in the vocabulary: 5 tokens")
    assert printed[2:] == ["  [CLS]|a|happy|dog|[SEP]", "  2 5 6 7 3"]
    printed = run(capsys, "tokenize", "--checkpoint", sweep / "32x2-64", "a fox", "ox").splitlines()
    assert printed[2] == "  a|␣|f|o|x" and printed[4] == "ox" and printed[6] == "  o|x"
    text = tmp_path / "text.txt"
    text.write_text("the seals\n" * 3)
    printed = run(capsys, "tokenize", "--data", text, "--vocabulary", 300, "the seal").splitlines()
    assert [line.split(",")[0] for line in printed[1::3]] == ["characters", "words", "WordPieces", "byte pairs"]
    assert "--vocabulary must be at least 300; got 2" in refused(
        capsys, "tokenize", "--data", text, "--vocabulary", 2, "the"
    )


@pytest.mark.parametrize("kind", ["integer", "fraction", "binary", "sinusoidal", "rotary"])
def test_positions(kind, tmp_path, capsys):
    out = tmp_path / "positions.png"
    printed = run(capsys, "plot", "positions", "--kind", kind, "--length", 20, "--width", 8, "--out", out)
    assert printed == f"{kind} positions: {out}\n" and is_picture(out)


def test_activations_gradients_and_a_landscape(tmp_path, capsys):
    out = tmp_path / "plot.png"
    assert run(capsys, "plot", "activations", "--out", out) == f"ReLU and GELU: {out}\n" and is_picture(out)
    lines = run(capsys, "plot", "gradients", "--layers", 12, "--out", out).splitlines()
    first, last = (float(line.split("first layer ")[1].split(",")[0]) for line in lines[:2])
    assert "with shortcut" in lines[0] and first > 1e3 * last > 0 and is_picture(out)
    assert "layers must be at least 1; got 0" in refused(capsys, "plot", "gradients", "--layers", 0)
    printed = run(capsys, "plot", "landscape", "--layers", 2, "--out", out).splitlines()
    assert printed[0].startswith("loss with shortcut connections: 0.") and is_picture(out)


def test_the_trained_weights_are_the_middle_of_their_landscape():
    weights = networks.trained(3, True, 20)
    grid = networks.landscape(weights, True, 5)
    assert grid.shape == (5, 5) and abs(grid[2, 2] - networks.loss(weights, True)) < 1e-5
    assert networks.loss(weights, True) < networks.loss(networks.network(3), True)
    assert (grid[[0, 0, 4, 4], [0, 4, 0, 4]] > grid[2, 2]).all()


def test_random_features(tmp_path, capsys):
    out = tmp_path / "performer.png"
    lines = run(capsys, "plot", "performer", "--out", out).splitlines()
    errors = torch.tensor([[float(error) for error in line.split()[2:]] for line in lines[1:4]])
    assert (errors.diff(dim=1) < 0).all() and (errors.diff(dim=0) > 0).all() and errors[0, 3] < 0.03
    assert lines[4] == f"Performer: {out}" and is_picture(out)


def test_one_layer_and_head(encoder, tmp_path, capsys):
    out = tmp_path / "map.png"
    for head in ("1", "mean"):
        run(capsys, "attend", "--model", encoder, "a happy dog .", "--layer", 0, "--head", head, "--out", out)
        assert is_picture(out)
    assert "--head must be from 0 to 1; got 2" in refused(capsys, "attend", "--model", encoder, "a", "--head", "2")
    assert "--layer must be from 0 to 0; got -1" in refused(capsys, "attend", "--model", encoder, "a", "--layer", -1)


def test_a_sweep_records_its_points_and_the_law_through_them(sweep):
    record = json.loads((sweep / "sweep.json").read_text())
    sizes = [point["size"] for point in record["points"]]
    parameters = [point["parameters"] for point in record["points"]]
    assert sizes == ["16x1", "32x1", "32x2"] and parameters == sorted(parameters)
    assert all(point["tokens"] == 64 and 0 < point["loss"] < 5 for point in record["points"])
    assert record["power_law"]["alpha_error"] > 0 and record["power_law"]["beta"] == 0
    assert is_picture(sweep / "sweep.png")


def test_an_interrupted_sweep_is_resumed(sweep, tmp_path, capsys, monkeypatch):
    record = json.loads((sweep / "sweep.json").read_text())
    folder = tmp_path / "resumed"
    trained = []

    class Stopping(Trainer):
        def step(self):
            if len(trained) == 1 and self.step_number == 1:
                os.kill(os.getpid(), signal.SIGINT)
            return super().step()

        def fit(self, **options):
            result = super().fit(**options)
            trained.append(self.folder.name)
            return result

    monkeypatch.setattr("transformer_kernels.visualization.sweep.Trainer", Stopping)
    corpus = ["--corpus", sweep.parent / "text.txt", "--context", 8, "--batch-size", 4, "--lr", 1e-2]
    arguments = ["--sizes", "16x1", "32x1", "32x2", "--tokens", 64, *corpus, "--out", folder, "--backend", "torch"]
    assert cli.main([str(argument) for argument in ("sweep", *arguments)]) == 130
    printed = capsys.readouterr()
    assert f"; resume with: transformer-kernels sweep --resume {folder}\n" in printed.err
    assert "[2/3] 32x1, 64 tokens" in printed.err
    written = json.loads((folder / "sweep.json").read_text())
    assert written["points"] == record["points"][:1] and written["power_law"] is None
    monkeypatch.setattr("transformer_kernels.visualization.sweep.Trainer", Trainer)
    (folder / "32x1-64" / "best").mkdir(exist_ok=True)
    printed = run(capsys, "sweep", "--resume", folder)
    assert len(printed.splitlines()) == 5 and trained == ["16x1-64"]
    assert json.loads((folder / "sweep.json").read_text())["points"] == record["points"]
    assert is_picture(folder / "sweep.png")


def test_a_sweep_is_drawn_again(sweep, tmp_path, capsys):
    law = run(capsys, "plot", "sweep", sweep, "--out", tmp_path / "again.png").splitlines()
    assert law[0].startswith("loss = ") and law[1] == f"3 points: {tmp_path / 'again.png'}"
    assert is_picture(tmp_path / "again.png")
    assert "sweep.json: no such file" in refused(capsys, "plot", "sweep", tmp_path)
    (tmp_path / "sweep.json").write_text("{}")
    assert "sweep.json: not the record of a sweep" in refused(capsys, "plot", "sweep", tmp_path)
    assert "sweep.json: not the record of a sweep" in refused(capsys, "sweep", "--resume", tmp_path)


def test_curves_of_runs(sweep, tmp_path, capsys):
    out = tmp_path / "curves.png"
    assert run(capsys, "plot", "run", sweep / "16x1-64", sweep / "32x1-64", "--out", out) == f"2 runs: {out}\n"
    assert is_picture(out)


def test_what_cannot_be_drawn(encoder, sweep, tmp_path, capsys):
    for arguments, message in (
        (["attend", "--model", "nowhere", "a"], "nowhere: no such folder or file; models are read from local folders"),
        (["attend", "--checkpoint", sweep / "16x1-64", "#"], "characters outside the model's vocabulary: ['#']"),
        (
            ["attend", "--model", encoder, "a " * 9],
            "a sequence of 11 tokens is longer than the model's 8 positions; shorten it, or use a model",
        ),
        (["attend", "--model", encoder, "a", "--out", tmp_path / "a.bmq"], "Format 'bmq' is not supported"),
        (["plot", "words", "--model", encoder, "--word", "cat", "a dog", "dogs"], "the word 'cat' is not in 'a dog'"),
        (
            ["plot", "words", "--model", encoder, "--word", "dog", "a dog"],
            "at least two occurrences are compared; 'dog' occurs once",
        ),
        (["plot", "run", tmp_path], "log.jsonl: no such file; pass the folder of a run, such as runs/char-gpt"),
        (["plot", "positions", "--kind", "rotary", "--width", 5], "width must be even and positive; got 5"),
        (["sweep", "--sizes", "16x1", "--tokens", 4096], "requires at least 3"),
        (
            ["sweep", "--sizes", "16x1", "32x1", "64x1", "--tokens", 4096, "--out", sweep],
            "out: contains a sweep already; continue it with sweep",
        ),
    ):
        assert message in refused(capsys, *arguments)


def test_without_matplotlib(encoder, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "matplotlib is needed for this: pip install matplotlib" in refused(capsys, "plot", "positions")


def test_a_sweep_without_matplotlib_ends_before_it_trains(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "matplotlib is needed for this" in refused(capsys, "sweep", "--out", tmp_path / "sweep")
    assert not (tmp_path / "sweep").exists()
