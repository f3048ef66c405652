"""`generate --model`, `embed` and `fill-mask` on models saved by transformers."""

import io
import json
import shutil

import numpy as np
import pytest
import torch

from tests.support.transformers_models import save_encoder
from transformer_kernels import cli

transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra `test`)")

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "happy", "dog", "cat", "sad", "."]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return save_encoder(tmp_path_factory.mktemp("encoder"), "BertForMaskedLM", WORDS)


@pytest.fixture(scope="module")
def writer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("writer")
    torch.manual_seed(0)
    letters = {token: index for index, token in enumerate("abcdefgh")}
    config = transformers.GPT2Config(
        vocab_size=8, n_embd=16, n_layer=1, n_head=2, n_positions=16, initializer_range=1.0
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    (folder / "vocab.json").write_text(json.dumps(letters))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    return folder


def test_generate(writer, capsys):
    arguments = ["--prompt", "abc", "--length", "6", "--greedy", "--backend", "torch"]
    assert cli.main(["generate", "--model", str(writer), *arguments]) == 0
    theirs = transformers.GPT2LMHeadModel.from_pretrained(writer).eval()
    expected = theirs.generate(torch.tensor([[0, 1, 2]]), max_new_tokens=6, do_sample=False, eos_token_id=None)
    assert capsys.readouterr().out == "".join("abcdefgh"[token] for token in expected[0]) + "\n"


def test_generate_stops_where_a_text_ends(writer, tmp_path, capsys):
    """Stops where transformers stops; prints the text without the end token."""
    shutil.copytree(writer, tmp_path, dirs_exist_ok=True)
    arguments = ["--length", "9", "--greedy", "--backend", "torch"]
    whole = []
    for prompt in ("abc", "h"):
        assert cli.main(["generate", "--model", str(tmp_path), "--prompt", prompt, *arguments]) == 0
        whole.append(capsys.readouterr().out.strip())
    end = whole[0][5]
    settings = {"eos_token_id": [7, "abcdefgh".index(end)]}
    (tmp_path / "generation_config.json").write_text(json.dumps(settings))
    cut = [text[: next((n for n in range(start, len(text)) if text[n] in (end, "h")), len(text))]
           for text, start in zip(whole, (3, 1), strict=True)]  # fmt: skip
    assert len(cut[0]) < len(whole[0])
    assert cli.main(["generate", "--model", str(tmp_path), "--prompt", "abc", "--prompt", "h", *arguments]) == 0
    assert capsys.readouterr().out.split() == cut


def test_embed(encoder, tmp_path, capsys, monkeypatch):
    texts = ["a happy dog .", "a sad cat"]
    out = tmp_path / "vectors"
    assert cli.main(["embed", "--model", str(encoder), *texts, "--out", str(out)]) == 0
    vectors = np.load(out)
    assert vectors.shape == (2, 16) and np.allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-6)
    theirs = transformers.BertModel.from_pretrained(encoder).eval()
    hidden = theirs(torch.tensor([[2, 5, 6, 7, 10, 3]])).last_hidden_state.detach()[0]
    expected = torch.nn.functional.normalize(hidden.mean(0), dim=0).numpy()
    np.testing.assert_allclose(vectors[0], expected, atol=1e-5)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[-2:] == ["1.0000", f"{vectors[0] @ vectors[1]:.4f}"]
    monkeypatch.setattr("sys.stdin", io.StringIO("a happy dog .\n\na sad cat\n"))
    assert cli.main(["embed", "--model", str(encoder), "--pooling", "cls", "--out", str(out)]) == 0
    np.testing.assert_allclose(np.load(out)[0], torch.nn.functional.normalize(hidden[0], dim=0).numpy(), atol=1e-5)


def test_embed_tokens(encoder, tmp_path, capsys):
    texts, out = ["a happy dog .", "a sad dog"], tmp_path / "states.npy"
    assert cli.main(["embed", "--model", str(encoder), "--tokens", *texts, "--out", str(out)]) == 0
    states = np.load(out)
    theirs = transformers.BertModel.from_pretrained(encoder).eval()
    expected = theirs(torch.tensor([[2, 5, 6, 7, 10, 3]])).last_hidden_state.detach()[0].numpy()
    assert states.shape == (11, 16)
    np.testing.assert_allclose(states[:6], expected, atol=1e-5)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [" ".join(line[:2]) for line in lines][3::5] == ["1.3: dog", "2.2: sad"]
    unit = states / np.linalg.norm(states, axis=1, keepdims=True)
    cosines = unit @ unit.T - 3 * np.eye(11)
    assert [line[2] for line in lines] == [f"{value:.4f}" for value in cosines.max(1)]
    assert " ".join(lines[3][3:]) == " ".join(lines[cosines[3].argmax()][:2])


def test_embed_cuts_long_texts_off(encoder, tmp_path):
    assert cli.main(["embed", "--model", str(encoder), "a " * 50, "--out", str(tmp_path / "v.npy")]) == 0
    assert np.isfinite(np.load(tmp_path / "v.npy")).all()


def test_fill_mask(encoder, capsys):
    assert cli.main(["fill-mask", "--model", str(encoder), "a [MASK] dog", "--top", "3"]) == 0
    theirs = transformers.BertForMaskedLM.from_pretrained(encoder).eval()
    likely = theirs(torch.tensor([[2, 5, 4, 7, 3]])).logits[0, 2].softmax(-1).topk(3)
    pairs = zip(likely.indices.tolist(), likely.values.tolist(), strict=True)
    assert capsys.readouterr().out.splitlines() == [f"{value:7.2%}  {WORDS[index]}" for index, value in pairs]


@pytest.mark.parametrize(
    ("command", "kind", "message"),
    [
        (["generate"], "encoder", "--model must be a language model; this one is an encoder"),
        (["embed", "a"], "writer", "embed: --model must be an encoder such as BERT; this one is a language model"),
        (
            ["fill-mask", "a [MASK]"],
            "writer",
            "fill-mask: --model must be an encoder such as BERT; this one is a language model",
        ),
        (["fill-mask", "a dog"], "encoder", "the text must have one [MASK]"),
    ],
)
def test_models_of_the_other_kind(command, kind, message, request, capsys):
    assert cli.main([*command, "--model", str(request.getfixturevalue(kind))]) == 1
    assert message in capsys.readouterr().err


def test_a_folder_that_is_not_there(capsys):
    assert cli.main(["embed", "--model", "nowhere", "a"]) == 1
    assert capsys.readouterr().err == (
        "transformer-kernels: error: nowhere: no such folder or file; models are read from local folders: "
        "download it first, with `hf download nowhere --local-dir nowhere`\n"
    )


def test_either_a_checkpoint_or_a_model(capsys):
    for arguments in (["--model", "a", "--checkpoint", "b"], []):
        with pytest.raises(SystemExit):
            cli.main(["generate", *arguments])
    assert "one of the arguments --checkpoint --model is required" in capsys.readouterr().err
