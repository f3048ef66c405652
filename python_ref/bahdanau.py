"""Additive attention between two recurrent networks, the first attention in machine translation.

Bahdanau, Cho and Bengio, "Neural machine translation by jointly learning to align and translate", 2015; equations are
numbered as in its section 3 and appendix A. Shapes: B sequences, Ls source tokens, Lt target tokens, E the width of
embeddings and states, M = 2 E the width of the memory, A the hidden width of the attention, V token ids.
"""

from typing import Any

import torch
from torch import Tensor, nn

from python_ref import ops as reference_ops
from python_ref.layers import Layer, check_padding_mask


class AdditiveAttention(Layer):
    """weights = softmax_j(v . tanh(W s + U h_j)), context = sum_j weights_j h_j (equations 5 and 6)."""

    def __init__(self, state: int, memory: int, width: int, ops: Any = reference_ops) -> None:
        super().__init__(ops)
        self.query = nn.Linear(state, width, bias=False)  # W
        self.key = nn.Linear(memory, width, bias=False)  # U
        self.score = nn.Linear(width, 1, bias=False)  # v

    def forward(
        self, state: Tensor, memory: Tensor, keys: Tensor, padding_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The context (B, M) of a decoder's state, and the weights (B, Ls).

        Args:
            state: (B, E), s.
            memory: (B, Ls, M), h.
            keys: (B, Ls, A), `key(memory)`, which is the same at every step.
            padding_mask: (B, Ls) bool, True at real tokens; None when all are.
        """
        scores = self.score((self.query(state).unsqueeze(1) + keys).tanh()).squeeze(-1)  # (B, Ls)
        weights = self.ops.softmax(scores, mask=padding_mask)
        return (weights.unsqueeze(1) @ memory).squeeze(1), weights


class GRUCell(nn.Module):
    """s' = (1 - z) * s + z * tanh(W x + U (r * s)), with gates z and r in (0, 1) (appendix A.1.1)."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.gates = nn.Linear(inputs + width, 2 * width)
        self.candidate = nn.Linear(inputs + width, width)

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        """The next state (B, E) after the input x (B, I)."""
        update, reset = self.gates(torch.cat((x, state), -1)).sigmoid().chunk(2, -1)
        proposed = self.candidate(torch.cat((x, reset * state), -1)).tanh()
        return (1 - update) * state + update * proposed


class Seq2Seq(Layer):
    """source (B, Ls), target (B, Lt) int64 -> logits (B, Lt, V) for the target's token after each of them.

    Two GRUs read the source, one in each direction. A third one writes and attends to their states before each token.

    Args:
        vocab_size: number of token ids, of both sides.
        width: E and A.
        ops: the operations; only the softmax of the attention is used.
    """

    def __init__(self, vocab_size: int, width: int = 64, ops: Any = reference_ops) -> None:
        super().__init__(ops)
        self.embedding = nn.Embedding(vocab_size, width)
        self.forwards, self.backwards = GRUCell(width, width), GRUCell(width, width)
        self.start = nn.Linear(width, width)
        self.attention = AdditiveAttention(width, 2 * width, width, ops)
        self.writer = GRUCell(3 * width, width)
        self.head = nn.Linear(4 * width, vocab_size)

    def read(self, source: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """The concatenated states of both readers, (B, Ls) -> (B, Ls, 2 E); padding does not change their states."""
        x = self.embedding(source)
        real = torch.ones_like(source, dtype=torch.bool) if padding_mask is None else padding_mask
        both = []
        for cell, steps in ((self.forwards, range(x.shape[1])), (self.backwards, reversed(range(x.shape[1])))):
            state, states = x.new_zeros(x.shape[0], x.shape[2]), {}
            for step in steps:
                state = torch.where(real[:, step, None], cell(x[:, step], state), state)
                states[step] = state
            both.append(torch.stack([states[step] for step in range(x.shape[1])], 1))
        return torch.cat(both, -1)

    def forward(
        self, source: Tensor, target: Tensor, padding_mask: Tensor | None = None, *, return_attention: bool = False
    ) -> Any:
        """The logits after each token of `target`, given all of them.

        Args:
            source: (B, Ls) int64. target: (B, Lt) int64.
            padding_mask: (B, Ls) bool, True at real tokens of the source, padding on the right; None when all are.
            return_attention: also return the weights (B, Lt, Ls).
        """
        if padding_mask is not None:
            check_padding_mask(padding_mask, source)
        memory = self.read(source, padding_mask)
        state, keys = self._begin(memory), self.attention.key(memory)
        logits, maps = [], []
        for x in self.embedding(target).unbind(1):
            state, output, weights = self._write(x, state, memory, keys, padding_mask)
            logits.append(output)
            maps.append(weights)
        return (torch.stack(logits, 1), torch.stack(maps, 1)) if return_attention else torch.stack(logits, 1)

    @torch.no_grad()
    def generate(self, source: Tensor, begin: int, length: int, padding_mask: Tensor | None = None) -> Tensor:
        """Greedy decoding of `length` tokens, (B, Ls) -> (B, length)."""
        memory = self.read(source, padding_mask)
        state, keys = self._begin(memory), self.attention.key(memory)
        token, written = torch.full_like(source[:, 0], begin), []
        for _ in range(length):
            state, logits, _ = self._write(self.embedding(token), state, memory, keys, padding_mask)
            token = logits.argmax(-1)
            written.append(token)
        return torch.stack(written, 1)

    def _begin(self, memory: Tensor) -> Tensor:
        """tanh(W h_1), where h_1 is the backward reader's state at the first token (appendix A.2.2)."""
        return self.start(memory[:, 0].chunk(2, -1)[1]).tanh()

    def _write(
        self, x: Tensor, state: Tensor, memory: Tensor, keys: Tensor, padding_mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The next state (B, E), the logits (B, V) and the weights (B, Ls)."""
        context, weights = self.attention(state, memory, keys, padding_mask)
        state = self.writer(torch.cat((x, context), -1), state)
        return state, self.head(torch.cat((state, x, context), -1)), weights
