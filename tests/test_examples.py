"""The examples and the code of README and docs run unchanged; commands at small sizes on small data."""

import json
import logging.handlers
import re
import shlex
import warnings
from pathlib import Path

import pytest
import torch

import transformer_kernels as tk
from tests.support import fresh
from transformer_kernels import cli

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
SAYS = {
    "drop_in_modules": "same losses",
    "packed_batch": "135 tokens packed",
    "reverse_strings": "of 200 new words are reversed correctly",
    "your_own_loop": "the losses are equal",
    "your_own_model": "kernels: loss",
}
PAGES = sorted((ROOT / "docs").glob("*.md"))
SHOWN = [page for page in PAGES if page.stem != "README"]
WITH_CODE = [page for page in PAGES if page.stem != "corrections"]
COMMAND = "transformer-kernels "


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(path):
    code = f"import runpy; runpy.run_path({str(path)!r}, run_name='__main__')"
    assert SAYS[path.stem] in fresh.checked(code, OMP_NUM_THREADS="1")


def blocks(path, language):
    found = re.findall(r"^```(\w*)\n(.*?)^```$", path.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    return [content for kind, content in found if kind == language]


@pytest.mark.parametrize("index", range(len(blocks(ROOT / "README.md", "python"))))
def test_python_of_the_readme(index, tmp_path):
    """Each block runs by itself, and prints something; distilgpt2 is a small model with random weights."""
    code = blocks(ROOT / "README.md", "python")[index]
    if "load_pretrained" in code:
        tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
        tk.export_pretrained(tk.build("gpt2", vocab_size=256, layers=1, width=64, heads=2), tmp_path / "distilgpt2")
        characters = tokenizers.Tokenizer(tokenizers.models.BPE({chr(n): n for n in range(256)}, []))
        characters.save(str(tmp_path / "distilgpt2/tokenizer.json"))
    assert fresh.checked(code, folder=tmp_path)


# docs/


def test_the_pages_of_docs_are_in_their_index():
    index = (ROOT / "docs" / "README.md").read_text()
    assert len(SHOWN) == 10 and all(f"]({page.name})" in index for page in SHOWN)
    assert "docs/README.md" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_links_of_docs(page):
    links = re.findall(r"\]\(([^)#]+)", page.read_text("utf-8"))
    assert all((page.parent / link).exists() for link in links), links


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda path: path.stem)
def test_python_of_docs(page, capsys, monkeypatch):
    """Each block runs by itself without warnings, and prints the comment after each print."""
    assert blocks(page, "python")
    logged = logging.handlers.BufferingHandler(1000)
    logged.setLevel(logging.WARNING)
    monkeypatch.setattr(logging.getLogger(), "handlers", [logged])
    for code in blocks(page, "python"):
        if "from transformers" in code:
            pytest.importorskip("transformers", reason="transformers is not installed")
            monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            exec(compile(code, page.name, "exec"), {})
        assert [record.getMessage() for record in logged.buffer] == []
        assert capsys.readouterr().out.splitlines() == re.findall(r"print\(.*\)  # (.*)", code)


def commands(page):
    lines = [line for block in blocks(page, "") for line in block.replace("\\\n", "").splitlines()]
    assert all(line.startswith(COMMAND) for line in lines)
    return [shlex.split(line.removeprefix(COMMAND)) for line in lines]


WITH_COMMANDS = [page for page in SHOWN if commands(page)]


def test_the_site_has_each_page():
    """mkdocs.yml lists the pages; `make site` checks the links between them."""
    site = (ROOT / "mkdocs.yml").read_text("utf-8")
    assert [page.name for page in PAGES if f": {page.name}\n" not in site] == []


REPEATABLE = ("plot positions", "plot activations", "plot gradients", "plot performer")  # equal on every machine


def test_outputs_of_docs(tmp_path, monkeypatch, capsys):
    """What the pages show below a command, where it does not depend on data or on the machine's rounding."""
    monkeypatch.chdir(tmp_path)
    checked = 0
    for page in SHOWN:
        text = page.read_text("utf-8")
        for block, shown in re.findall(
            r"^```\n((?:transformer-kernels [^\n]*\n)+)```\n\n```text\n(.*?)^```$", text, re.M | re.S
        ):
            for line in block.splitlines():
                arguments = shlex.split(line.removeprefix(COMMAND))
                if " ".join(arguments).startswith(REPEATABLE):
                    assert cli.main(arguments) == 0
                    assert set(capsys.readouterr().out.splitlines()) <= set(shown.splitlines())
                    checked += 1
    assert checked >= 5


