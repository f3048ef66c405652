"""Words in two dimensions: a word's hidden states in several sentences, and the nearest words in a table."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from transformer_kernels.training.data.vectors import Term, WordVectors
from transformer_kernels.visualization.figures import literal, new_figure, write_figure
from transformer_kernels.visualization.tokens import UNKNOWN, read


class WordInContext(NamedTuple):
    """A word in a sentence, where it occurs N times.

    Attributes:
        sentence: the sentence that contains it.
        indices: for each occurrence, the indices of the word's tokens in the sentence.
        hidden: (L, E) float32, the last hidden states of the sentence's tokens. names: their names.
        static: (N, E) float32, for each occurrence the mean of the embeddings of its tokens.
    """

    sentence: str
    indices: list[list[int]]
    hidden: Tensor
    names: list[str]
    static: Tensor

    @property
    def contextual(self) -> Tensor:
        """(N, E), for each occurrence the mean of the hidden states of its tokens."""
        return torch.stack([self.hidden[tokens].mean(0) for tokens in self.indices])


@torch.inference_mode()
def word_in_context(loaded: Any, word: str, sentence: str) -> WordInContext:
    """Every occurrence of `word` as a whole word, ignoring case; ValueError if there is none."""
    reading = read(loaded, sentence)
    found = [match.span() for match in re.finditer(rf"(?<!\w){re.escape(word)}(?!\w)", reading.text, re.IGNORECASE)]
    if not word or not found:
        raise ValueError(f"the word {word!r} is not in {sentence!r}")
    indices = [
        [index for index, (start, end) in enumerate(reading.spans) if start < last and end > first]
        for first, last in found
    ]
    if any(reading.names[index] in UNKNOWN for index in itertools.chain(*indices)):
        raise ValueError(f"the model does not know the word {word!r}: it reads [UNK] in {sentence!r}")
    hidden = loaded.model.hidden_states(reading.tokens)[0].float().cpu()
    table = loaded.model.embedding.tokens.weight
    static = torch.stack([table[reading.tokens[0, tokens]].float().mean(0).cpu() for tokens in indices])
    return WordInContext(sentence, indices, hidden, reading.names, static)


def principal_components(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows (N, E) projected onto their first two principal components, (N, 2), and the explained variance, (2,)."""
    centred = rows - rows.mean(0)
    left, singular, _ = torch.linalg.svd(centred, full_matrices=False)
    return left[:, :2] * singular[:2], singular[:2].square() / singular.square().sum()


def draw_words(found: list[WordInContext], word: str, path: str | Path) -> None:
    """Write a figure of all tokens of the sentences in two dimensions.

    The static embedding of the word is a star; arrows lead from it to the hidden state of each occurrence. All
    vectors are scaled to unit length before the projection, because embeddings and hidden states differ in size.

    Pearson, "On lines and planes of closest fit to systems of points in space", 1901.
    """
    vectors = [torch.cat((context.hidden, context.contextual)) for context in found]
    rows = torch.cat([*vectors, found[0].static[:1]])
    points, shares = principal_components(torch.nn.functional.normalize(rows, dim=1))
    figure, (axes,) = new_figure(9.0, 6.5)
    *parts, (star,) = points.split([*map(len, vectors), 1])
    names = [(star.tolist(), "static", "black", "bold")]
    arrows: list[list[float]] = []
    for number, (context, part) in enumerate(zip(found, parts, strict=True)):
        colour, tokens = f"C{number}", list(itertools.chain(*context.indices))
        states, means = part[: len(context.names)], part[len(context.names) :]
        axes.scatter(*states.T.tolist(), s=14, color=colour, label=literal(f"{number + 1}: {context.sentence}"))
        axes.scatter(*states[tokens].T.tolist(), s=90, facecolors="none", edgecolors=colour, linewidths=2)
        for mean in means:
            arrows += _arrow(axes, star.tolist(), mean.tolist(), colour)
        for index, (name, point) in enumerate(zip(context.names, states.tolist(), strict=True)):
            names.append((point, literal(name), colour, "bold" if index in tokens else "normal"))
    axes.scatter(*star.tolist(), s=140, marker="*", color="black", zorder=3)
    figure.legend(loc="outside lower center")
    _finish(axes, f"{word!r} in context: static embedding (star) and hidden states (circles)", shares)
    _name_points(figure, axes, names, arrows)
    write_figure(figure, path)


