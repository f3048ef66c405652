"""Decoding of an encoder-decoder: greedy, sampling, beam search, or minimum Bayes risk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from transformer_kernels.pretrained.generation import Sampling, draw
from transformer_kernels.training._optional import require

GREEDY = Sampling(temperature=0.0)
MAX_BEAMS = 1 << 16


@dataclass(frozen=True, kw_only=True)
class BeamSearch:
    """Beam search: keep the `width` most likely prefixes at each step and return the finished one with the best score.

    The score is log p / ((5 + n) / 6)^length_penalty for n tokens, the end included (Wu et al. 2016, equation 14).
    A sentence is finished when `width` translations have ended.

    Args:
        width: number of beams; 1 is greedy decoding.
        length_penalty: 0 favours short translations; larger values favour longer ones.
    """

    width: int = 4
    length_penalty: float = 0.6

    def __post_init__(self) -> None:
        if self.width < 1:
            raise ValueError(f"beam must be at least 1; got {self.width}")
        if self.width > MAX_BEAMS:
            raise ValueError(f"beam must be at most {MAX_BEAMS:,}; got {self.width}")
        if not 0.0 <= self.length_penalty < float("inf"):
            raise ValueError(f"length_penalty must be finite and not negative; got {self.length_penalty}")

    def score(self, log_probability: float, tokens: int) -> float:
        return log_probability / ((5 + tokens) / 6) ** self.length_penalty


@dataclass(frozen=True, kw_only=True)
class MinimumBayesRisk:
    """Minimum-Bayes-risk decoding: of sampled translations, the one with the highest mean chrF against all of them.

    Eikema, Aziz, "Is MAP decoding all you need? The inadequacy of the mode in neural machine translation", 2020.

    Args:
        samples: number of sampled translations.
        temperature: of the sampling; sample n uses the seed 1000 n.
    """

    samples: int = 48
    temperature: float = 0.6

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ValueError(f"mbr must be at least 1; got {self.samples}")

    def samplings(self) -> list[Sampling]:
        """The sampling of each sample."""
        return [Sampling(temperature=self.temperature, seed=1000 * n) for n in range(self.samples)]

    @staticmethod
    def choose(translations: Sequence[str]) -> int:
        """The index of the translation with the highest mean chrF (sacrebleu's, of a sentence) against all."""
        chrf, counts = require("sacrebleu").CHRF(), Counter(translations)

        def utility(translation: str) -> float:
            return sum(count * chrf.sentence_score(translation, [other]).score for other, count in counts.items())

        return translations.index(max(counts, key=utility))


Search = Sampling | BeamSearch | MinimumBayesRisk


@torch.no_grad()
def translate_batch(
    model: Any,
    source: Tensor,
    source_mask: Tensor,
    search: Sampling | BeamSearch = GREEDY,
    *,
    begin: int,
    end: int,
    length: int,
) -> list[list[int]]:
    """Translate sentences, padded on the right to one length.

    Args:
        model: a `python_ref.Translator`, in evaluation mode.
        source: (B, Ls) int64.
        source_mask: (B, Ls) bool, True at real tokens.
        search: decoding method; sampling of sentence n uses the seed `search.seed + n`.
        begin: the first token of a target.
        end: the last token of a translation.
        length: maximum number of tokens of a translation, the end included.
    Returns:
        the ids of each translation, without begin and end.
    """
    memory = model.encode(source, source_mask)
    if isinstance(search, BeamSearch):
        return _beam_search(model, memory, len(source), search, begin, end, length)
    cache = model.new_cache(len(source), length)
    generators = [torch.Generator().manual_seed(search.seed + row) for row in range(len(source))]
    tokens, written = torch.full((len(source), 1), begin), torch.empty(len(source), 0, dtype=torch.int64)
    for _ in range(length):
        logits = model.decode(tokens.to(source.device), memory, cache=cache, last_only=True)[:, -1].float().cpu()
        chosen = [draw(row, search, generator) for row, generator in zip(logits, generators, strict=True)]
        tokens = torch.tensor(chosen).unsqueeze(1)
        written = torch.cat((written, tokens), 1)
        if (written == end).any(1).all():
            break
    return [row[: row.index(end)] if end in row else row for row in written.tolist()]


def _beam_search(
    model: Any, memory: Any, batch: int, search: BeamSearch, begin: int, end: int, length: int
) -> list[list[int]]:
    """The best translation of each of `batch` sentences; row b K + i of the cache is beam i of sentence b."""
    width, device = search.width, memory.layers[0][0].device
    first = torch.arange(batch, device=device).unsqueeze(1) * width  # (B, 1)
    memory = memory.take(torch.arange(batch, device=device).repeat_interleave(width))
    cache = model.new_cache(batch * width, length)
    tokens = torch.full((batch * width, 1), begin, device=device)
    written = torch.empty(batch * width, 0, dtype=torch.int64, device=device)
    scores = torch.full((batch, width), -torch.inf, device=device)
    scores[:, 0] = 0.0  # all beams start identical, so only the first one counts
    ended: list[list[tuple[float, list[int]]]] = [[] for _ in range(batch)]
    for step in range(1, length + 1):
        logits = model.decode(tokens, memory, cache=cache, last_only=True)[:, -1].float()
        totals = scores.unsqueeze(-1) + logits.log_softmax(-1).unflatten(0, (batch, width))  # (B, K, V)
        best, flat_indices = totals.flatten(1).topk(2 * width)  # at most K of these end, so at least K continue
        parents, chosen = first + flat_indices // logits.shape[-1], flat_indices % logits.shape[-1]
        ends = chosen == end
        for row, rank in (ends[:, :width] & best[:, :width].isfinite()).nonzero().tolist():
            if len(ended[row]) < width:
                beginning = written[parents[row, rank]].tolist()
                ended[row].append((search.score(best[row, rank].item(), step), beginning))
        if all(len(hypotheses) == width for hypotheses in ended):
            break
        scores, order = best.masked_fill(ends, -torch.inf).topk(width)
        rows = parents.gather(1, order).flatten()
        tokens = chosen.gather(1, order).view(-1, 1)
        written = torch.cat((written[rows], tokens), 1)
        cache.take(rows)
    unended = written.view(batch, width, -1)[:, 0].tolist()  # beams are sorted by score
    return [max(hypotheses)[1] if hypotheses else unended[row] for row, hypotheses in enumerate(ended)]
