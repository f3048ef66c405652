"""README and the release files: figures are those of the recorded benchmarks, commands are understood."""

import re
import shlex
from pathlib import Path

import pytest

from transformer_kernels import __version__, cli

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text("utf-8")
RECORD = ROOT / "benchmarks/results/amd-epyc-avx512-bf16-2-threads/report.md"
STEPS = {  # the rows of the table, in order
    "char_gpt B64 L64": ("fp32", "bf16"),
    "imdb_bert B16 L256": ("fp32", "bf16"),
    "transformers' BERT B8 L128": ("fp32",),
    "transformers' BERT, dropout 0 B8 L128": ("fp32",),
    "transformers' GPT-2 B8 L128": ("fp32",),
    "transformers' GPT-2, dropout 0 B8 L128": ("fp32",),
}
COLUMNS = ("SDPA + compile", "ours torch", "ours cpu", "ours cpu + one graph")


def recorded():
    """Milliseconds and speedup of each (step, configuration) in the report."""
    section = RECORD.read_text("utf-8").partition("## Training steps")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if "|" in line]
    return {(row[0], row[1]): (float(row[2].replace(",", "")), float(row[5])) for row in rows[2:]}


def test_speed_table_is_the_record():
    speeds = recorded()
    table = README.partition("| training step |")[2].partition("\n\n")[0].splitlines()[2:]
    shown = [[cell.strip() for cell in line.strip("|").split("|")][1:] for line in table]
    wanted = []
    for step, dtypes in STEPS.items():
        for dtype in dtypes:
            found = [speeds.get((step, f"{column}, {dtype}")) for column in COLUMNS]
            cells = ["" if each is None else f"{each[1]:.2f}x" for each in found]
            if packed := speeds.get((step, f"ours cpu packed + one graph, {dtype}")):
                cells[-1] += f"; {packed[1]:.2f}x packed"
            wanted.append(cells)
    assert shown == wanted


def test_first_sentence_is_the_record():
    speeds = recorded()
    names = ("ours cpu + one graph", "SDPA + fused AdamW", "SDPA + compile")
    ours, fused, compiled = (speeds["char_gpt B64 L64", f"{name}, fp32"][0] for name in names)
    first = README.partition("```")[0]
    assert [float(found) for found in re.findall(r"(\d+)\s+ms", first)] == [round(x) for x in (ours, fused, compiled)]
    assert 0.27 < ours / fused < 0.36  # "a third of the time"


def test_losses_are_on_the_board():
    text = " ".join((ROOT / "benchmarks/results/speedrun.md").read_text("utf-8").split())
    board = re.search(r"reaches a loss\s+of\s+([\d.]+) .*?nanoGPT ([\d.]+), .*? ([\d.]+)\s+\(\[board", README, re.S)
    assert board is not None and all(loss in text for loss in board.groups())


def test_commands_are_understood():
    lines = re.findall(r"^transformer-kernels (.*)$", README, re.M)
    assert lines
    for line in lines:
        cli._parser().parse_args(shlex.split(line, comments=True))


def test_lengths():
    assert README.count("\n") <= 90
    assert (ROOT / "CHANGELOG.md").read_text("utf-8").count("\n") <= 40


@pytest.mark.parametrize("name", re.findall(r"\]\((?!http)([^)#]+)", README))
def test_links(name):
    assert (ROOT / name).exists()


def test_release_files_name_the_version():
    assert f"\n## {__version__}" in (ROOT / "CHANGELOG.md").read_text("utf-8")
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text("utf-8")
