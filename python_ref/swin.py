"""Swin: attention within windows of an image, shifted by half a window in every other block; patches merge by stages.

Liu et al., "Swin transformer: hierarchical vision transformer using shifted windows", 2021. Shapes: B images, a stage's
grid of (height, width) tokens of width E, W windows of N = side^2 tokens.
"""

import math
from dataclasses import dataclass, field, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from python_ref import ops as reference_ops
from python_ref.config import TransformerConfig
from python_ref.layers import Layer, Linear, PreNormBlock, Transformer, add_dropped, make_norm
from python_ref.vit import image_patches


@dataclass(frozen=True, kw_only=True)
class SwinConfig(TransformerConfig):
    """`TransformerConfig` with the width and heads of the first stage, the image and the classifier.

    Each later stage merges 2 x 2 tokens and has twice the width and heads. Positions are relative, within a window.

    Args:
        image: height and width of an image, in pixels.
        channels: values per pixel.
        patch: height and width of a patch; divides `image`.
        side: height and width of a window in tokens; divides the grid of each stage that is larger.
        depths: blocks of each stage.
        classes: number of logits of the classifier.
    """

    image: int
    channels: int = 3
    patch: int
    side: int
    depths: tuple[int, ...]
    classes: int
    vocab_size: int = field(init=False, default=1)  # there are no token ids
    context: int = field(init=False, default=1)  # the tokens of the first stage
    layers: int = field(init=False, default=1)  # the blocks of all stages

    def __post_init__(self) -> None:
        object.__setattr__(self, "depths", tuple(self.depths))
        for name in ("image", "channels", "patch", "side", "classes"):
            self._check_size(name, getattr(self, name))
        for depth in self.depths or (0,):
            self._check_size("depths", depth)
        if self.image % self.patch:
            raise ValueError(
                f"{self._name}: patch must divide image; got patches of {self.patch} in images of {self.image}"
            )
        if self.norm != "pre" or self.positions != "learned":
            raise ValueError(
                f"{self._name}: norm must be 'pre' and positions 'learned'; got {self.norm!r} and {self.positions!r}"
            )
        grid = self.image // self.patch
        for stage in range(len(self.depths)):
            if grid % min(self.side, grid) or (grid % 2 and stage + 1 < len(self.depths)):
                raise ValueError(
                    f"{self._name}: side must divide the grid of each stage, and a grid that is merged must be even; "
                    f"got a grid of {grid} x {grid} tokens in stage {stage} with side={self.side}"
                )
            grid //= 2
        object.__setattr__(self, "context", (self.image // self.patch) ** 2)
        object.__setattr__(self, "layers", sum(self.depths))
        super().__post_init__()

    def grid(self, stage: int) -> int:
        """Height and width of the grid of a stage, in tokens."""
        return self.image // self.patch >> stage

    def of_stage(self, stage: int) -> TransformerConfig:
        """The configuration of the blocks of a stage."""
        values = {field.name: getattr(self, field.name) for field in fields(TransformerConfig)}
        return TransformerConfig(**{**values, "width": self.width << stage, "heads": self.heads << stage})


def windows(x: Tensor, side: int) -> Tensor:
    """The windows of a grid, row by row, (B, height, width, E) -> (B * W, N, E)."""
    x = x.unflatten(2, (-1, side)).unflatten(1, (-1, side))  # (B, rows, side, columns, side, E)
    return x.transpose(2, 3).flatten(3, 4).flatten(0, 2)


def joined(x: Tensor, side: int, height: int, width: int) -> Tensor:
    """The grid of these windows, the inverse of `windows`."""
    x = x.unflatten(0, (-1, height // side, width // side)).unflatten(3, (side, side))
    return x.transpose(2, 3).flatten(3, 4).flatten(1, 2)


def relative_index(side: int) -> Tensor:
    """The row of the bias table for each query and key of a window, int64 (N, N): one per offset in y and x."""
    positions = torch.cartesian_prod(torch.arange(side), torch.arange(side))  # (N, 2)
    offsets = positions[:, None] - positions + side - 1  # (N, N, 2), from 0 to 2 * side - 2
    return offsets[..., 0] * (2 * side - 1) + offsets[..., 1]


def shifted_mask(grid: int, side: int, shift: int) -> Tensor:
    """0, or -inf for a query and a key of one window that are not adjacent in the image, (W, 1, N, N).

    A cyclic shift by `shift` moves the first rows and columns of the grid after the last ones (section 3.2).
    """
    region = (torch.arange(grid) >= grid - shift).long()
    regions = 2 * region[:, None] + region  # (grid, grid)
    of_token = windows(regions[None, :, :, None], side).squeeze(-1)  # (W, N)
    apart = of_token[:, :, None] != of_token[:, None]
    return torch.zeros(apart.shape).masked_fill(apart, -math.inf).unsqueeze(1)


class SwinBlock(Layer):
    """A pre-norm block applied to the windows of a grid, with a relative position bias on the scores (equation 4).

    Args:
        config: of the stage.
        ops: as in `Layer`.
        grid: height and width of the grid in tokens.
        side: of a window.
        shift: the window boundaries are moved by this many tokens; 0 or side // 2.
    """

    shifted: Tensor | None
    index: Tensor

    def __init__(self, config: TransformerConfig, ops: Any, *, grid: int, side: int, shift: int) -> None:
        super().__init__(ops, config.dropout_on("residual"))
        self.side, self.shift = side, shift
        self.inner = PreNormBlock(config, ops)
        self.relative_bias = nn.Parameter(torch.empty((2 * side - 1) ** 2, config.heads))
        self.register_buffer("index", relative_index(side), persistent=False)
        self.register_buffer("shifted", shifted_mask(grid, side, shift) if shift else None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, height, width, E) -> the same."""
        batch, height, width, _ = x.shape
        bias = self.relative_bias[self.index].permute(2, 0, 1).unsqueeze(0)  # (1, H, N, N)
        if self.shifted is not None:
            bias = (bias + self.shifted).repeat(batch, 1, 1, 1)  # (B * W, H, N, N)
            x = x.roll((-self.shift, -self.shift), (1, 2))
        stream, branch = self.inner(
            windows(x, self.side), attn_bias=bias, causal=False, key_padding_mask=None, cu_seqlens=None
        )
        x = joined(add_dropped(self.ops, branch, stream, self.dropout_p), self.side, height, width)
        return x if self.shifted is None else x.roll((self.shift, self.shift), (1, 2))


class PatchMerging(Layer):
    """Concatenate the tokens of each 2 x 2 square, normalise, and project to twice the width (section 3.1)."""

    def __init__(self, config: TransformerConfig, ops: Any) -> None:
        super().__init__(ops)
        self.eps = config.norm_eps
        self.norm_weight = nn.Parameter(torch.empty(4 * config.width))
        self.norm_bias = nn.Parameter(torch.empty(4 * config.width))
        self.projection = Linear(ops, 4 * config.width, 2 * config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, height, width, E) -> (B, height / 2, width / 2, 2 E)."""
        corners = [x[:, row::2, column::2] for column in (0, 1) for row in (0, 1)]
        merged = torch.cat(corners, -1)  # (B, height / 2, width / 2, 4 E)
        return self.projection(self.ops.layer_norm(merged, self.norm_weight, self.norm_bias, eps=self.eps))


class SwinEmbedding(Layer):
    """A projection of each patch, then a LayerNorm and dropout."""

    def __init__(self, config: SwinConfig, ops: Any) -> None:
        super().__init__(ops, config.dropout_on("embedding"))
        self.shape = (config.channels, config.image, config.image)
        self.patch = config.patch
        self.projection = nn.Linear(config.channels * config.patch**2, config.width)
        self.norm = make_norm(config, ops)

    def forward(self, images: Tensor) -> Tensor:
        """Embed images (B, C, H, W) -> (B, height, width, E)."""
        if images.shape[1:] != self.shape:
            raise ValueError(f"Swin: images must have shape (batch, {str(self.shape)[1:]}; got {tuple(images.shape)}")
        x = self.norm(self.projection(image_patches(images, self.patch)))
        return F.dropout(x, self.dropout_p).unflatten(1, (self.shape[1] // self.patch, -1))


class Swin(Transformer):
    """images (B, C, H, W) -> logits (B, classes), from the mean over the tokens of the last stage."""

    config: SwinConfig

    def __init__(self, config: SwinConfig, ops: Any = reference_ops) -> None:
        super().__init__(config, ops)
        last = config.of_stage(len(config.depths) - 1)
        self.embedding = SwinEmbedding(config, ops)  # type: ignore[assignment]
        self.merges = nn.ModuleList(
            PatchMerging(config.of_stage(stage), ops) for stage in range(len(config.depths) - 1)
        )
        self.final_norm = make_norm(last, ops) if config.final_norm else None
        self.classifier = nn.Linear(last.width, config.classes)
        self.initialise()

    def make_block(self, layer: int) -> SwinBlock:  # type: ignore[override]
        """The block of layer `layer`, from 0; every other one of a stage with several windows is shifted."""
        config, stage = self.config, 0
        while layer >= config.depths[stage]:
            layer, stage = layer - config.depths[stage], stage + 1
        grid = config.grid(stage)
        shift = config.side // 2 if layer % 2 and grid > config.side else 0
        return SwinBlock(config.of_stage(stage), self.ops, grid=grid, side=min(config.side, grid), shift=shift)

    def forward(self, images: Tensor) -> Tensor:
        """Classify each image, floating (B, C, H, W) -> logits (B, classes)."""
        x, blocks = self.embedding(images), iter(self.blocks)
        for stage, depth in enumerate(self.config.depths):
            if stage:
                x = self.merges[stage - 1](x)
            for _ in range(depth):
                x = next(blocks)(x)
        x = x.flatten(1, 2)  # (B, tokens, E)
        return self.classifier((x if self.final_norm is None else self.final_norm(x)).mean(1))

    def loss(self, images: Tensor, labels: Tensor, *, label_smoothing: float = 0.0) -> Tensor:
        """The mean cross-entropy of `forward(images)`; labels (B,) int64, -100 excludes an image."""
        return self.ops.cross_entropy(self(images), labels, label_smoothing=label_smoothing)

    def flops_per_token(self, length: int | None = None, *, training: bool = True) -> float:
        """As in `Transformer`, per token of the first stage; stage i has 4^-i as many tokens."""
        config, first = self.config, 0
        forward = 2.0 * config.channels * config.patch**2 * config.width
        for stage, depth in enumerate(config.depths):
            layers = [*self.blocks[first : first + depth], *self.merges[stage - 1 : stage]]
            first += depth
            modules = (module for layer in layers for module in layer.modules())
            weights = sum(module.weight.numel() for module in modules if isinstance(module, nn.Linear))
            seen = min(config.side, config.grid(stage)) ** 2  # keys of a query
            forward += (2 * weights + 4 * (config.width << stage) * seen * depth) / 4**stage
        return (3.0 if training else 1.0) * (forward + 2 * self.classifier.weight.numel() / config.context)


# For scikit-learn's digits, 8 x 8 pixels: 16 patches of 2 x 2 in windows of 2 x 2, then one window.
SWIN_DIGITS = SwinConfig(
    image=8, channels=1, patch=2, side=2, depths=(2, 2), classes=10, width=48, heads=3, dropout=0.0
)

# Swin-T (section 3.3): 28,288,354 parameters.
SWIN_TINY = SwinConfig(image=224, patch=4, side=7, depths=(2, 2, 6, 2), classes=1000, width=96, heads=3, dropout=0.0)
