"""The KV cache: keys and values of the tokens read so far, in every layer."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from python_ref.config import TransformerConfig


class CachedModel(Protocol):
    """The attributes of a model that a cache reads: configuration, and device and dtype of the embedding."""

    @property
    def config(self) -> TransformerConfig: ...

    @property
    def embedding(self) -> Any: ...


class SourceMemory(NamedTuple):
    """The encoder's keys and values for a decoder, computed once for all decoding steps.

    Attributes:
        layers: keys (B, kv_heads, Ls, D) and values (B, kv_heads, Ls, Dv) for each layer of the decoder.
        padding_mask: (B, Ls) bool, True at real tokens; None when all are.
    """

    layers: list[list[Tensor]]
    padding_mask: Tensor | None

    def take(self, rows: Tensor) -> SourceMemory:
        """The memory of the sequences `rows`, int64 (N,), which may contain repetitions."""
        layers = [[x.index_select(0, rows) for x in layer] for layer in self.layers]
        return SourceMemory(layers, None if self.padding_mask is None else self.padding_mask.index_select(0, rows))


class KVCache:
    """Keys and values of the tokens read so far, so that a new token costs one row instead of the whole sequence.

    All memory is allocated at construction: per layer (B, kv_heads, slots, D) and (B, kv_heads, slots, Dv), or another
    `config.cache_shape`, with one slot per token up to `length`. A layer with a window has at most `window` slots and
    overwrites the oldest, as a ring buffer. If all layers have a window and positions are rotary, the number of tokens
    is unlimited.

    Attributes:
        batch, length, dtype, device: constructor arguments.
        tokens: number of tokens that each sequence has read, padding included.

    Raises:
        ValueError: batch or length is not positive, or the model has fewer positions than `length`.
    """

    def __init__(self, model: CachedModel, batch: int, length: int, dtype: torch.dtype | None = None) -> None:
        config = model.config
        windows = [config.window_of(layer) for layer in range(config.layers)]
        rings = all(window is not None and window <= length for window in windows)
        self.endless = rings and config.positions == "rotary"
        if batch < 1 or length < 1:
            raise ValueError(f"new_cache: batch and length must be at least 1; got {batch} and {length}")
        if length > config.context and not self.endless:
            raise ValueError(f"new_cache: length must be at most the model's context {config.context}; got {length}")
        self.model, self.batch, self.length, self.windows, self.tokens = model, batch, length, windows, 0
        self.dtype, self.device = dtype or activation_dtype(model), model.embedding.tokens.weight.device
        self.padding: Tensor | None = None  # (B,), padding tokens at the beginning of each sequence
        self._masks: dict[tuple[int, int], Tensor] = {}  # of this step, shared by layers with the same window
        heads, *widths = config.cache_shape
        self.keys, self.values = ([self._empty(heads, window, width) for window in windows] for width in widths)

    def _empty(self, heads: int, window: int | None, width: int) -> Tensor:
        slots = self.length if window is None else min(window, self.length)
        return torch.zeros(self.batch, heads, slots, width, dtype=self.dtype, device=self.device)

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values: 2 * layers * kv_heads * D * batch * slots * itemsize."""
        return sum(tensor.nbytes for tensor in (*self.keys, *self.values))

    def reset(self) -> None:
        """Discard all tokens; the memory remains allocated."""
        self.tokens, self.padding = 0, None

    def take(self, rows: Tensor) -> None:
        """Continue sequence n from the state of sequence rows[n]; `rows` is int64 (B,), on the cache's device."""
        for memory in (*self.keys, *self.values):
            memory.copy_(memory.index_select(0, rows))
        if self.padding is not None:
            self.padding = self.padding[rows]

    def begin(self, model: CachedModel, tokens: Tensor, padding_mask: Tensor | None) -> None:
        """Raise if the cache has no room for tokens (B, L), before anything is computed."""
        self._masks.clear()
        if model is not self.model:
            raise ValueError("cache: it belongs to another model; create one with this model's new_cache")
        if tokens.dim() != 2 or tokens.shape[0] != self.batch:
            raise ValueError(f"cache: tokens must have shape ({self.batch}, length); got {tuple(tokens.shape)}")
        if self.dtype != activation_dtype(model):
            raise TypeError(f"cache: its dtype is {self.dtype}; the model computes in {activation_dtype(model)}")
        if self.device != tokens.device:
            raise ValueError(f"cache: tokens must be on {self.device}; got {tokens.device}")
        if self.tokens + tokens.shape[1] > self.length and not self.endless:
            raise ValueError(
                f"cache: {self.tokens} of its {self.length} tokens are used; there is no room for {tokens.shape[1]}"
            )
        if padding_mask is None:
            return
        if self.tokens:
            raise ValueError("cache: a padding_mask can only be given with a cache's first tokens")
        count = padding_mask.sum(1)
        left = torch.arange(tokens.shape[1], device=tokens.device) >= tokens.shape[1] - count.unsqueeze(1)
        if not torch.equal(left, padding_mask):
            raise ValueError("cache: padding must be on the left, before each sequence's first real token")
        self.padding = tokens.shape[1] - count

    def position_ids(self, length: int) -> Tensor:
        """Positions of the next `length` tokens in their sequences, int64 (B, length); 0 for padding."""
        indices = self._indices(length).expand(self.batch, length)
        return indices if self.padding is None else (indices - self.padding.unsqueeze(1)).clamp(min=0)

    def _indices(self, length: int) -> Tensor:
        """Indices of the next `length` tokens, padding included, int64 (length,)."""
        return torch.arange(self.tokens, self.tokens + length, device=self.device)

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Store keys and values (B, kv_heads, L, D) of new tokens; return all that they may attend to, in order.

        With a window these are the `window - 1` tokens before the first new one, and the new ones. The third result is
        the mask of these keys, bool (B, Lk), False at padding; None when all are real.
        """
        first, last = self.tokens, self.tokens + k.shape[2]
        stored, window = (self.keys[layer], self.values[layer]), self.windows[layer]
        if window is None:
            for memory, new in zip(stored, (k, v), strict=True):
                memory[:, :, first:last] = new
            return stored[0][:, :, :last], stored[1][:, :, :last], self._real(0, last)
        slots = stored[0].shape[2]
        oldest = max(0, first - window + 1)
        older = torch.arange(oldest, first, device=self.device) % slots
        seen = [torch.cat((memory[:, :, older], new), 2) for memory, new in zip(stored, (k, v), strict=True)]
        recent = torch.arange(max(first, last - slots), last, device=self.device)
        for memory, new in zip(stored, (k, v), strict=True):
            memory[:, :, recent % slots] = new[:, :, recent - first]
        return seen[0], seen[1], self._real(oldest, last)

    def _real(self, first: int, last: int) -> Tensor | None:
        """Which tokens in [first, last) are real, bool (B, last - first); None when all are."""
        if self.padding is None:
            return None
        if (first, last) not in self._masks:
            self._masks[first, last] = torch.arange(first, last, device=self.device) >= self.padding.unsqueeze(1)
        return self._masks[first, last]

    def advance(self, length: int) -> None:
        """Advance by `length` tokens, whose keys and values all layers have stored."""
        self.tokens += length


class SteadyCache(KVCache):
    """A cache whose one-token steps run the same operations on the same memory, so that one CUDA graph replays them.

    The varying state is in tensors: a token is stored at index `position` and attends to all slots, with
    empty slots masked. Several tokens are processed as in `KVCache`.

    Attributes:
        position: int64 (1,), the number of tokens read by each sequence; `tokens` is its copy on the host.
    """

    def __init__(self, model: CachedModel, batch: int, length: int, dtype: torch.dtype | None = None) -> None:
        super().__init__(model, batch, length, dtype)
        self.position = torch.zeros(1, dtype=torch.int64, device=self.device)

    def reset(self) -> None:
        super().reset()
        self.position.zero_()

    def _indices(self, length: int) -> Tensor:
        return self.position if length == 1 else super()._indices(length)

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """As `KVCache.extend` for several tokens; a single token attends to the slots of a ring in storage order."""
        if k.shape[2] > 1:
            return super().extend(layer, k, v)
        keys, values = self.keys[layer], self.values[layer]
        slots = keys.shape[2]
        slot = self.position % slots
        keys.index_copy_(2, slot, k)
        values.index_copy_(2, slot, v)
        return keys, values, self._taken(slots)

    def _taken(self, slots: int) -> Tensor:
        """Which slots contain a real token, including the new one, bool (B, slots)."""
        if (0, slots) not in self._masks:
            token = self.position - (self.position - torch.arange(slots, device=self.device)) % slots  # < 0: empty
            real = token >= (0 if self.padding is None else self.padding.unsqueeze(1))
            self._masks[0, slots] = real.expand(self.batch, slots)
        return self._masks[0, slots]

    def advance(self, length: int) -> None:
        super().advance(length)
        self.position.add_(length)


def activation_dtype(model: CachedModel) -> torch.dtype:
    """The dtype of a model's keys: the dtype of its weights, or autocast's."""
    weight = model.embedding.tokens.weight
    if torch.is_autocast_enabled(weight.device.type):
        return torch.get_autocast_dtype(weight.device.type)
    return weight.dtype
