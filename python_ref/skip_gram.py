"""Word vectors: skip-gram with negative sampling (word2vec).

Mikolov, Sutskever, Chen, Corrado and Dean, "Distributed representations of words and phrases and their
compositionality", 2013; equations as in its section 2. Shapes: B centre words, K noise words for each, E the
width of the vectors, V words.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from python_ref import ops as reference_ops
from python_ref.layers import Layer


class SkipGram(Layer):
    """Two vectors per word: `words`, the result, and `contexts`, of the word as another one's neighbour.

    Args:
        vocab_size: V.
        width: E.
        ops: provides `embedding`.
    """

    def __init__(self, vocab_size: int, width: int, ops: Any = reference_ops) -> None:
        super().__init__(ops)
        for name, size in (("vocab_size", vocab_size), ("width", width)):
            if size < 1:
                raise ValueError(f"SkipGram: {name} must be at least 1; got {size}")
        self.words = nn.Parameter(torch.empty(vocab_size, width).uniform_(-0.5 / width, 0.5 / width))
        self.contexts = nn.Parameter(torch.zeros(vocab_size, width))

    def scores(self, centres: Tensor, candidates: Tensor) -> Tensor:
        """The dot products of each centre word's vector (B,) with its candidates' vectors (B, C) -> (B, C)."""
        v = self.ops.embedding(centres.unsqueeze(1), self.words)  # (B, 1, E)
        u = self.ops.embedding(candidates, self.contexts)  # (B, C, E)
        return (u @ v.mT).squeeze(-1)

    def forward(self, centres: Tensor, candidates: Tensor) -> Tensor:
        """Logits (B, C, 2) of "a noise word" and "a neighbour", for candidates (B, C) of centre words (B,)."""
        scores = self.scores(centres, candidates)
        return torch.stack((torch.zeros_like(scores), scores), -1)

    def loss(self, centres: Tensor, candidates: Tensor, targets: Tensor) -> Tensor:
        """Equation 4 with the opposite sign, divided by 1 + K: the mean of -log sigmoid(u . v), or of
        -log sigmoid(-u . v) for a noise word. It equals the cross-entropy of `forward`.

        Args:
            centres: (B,) int64.
            candidates: (B, 1 + K) int64, neighbours and noise words.
            targets: (B, 1 + K) int64, 1 for a neighbour, 0 for a noise word.
        """
        scores = self.scores(centres, candidates)
        return F.softplus(torch.where(targets == 1, -scores, scores)).mean()

    def flops_per_token(self, length: int | None = None, *, training: bool = True) -> float:
        """Floating-point operations of the dot product of one centre word and one candidate."""
        return (6.0 if training else 2.0) * self.words.shape[1]


def keep_probabilities(counts: Tensor, threshold: float) -> Tensor:
    """Probability min(1, sqrt(threshold / frequency)) of keeping an occurrence of each word (equation 5).

    Args:
        counts: (V,), occurrences of each word.
        threshold: frequency above which a word is subsampled; 0 keeps all.
    Returns:
        (V,) float64.
    """
    frequencies = counts.double() / counts.sum()
    return (threshold / frequencies).sqrt().clamp(max=1.0) if threshold else torch.ones_like(frequencies)


def noise_probabilities(counts: Tensor) -> Tensor:
    """The distribution of noise words (V,) float64: proportional to counts (V,) to the power 3/4 (section 2.2)."""
    powers = counts.double() ** 0.75
    return powers / powers.sum()
