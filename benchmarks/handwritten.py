"""Small models that write attention, norms and activations by hand, in PyTorch's operators only.

Each is spelled as tutorials and repositories do: GPT-2 with a causal buffer, BERT with a norm by the standard deviation
and padding, Llama with interleaved rotary embeddings and grouped keys, a GPT that computes one head at a time, ViT with
one projection for queries, keys and values. They import nothing of this package: how fast it runs them is measured by
`benchmarks/programs.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Size(NamedTuple):
    """Layers, width, heads, tokens of a sequence, sequences of a batch, words."""

    layers: int = 4
    width: int = 256
    heads: int = 4
    length: int = 128
    batch: int = 8
    words: int = 4000


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(var + eps), scaled and shifted."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(dim=-1, keepdim=True)
        var = x.var(dim=-1, keepdim=True, unbiased=False)
        return self.scale * ((x - mean) / torch.sqrt(var + 1e-5)) + self.shift


class StdNorm(nn.Module):
    """(x - mean) / (std + eps), as in the Annotated Transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.a * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6) + self.b


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps), computed in float32."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).type_as(x) * self.weight


class TanhGELU(nn.Module):
    """GELU by its approximation with tanh."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3))))


def split(x: Tensor, heads: int) -> Tensor:
    """(B, L, H D) -> (B, H, L, D)."""
    return x.view(*x.shape[:2], heads, -1).transpose(1, 2)


def merged(x: Tensor) -> Tensor:
    """(B, H, L, D) -> (B, L, H D)."""
    return x.transpose(1, 2).contiguous().view(x.shape[0], x.shape[2], -1)


class CausalAttention(nn.Module):
    """Three projections, a causal mask from a buffer, dropout of the weights."""

    def __init__(self, size: Size, dropout: float) -> None:
        super().__init__()
        self.heads = size.heads
        self.query, self.key, self.value = (nn.Linear(size.width, size.width, bias=False) for _ in range(3))
        self.output, self.dropout = nn.Linear(size.width, size.width), nn.Dropout(dropout)
        self.mask: Tensor
        self.register_buffer("mask", torch.triu(torch.ones(2 * size.length, 2 * size.length), diagonal=1))

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        q, k, v = (split(layer(x), self.heads) for layer in (self.query, self.key, self.value))
        scores = q @ k.transpose(2, 3)
        scores.masked_fill_(self.mask.bool()[:length, :length], -torch.inf)
        weights = self.dropout(torch.softmax(scores / k.shape[-1] ** 0.5, dim=-1))
        return self.output(merged(weights @ v))


class HeadByHead(nn.Module):
    """Causal attention, one head at a time."""

    def __init__(self, size: Size, dropout: float) -> None:
        super().__init__()
        width = size.width // size.heads
        self.heads = nn.ModuleList(
            nn.ModuleList(nn.Linear(size.width, width, bias=False) for _ in range(3)) for _ in range(size.heads)
        )
        self.output, self.dropout = nn.Linear(size.width, size.width), nn.Dropout(dropout)
        self.tril: Tensor
        self.register_buffer("tril", torch.tril(torch.ones(2 * size.length, 2 * size.length)))

    def forward(self, x: Tensor) -> Tensor:
        length, found = x.shape[1], []
        for head in self.heads:
            key, query, value = (layer(x) for layer in head)  # type: ignore[attr-defined]
            weights = query @ key.transpose(-2, -1) * key.shape[-1] ** -0.5
            weights = weights.masked_fill(self.tril[:length, :length] == 0, float("-inf"))
            found.append(self.dropout(F.softmax(weights, dim=-1)) @ value)
        return self.dropout(self.output(torch.cat(found, dim=-1)))


class PaddedAttention(nn.Module):
    """Attention with hidden keys at -1e9, in a function of its own."""

    def __init__(self, size: Size, dropout: float) -> None:
        super().__init__()
        self.heads = size.heads
        self.layers = nn.ModuleList(nn.Linear(size.width, size.width) for _ in range(3))
        self.output, self.dropout = nn.Linear(size.width, size.width), nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (split(layer(x), self.heads) for layer in self.layers)
        scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(q.size(-1))
        scores = scores.masked_fill(mask == 0, -1e9)
        return self.output(merged(torch.matmul(self.dropout(F.softmax(scores, dim=-1)), v)))


class Mlp(nn.Sequential):
    """Two linear layers and an activation."""

    def __init__(self, size: Size, activation: nn.Module, dropout: float) -> None:
        wide = 4 * size.width
        super().__init__(nn.Linear(size.width, wide), activation, nn.Linear(wide, size.width), nn.Dropout(dropout))


class Block(nn.Module):
    """Attention and an MLP, each on a normalised copy of the residual stream."""

    def __init__(self, size: Size, attention: nn.Module, norm: Callable[[int], nn.Module], mlp: nn.Module) -> None:
        super().__init__()
        self.attention, self.mlp = attention, mlp
        self.norm1, self.norm2 = norm(size.width), norm(size.width)

    def forward(self, x: Tensor, *given: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), *given)
        return x + self.mlp(self.norm2(x))


class LanguageModel(nn.Module):
    """Tokens and positions -> blocks -> norm -> logits; the loss predicts the next token.

    Args:
        size: of the model.
        block: makes one block.
        norm: makes the last norm.
        dropout: of the embeddings.
        padded: the last quarter of each second sequence is padding (token 0), which is masked; each position then
            predicts its own token.
    """

    def __init__(
        self, size: Size, block: Callable[[], nn.Module], norm: Callable[[int], nn.Module], dropout: float, padded: bool
    ) -> None:
        super().__init__()
        self.size, self.padded = size, padded
        self.tokens, self.positions = nn.Embedding(size.words, size.width), nn.Embedding(2 * size.length, size.width)
        self.dropout, self.norm = nn.Dropout(dropout), norm(size.width)
        self.blocks = nn.ModuleList(block() for _ in range(size.layers))
        self.head = nn.Linear(size.width, size.words, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.dropout(self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device)))
        given = ((tokens != 0).unsqueeze(1).unsqueeze(2),) if self.padded else ()
        for block in self.blocks:
            x = block(x, *given)
        return self.head(self.norm(x))

    def inputs(self, batch: int) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(1, self.size.words, (batch, self.size.length), generator=generator)
        if self.padded:
            tokens[::2, -self.size.length // 4 :] = 0
        return (tokens,)

    def loss(self, run: Callable[..., Tensor], tokens: Tensor) -> Tensor:
        if self.padded:
            return F.cross_entropy(run(tokens).flatten(0, 1), tokens.flatten(), ignore_index=0)
        logits = run(tokens)[:, :-1]
        return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), tokens[:, 1:].reshape(-1))


class LlamaAttention(nn.Module):
    """Grouped keys, rotary embeddings of neighbouring columns, a causal mask that is added."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads, self.groups = size.heads, max(1, size.heads // 2)
        head = size.width // size.heads
        self.query = nn.Linear(size.width, size.width, bias=False)
        self.key, self.value = (nn.Linear(size.width, self.groups * head, bias=False) for _ in range(2))
        self.output = nn.Linear(size.width, size.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (
            layer(x).view(*x.shape[:2], heads, -1)
            for layer, heads in ((self.query, self.heads), (self.key, self.groups), (self.value, self.groups))
        )
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        k, v = (x.repeat_interleave(self.heads // self.groups, dim=2) for x in (k, v))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        scores = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(q.shape[-1]) + mask
        return self.output(merged(F.softmax(scores.float(), dim=-1).type_as(q) @ v))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Neighbouring columns of (B, L, H, D) rotated by the angles of (L, D / 2)."""
    even, odd = x.float().reshape(*x.shape[:-1], -1, 2).unbind(-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(3).type_as(x)


class SwiGLU(nn.Module):
    """w2(silu(w1 x) * w3 x)."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        wide = size.width * 11 // 4
        self.w1, self.w3 = (nn.Linear(size.width, wide, bias=False) for _ in range(2))
        self.w2 = nn.Linear(wide, size.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Llama(LanguageModel):
    """Rotary instead of position embeddings."""

    def __init__(self, size: Size) -> None:
        super().__init__(
            size, lambda: Block(size, LlamaAttention(size), RMSNorm, SwiGLU(size)), RMSNorm, 0.0, padded=False
        )
        head = size.width // size.heads
        angles = torch.outer(torch.arange(2.0 * size.length), 10000.0 ** (-torch.arange(0, head, 2) / head))
        self.cos: Tensor
        self.sin: Tensor
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())
        del self.positions

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        x = self.tokens(tokens)
        mask = torch.full((length, length), -torch.inf, device=x.device).triu(1).type_as(x)
        for block in self.blocks:
            x = block(x, self.cos[:length], self.sin[:length], mask)
        return self.head(self.norm(x))


class ImageAttention(nn.Module):
    """One projection for queries, keys and values."""

    def __init__(self, size: Size, dropout: float) -> None:
        super().__init__()
        self.heads, self.scale = size.heads, (size.width // size.heads) ** -0.5
        self.qkv, self.output = nn.Linear(size.width, 3 * size.width), nn.Linear(size.width, size.width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        qkv = self.qkv(x).reshape(rows, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        weights = self.dropout(((q @ k.transpose(-2, -1)) * self.scale).softmax(dim=-1))
        return self.dropout(self.output((weights @ v).transpose(1, 2).reshape(rows, length, width)))


class ViT(nn.Module):
    """Patches of images and a class token; norms and GELU are modules of torch.nn."""

    PATCH = 16

    def __init__(self, size: Size, dropout: float) -> None:
        super().__init__()
        self.size, self.side = size, max(1, math.isqrt(size.length // 2))
        self.patches = nn.Conv2d(3, size.width, self.PATCH, self.PATCH)
        self.token = nn.Parameter(torch.randn(1, 1, size.width) * 0.02)
        self.positions = nn.Parameter(torch.randn(1, 1 + self.side**2, size.width) * 0.02)
        self.blocks = nn.ModuleList(
            Block(size, ImageAttention(size, dropout), nn.LayerNorm, Mlp(size, nn.GELU(), dropout))
            for _ in range(size.layers)
        )
        self.norm, self.head = nn.LayerNorm(size.width), nn.Linear(size.width, 100)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(x.shape[0], -1, -1), x), dim=1) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])

    def inputs(self, batch: int) -> tuple[Tensor, ...]:
        pixels = self.side * self.PATCH
        return (torch.randn(batch, 3, pixels, pixels, generator=torch.Generator().manual_seed(0)),)

    def loss(self, run: Callable[..., Tensor], images: Tensor) -> Tensor:
        return F.cross_entropy(run(images), torch.arange(images.shape[0]) % 100)


def _gpt(size: Size, dropout: float) -> LanguageModel:
    def block() -> Block:
        return Block(size, CausalAttention(size, dropout), LayerNorm, Mlp(size, TanhGELU(), dropout))

    return LanguageModel(size, block, LayerNorm, dropout, padded=False)


def _heads(size: Size, dropout: float) -> LanguageModel:
    def block() -> Block:
        return Block(size, HeadByHead(size, dropout), nn.LayerNorm, Mlp(size, nn.ReLU(), dropout))

    return LanguageModel(size, block, nn.LayerNorm, 0.0, padded=False)


def _bert(size: Size, dropout: float) -> LanguageModel:
    def block() -> Block:
        return Block(size, PaddedAttention(size, dropout), StdNorm, Mlp(size, TanhGELU(), dropout))

    return LanguageModel(size, block, StdNorm, dropout, padded=True)


MODELS: dict[str, Callable[[Size, float], LanguageModel | ViT]] = {
    "gpt": _gpt,
    "bert": _bert,
    "llama": lambda size, dropout: Llama(size),
    "heads": _heads,
    "vit": ViT,
}
"""Models by name, from a size and a dropout rate."""
