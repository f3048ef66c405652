"""A word in several sentences: its hidden states in each, beside its static embedding."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from transformer_kernels.visualization.figures import literal, new_figure, write_figure
from transformer_kernels.visualization.tokens import read


class WordInContext(NamedTuple):
    """One occurrence of a word.

    Attributes:
        sentence: the sentence that contains it.
        places: indices of the word's tokens in the sentence.
        hidden: (L, E) float32, the last hidden states of the sentence's tokens. names: their names.
        static: (E,) float32, the mean of the embeddings of the word's tokens.
    """

    sentence: str
    places: list[int]
    hidden: Tensor
    names: list[str]
    static: Tensor

    @property
    def contextual(self) -> Tensor:
        """(E,), the mean of the hidden states of the word's tokens."""
        return self.hidden[self.places].mean(0)


@torch.inference_mode()
def word_in_context(loaded: Any, word: str, sentence: str) -> WordInContext:
    """The first occurrence of `word` as a whole word, ignoring case; ValueError if there is none."""
    found = re.search(rf"(?<!\w){re.escape(word)}(?!\w)", sentence, re.IGNORECASE)
    if not word or found is None:
        raise ValueError(f"the word {word!r} is not in {sentence!r}")
    reading = read(loaded, sentence)
    first, last = found.span()
    places = [index for index, (start, end) in enumerate(reading.spans) if start < last and end > first]
    hidden = loaded.model.hidden_states(reading.tokens)[0].float().cpu()
    static = loaded.model.embedding.tokens.weight[reading.tokens[0, places]].float().mean(0).cpu()
    return WordInContext(sentence, places, hidden, reading.names, static)


def principal_components(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows (N, E) projected onto their first two principal components, (N, 2), and the explained variance, (2,)."""
    centred = rows - rows.mean(0)
    left, singular, _ = torch.linalg.svd(centred, full_matrices=False)
    return left[:, :2] * singular[:2], singular[:2].square() / singular.square().sum()


def draw_words(found: list[WordInContext], path: str | Path) -> None:
    """Write a figure of all tokens of the sentences in two dimensions, with the word in bold.

    Pearson, "On lines and planes of closest fit to systems of points in space", 1901.
    """
    points, shares = principal_components(torch.cat([each.hidden for each in found]))
    figure, (axes,) = new_figure(9.0, 6.5)
    parts = points.split([len(each.names) for each in found])
    for number, (each, part) in enumerate(zip(found, parts, strict=True)):
        colour = f"C{number}"
        axes.scatter(*part.T.tolist(), s=14, color=colour, label=literal(each.sentence))
        axes.scatter(*part[each.places].T.tolist(), s=90, facecolors="none", edgecolors=colour, linewidths=2)
        for index, (name, point) in enumerate(zip(each.names, part.tolist(), strict=True)):
            weight = "bold" if index in each.places else "normal"
            shift = {"xytext": (4, 4), "textcoords": "offset points"}
            axes.annotate(literal(name), point, color=colour, fontsize=9, fontweight=weight, **shift)
    axes.set_xlabel(f"first component ({shares[0]:.0%} of the variance)")
    axes.set_ylabel(f"second component ({shares[1]:.0%})")
    figure.legend(loc="outside lower center")
    write_figure(figure, path)
