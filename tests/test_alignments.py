"""Figures of alignments: contents, and the message for a script without a font."""

import json
import re

import matplotlib.image
import pytest
import torch

from transformer_kernels.training.recipes import Alignment
from transformer_kernels.visualization import alignments
from transformer_kernels.visualization.alignments import draw_alignment, font_for, shown, transliterated

TARGET, SOURCE = ["नम", "स्ते", "।", "<end>"], ["hel", "lo", "<end>"]
HINDI = set("नमस्ते।")
WEIGHTS = torch.eye(4)[:, :3].add(0.1).expand(2, 5, 4, 3)


@pytest.mark.parametrize(
    ("text", "latin"),
    [
        ("नमस्ते", "namaste"),
        ("हिन्दी", "hindii"),
        ("मैं", "maiṃ"),
        ("आप", "aapa"),
        ("पढ़ो।", "paddho|"),
        ("दुःख", "duḥkha"),
        ("१२", "12"),
        ("ok का", "ok kaa"),
        ("ें", "eṃ"),
        ("日", "U+65E5"),
    ],
)
def test_devanagari_is_written_in_latin_letters(text, latin):
    assert transliterated(text, set(text) - set("ok ")) == latin


def test_without_a_font_the_pieces_are_latin_and_it_is_reported(monkeypatch, tmp_path):
    monkeypatch.setattr(alignments, "font_for", lambda characters: None)
    target, source, font, message = shown(TARGET, SOURCE)
    assert (target, source, font) == (["nama", "ste", "|", "<end>"], SOURCE, ["DejaVu Sans"])
    assert message.startswith("no installed font has Devanagari")
    assert draw_alignment(Alignment(WEIGHTS, TARGET, SOURCE), tmp_path / "a.png") == message


def test_with_a_font_the_pieces_stay(monkeypatch):
    monkeypatch.setattr(alignments, "font_for", lambda characters: "Some Font" if characters == HINDI else None)
    assert shown(TARGET, SOURCE) == (TARGET, SOURCE, ["DejaVu Sans", "Some Font"], "")


def test_what_the_usual_font_has_needs_no_other():
    assert shown(["ça", "va"], ["fine"]) == (["ça", "va"], ["fine"], ["DejaVu Sans"], "")


def test_the_font_of_boxes_is_never_chosen():
    assert font_for(HINDI | {"\N{CJK UNIFIED IDEOGRAPH-65E5}", "\N{CUNEIFORM SIGN A}", "\N{LISU LETTER BA}"}) is None


def test_no_character_is_missing_in_the_picture(tmp_path, recwarn):
    path = tmp_path / "alignment.png"
    message = draw_alignment(Alignment(WEIGHTS, TARGET, SOURCE), path)
    assert not [each for each in recwarn if "missing from font" in str(each.message)]
    assert bool(message) == (font_for(HINDI) is None)
    height, width, _ = matplotlib.image.imread(path).shape
    assert height > 200 and width > 300


def test_an_unknown_kind_of_picture_is_refused(tmp_path):
    with pytest.raises(ValueError, match="not supported"):
        draw_alignment(Alignment(WEIGHTS[:, :, :3], SOURCE, SOURCE), tmp_path / "a.xyz")


def test_an_alignment_as_a_page(tmp_path):
    """Every layer and head of the cross-attention, which has no later and no special tokens."""
    weights = torch.rand(2, 3, 2, 4).softmax(-1)
    page = tmp_path / "alignment.html"
    assert draw_alignment(Alignment(weights, ["aap", "kaise"], ["How", "are", "you", "?"]), page) == ""
    data = json.loads(re.search(r"\{\"title\".*\}", page.read_text("utf-8"))[0])
    assert (data["layers"], data["heads"], data["causal"]) == (2, 3, False)
    assert (data["queries"], data["keys"]) == (["aap", "kaise"], ["How", "are", "you", "?"])
