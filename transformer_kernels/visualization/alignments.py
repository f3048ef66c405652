"""From which pieces of a sentence each piece of its translation came, and what a picture cannot show."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformer_kernels.training._optional import require
from transformer_kernels.training.recipes import Alignment
from transformer_kernels.visualization.figures import new_figure, write_figure

USUAL_FONT = "DejaVu Sans"  # comes with matplotlib
BOXES = "Last Resort"  # also does, and draws a box for every character
CELL_INCHES = 0.35
SIGNS = {"ANUSVARA": "ṃ", "CANDRABINDU": "ṃ", "VISARGA": "ḥ", "NUKTA": "", "AVAGRAHA": "'"}


def draw_alignment(alignment: Alignment, path: str | Path) -> str:
    """Write a heatmap for each layer of the decoder, the mean over its heads.

    Args:
        alignment: the weights (layers, H, Lt, Ls), and the Lt and Ls pieces of the target and the source.
        path: of the picture; its ending says the kind.
    Returns:
        what the picture cannot show, "" where it shows everything.
    Raises:
        ValueError: matplotlib does not know the ending.
    """
    target, source, font, told = shown(alignment.target, alignment.source)
    layers, _, rows, columns = alignment.weights.shape
    figure, panels = new_figure(layers * (CELL_INCHES * columns + 1.2) + 1, CELL_INCHES * rows + 1.5, layers)
    for layer, axes in enumerate(panels):
        image = axes.imshow(alignment.weights[layer].mean(0).numpy(), cmap="viridis", vmin=0.0, vmax=1.0)
        axes.set_xticks(range(columns), source, rotation=90, fontfamily=font)
        axes.set_yticks(range(rows), target, fontfamily=font)
        axes.tick_params(length=0)
        axes.set_title(f"layer {layer}, mean of heads", fontsize=9)
    figure.colorbar(image, ax=panels, fraction=0.05, label="weight")
    write_figure(figure, path)
    return told


def shown(target: Sequence[str], source: Sequence[str]) -> tuple[list[str], list[str], list[str], str]:
    """The pieces as a font can show them, that font behind the usual one, and what is told about it."""
    both = (list(target), list(source))
    missing = set("".join(map("".join, both))) - characters_of(USUAL_FONT)
    if not missing:
        return *both, [USUAL_FONT], ""
    if (font := font_for(missing)) is not None:
        return *both, [USUAL_FONT, font], ""
    target, source = ([transliterated(piece, missing) for piece in pieces] for pieces in both)
    script = " and ".join(sorted({unicodedata.name(each, "another").split()[0].title() for each in missing}))
    told = f"no installed font shows {script}, so the picture has Latin letters; fonts-lohit-deva or Noto Sans would"
    return target, source, [USUAL_FONT], told


def characters_of(name: str) -> set[str]:
    """The characters that the fonts of that name have."""
    fonts: Any = require("matplotlib.font_manager")
    paths = {each.fname for each in fonts.fontManager.ttflist if each.name == name}
    return {chr(code) for path in paths for code in fonts.get_font(path).get_charmap()}


def font_for(characters: set[str]) -> str | None:
    """An installed font that has all of them; None where there is none."""
    fonts: Any = require("matplotlib.font_manager")
    names = sorted({each.name for each in fonts.fontManager.ttflist if not each.name.startswith(BOXES)})
    return next((name for name in names if characters <= characters_of(name)), None)


def transliterated(piece: str, missing: set[str]) -> str:
    """The piece with those characters in Latin letters: Devanagari by its characters' names, others as code points.

    A consonant brings an "a" along, which a vowel sign replaces and a virama takes away.
    """
    written = ""
    for character in piece:
        name = unicodedata.name(character, "")
        sound = name.rpartition(" ")[2].lower()
        if character not in missing:
            written += character
        elif not name.startswith("DEVANAGARI"):
            written += f"U+{ord(character):04X}"
        elif "VOWEL SIGN" in name or "VIRAMA" in name:
            written = written.removesuffix("a") + ("" if "VIRAMA" in name else sound)
        elif "DIGIT" in name:
            written += str(unicodedata.digit(character))
        else:
            written += "|" if sound == "danda" else SIGNS.get(sound.upper(), sound)
    return written
