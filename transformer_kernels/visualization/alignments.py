"""Cross-attention alignments of a translation, with a warning about characters that no installed font has."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformer_kernels.training._optional import require
from transformer_kernels.training.recipes import Alignment
from transformer_kernels.visualization.attention import write_page
from transformer_kernels.visualization.figures import new_figure, write_figure

USUAL_FONT = "DejaVu Sans"  # bundled with matplotlib
BOXES = "Last Resort"  # also bundled; draws a box for every character
CELL_INCHES = 0.35
SIGNS = {"ANUSVARA": "ṃ", "CANDRABINDU": "ṃ", "VISARGA": "ḥ", "NUKTA": "", "AVAGRAHA": "'"}


def draw_alignment(alignment: Alignment, path: str | Path) -> str:
    """Write one heatmap per decoder layer, the mean over its heads.

    Args:
        alignment: the weights (layers, H, Lt, Ls), and the Lt and Ls tokens of target and source.
        path: of the figure; its suffix selects the format.
    Returns:
        a warning about characters that cannot be drawn; "" if there are none.
    Raises:
        ValueError: matplotlib does not support the suffix.

    A path that ends in .html receives the page of `write_page` with every layer and head instead.
    """
    if Path(path).suffix == ".html":
        write_page(
            alignment.weights, alignment.target, alignment.source, path, title="Cross-attention of a translation"
        )
        return ""
    target, source, font, warning = shown(alignment.target, alignment.source)
    layers, _, rows, columns = alignment.weights.shape
    figure, panels = new_figure(layers * (CELL_INCHES * columns + 1.2) + 1, CELL_INCHES * rows + 1.5, layers)
    means = alignment.weights.float().mean(1)
    for layer, axes in enumerate(panels):
        image = axes.imshow(means[layer].numpy(), cmap="Blues", vmin=0.0, vmax=float(means.max()))
        axes.set_xticks(range(columns), source, rotation=90, fontfamily=font)
        axes.set_yticks(range(rows), target, fontfamily=font)
        axes.tick_params(length=0)
        axes.set(xlabel="source", ylabel="translation" if layer == 0 else "")
        axes.set_title(f"layer {layer}, mean over heads", fontsize=9)
    figure.colorbar(image, ax=panels, fraction=0.05, label="attention weight")
    write_figure(figure, path)
    return warning


def shown(target: Sequence[str], source: Sequence[str]) -> tuple[list[str], list[str], list[str], str]:
    """The tokens as a font can show them, the fallback font, and a warning about characters without a font."""
    both = (list(target), list(source))
    missing = set("".join(map("".join, both))) - characters_of(USUAL_FONT)
    if not missing:
        return *both, [USUAL_FONT], ""
    if (font := font_for(missing)) is not None:
        return *both, [USUAL_FONT, font], ""
    target, source = ([transliterated(piece, missing) for piece in pieces] for pieces in both)
    script = " and ".join(sorted({unicodedata.name(character, "another").split()[0].title() for character in missing}))
    cache = Path(require("matplotlib").get_cachedir(), "fontlist-*.json")
    warning = (
        f"no installed font has {script}, so Latin letters are drawn; install fonts-lohit-deva or Noto Sans, then "
        f"delete {cache}"
    )
    return target, source, [USUAL_FONT], warning


def characters_of(name: str) -> set[str]:
    """The characters in the fonts of this name."""
    fonts: Any = require("matplotlib.font_manager")
    paths = {font.fname for font in fonts.fontManager.ttflist if font.name == name}
    return {chr(code) for path in paths for code in fonts.get_font(path).get_charmap()}


def font_for(characters: set[str]) -> str | None:
    """An installed font that has all of these characters; None if there is none."""
    fonts: Any = require("matplotlib.font_manager")
    names = sorted({font.name for font in fonts.fontManager.ttflist if not font.name.startswith(BOXES)})
    return next((name for name in names if characters <= characters_of(name)), None)


def transliterated(piece: str, missing: set[str]) -> str:
    """The token with these characters in Latin letters: Devanagari by character name, others as code points.

    A consonant implies an "a", which a vowel sign replaces and a virama removes.
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