def draw_nearest(table: WordVectors, terms: Sequence[Term], found: Sequence[str], path: str | Path) -> None:
    """Write a figure of the words of an expression, bold, and of the words found, in two dimensions.

    In an analogy of the form a - b + c, one arrow leads from b to a, and one from c to the best word.

    Raises:
        ValueError: there are fewer than two words, or the vectors have one element.
    """
    asked = [table.index_of(term.word) for term in terms]
    rows = table.vectors[[*asked, *map(table.words.index, found)]]
    if min(rows.shape) < 2:
        raise ValueError("nearest: a plot needs two words and vectors of two elements")
    points, shares = principal_components(rows)
    figure, (axes,) = new_figure(8.0, 6.5)
    colours = ["C0"] * len(asked) + ["C1"] * len(found)
    axes.scatter(*points.T.tolist(), s=[60] * len(asked) + [20] * len(found), color=colours)
    arrows: list[list[float]] = []
    if found and [term.sign for term in terms] == [1, -1, 1]:
        for start, end in ((1, 0), (2, 3)):
            arrows += _arrow(axes, points[start].tolist(), points[end].tolist(), "grey")
    names = [*(table.words[index] for index in asked), *found]
    weights = ["bold"] * len(asked) + ["normal"] * len(found)
    signed = "".join(f" {'+' if term.sign > 0 else '-'} {term.word}" for term in terms).removeprefix(" + ")
    _finish(axes, f"nearest words: {signed}", shares)
    _name_points(figure, axes, list(zip(points.tolist(), map(literal, names), colours, weights, strict=True)), arrows)
    write_figure(figure, path)


def _finish(axes: Any, title: str, shares: Tensor) -> None:
    """The title of a plot of two components, and their shares of the variance."""
    across, up = f"first component ({shares[0]:.0%} of the variance)", f"second component ({shares[1]:.0%})"
    axes.set(title=literal(title), xlabel=across, ylabel=up)
    axes.grid(alpha=0.3)
    axes.margins(0.12)


def _arrow(axes: Any, start: list[float], end: list[float], colour: str) -> list[list[float]]:
    """Draw an arrow; returns points along it, which names must not cover."""
    style = {"arrowstyle": "->", "color": colour, "shrinkA": 6, "shrinkB": 6}
    axes.annotate("", end, start, arrowprops=style)
    return torch.lerp(torch.tensor(start), torch.tensor(end), torch.linspace(0, 1, 60)[:, None]).tolist()


def _name_points(
    figure: Any, axes: Any, names: list[tuple[list[float], str, str, str]], others: Sequence[list[float]] = ()
) -> None:
    """Write each (point, name, colour, weight) beside its point, over no point, no other point and no earlier name."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # a later layout would move the points under their names
    sizes = [9 if weight == "bold" else 4 for *_, weight in names] + [4] * len(others)  # half a marker, in pixels
    drawn = axes.transData.transform([*(point for point, *_ in names), *others])
    taken = [(x - size, y - size, x + size, y + size) for (x, y), size in zip(drawn, sizes, strict=True)]
    per_point = figure.dpi / 72
    for (point, name, colour, weight), box in zip(names, tuple(taken), strict=False):
        style = {"color": colour, "fontsize": 9, "fontweight": weight, "textcoords": "offset points"}
        text = axes.annotate(name, point, (0, 0), va="center", ha="center", **style)
        size = text.get_window_extent()
        middle = ((box[0] + box[2]) / 2, (box[1] + box[3]) / 2)
        options = []
        for radius, angle in itertools.product((7, 16, 28, 42, 60, 80), (turn * math.pi / 6 for turn in range(12))):
            right, up = math.cos(angle) * (radius + size.width / 2), math.sin(angle) * (radius + size.height / 2)
            x, y = middle[0] + right - size.width / 2, middle[1] + up - size.height / 2
            options.append(((x, y, x + size.width, y + size.height), right, up))
        best, right, up = min(options, key=lambda option: sum(_overlap(option[0], other) for other in taken))
        taken.append(best)
        text.set_position((right / per_point, up / per_point))
        if math.hypot(right, up) > 0.75 * size.width + 24:  # far from its point: a thin line leads to it
            line = {"arrowstyle": "-", "color": colour, "linewidth": 0.5, "alpha": 0.6}
            axes.annotate("", point, (right / per_point, up / per_point), textcoords="offset points", arrowprops=line)


def _overlap(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    """The common area of two boxes (left, bottom, right, top)."""
    width, height = min(one[2], other[2]) - max(one[0], other[0]), min(one[3], other[3]) - max(one[1], other[1])
    return width * height if width > 0 and height > 0 else 0.0