def test_pages_have_commands():
    assert len(WITH_COMMANDS) == 8


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda path: path.stem)
def test_commands_of_docs_are_understood(page):
    for arguments in commands(page):
        cli._parser().parse_args(arguments)


FEW, SIZES = "--no-progress --batch-size 4", "--model layers=1 --model width=16 --model heads=2"
REVIEWED = f"--data reviews --max-length 32 --validation 0.2 {FEW}"
ADDED = {  # options that shorten a command of docs/; the first key that is a prefix applies
    "train char-gpt": f"--corpus text.txt --context 32 --steps 2 --no-sample {FEW} {SIZES}",
    "train imdb --init": f"{REVIEWED} --epochs 1",
    "train imdb --config imdb_small --init": f"{REVIEWED} {SIZES} --epochs 1",
    "train imdb": f"{REVIEWED} {SIZES} --epochs 1 --tokenizer bytes",
    "train mlm": f"{REVIEWED} {SIZES} --steps 2 --tokenizer bytes",
    "train translate": f"--steps 2 --max-length 64 {FEW} {SIZES}",
    "train vit --preset": f"--epochs 1 --held-out 1600 {FEW} --model width=16 --model heads=2",
    "train vit": f"--epochs 1 --held-out 1600 {FEW} {SIZES}",
    "train word2vec": f"--epochs 1 {FEW}",
    "evaluate --checkpoint runs/imdb": "--data reviews",
    "sweep": "--corpus text.txt --context 8 --batch-size 4 --sizes 16x1 32x1 32x2 --tokens 64",
}
TEXT = "ROMEO: what light through yonder window breaks? def bank\n"
KINGS = "a king and a man with a queen and a woman in a horror film\n"
REVIEWS = 'review,sentiment\n"a great film",positive\n"a dull film",negative\n'


@pytest.fixture
def small_world(tmp_path, monkeypatch):
    """A folder with inputs of the commands: a corpus, reviews, and random models of transformers with tokenizers."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    tokenizers = pytest.importorskip("tokenizers")
    pytest.importorskip("PIL.Image", reason="pillow is not installed").new("L", (8, 8)).save(tmp_path / "seven.png")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRANSFORMER_KERNELS_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("TRANSFORMER_KERNELS_EMULATE", raising=False)  # `info` would compile it into this cache
    (tmp_path / "reviews").mkdir()
    (tmp_path / "text.txt").write_text(TEXT * 40)
    (tmp_path / "reviews.txt").write_text(KINGS * 40)
    (tmp_path / "glove.6B.100d.txt").write_text("".join(f"{word} {len(word)} 1\n" for word in KINGS.split()))
    (tmp_path / "hin.txt").write_text("".join(f"How are you {n}?\tआप {n} कैसे हैं\n" for n in range(40)), "utf-8")
    (tmp_path / "reviews" / "train.csv").write_text(REVIEWS + REVIEWS.partition("\n")[2] * 19)
    (tmp_path / "reviews" / "test.csv").write_text(REVIEWS)
    bytes_ = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    gpt2 = transformers.GPT2Config(vocab_size=256, n_embd=16, n_layer=1, n_head=2, n_positions=64)
    transformers.GPT2LMHeadModel(gpt2).save_pretrained("distilgpt2")
    (tmp_path / "distilgpt2" / "vocab.json").write_text(
        json.dumps({token: i for i, token in enumerate(sorted(bytes_))})
    )
    (tmp_path / "distilgpt2" / "merges.txt").write_text("#version: 0.2\n")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "bank", "the", "a", "film"]
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    bert = transformers.BertConfig(vocab_size=len(words), max_position_embeddings=64, **sizes)
    for folder in ("all-MiniLM-L6-v2", "bert-base-uncased"):
        transformers.BertForMaskedLM(bert).save_pretrained(folder)
        (tmp_path / folder / "vocab.txt").write_text("\n".join(words))
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("page", SHOWN, ids=lambda path: path.stem)
def test_commands_of_docs_run(page, small_world, capsys):
    torch.set_num_threads(1)
    for arguments in commands(page):
        line = " ".join(arguments)
        added = next((added for beginning, added in ADDED.items() if line.startswith(beginning)), "")
        assert cli.main([*arguments, *shlex.split(added)]) == 0, (arguments, capsys.readouterr().err)
