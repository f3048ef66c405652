"""ViT: an image split into patch tokens, with a class token that the classifier reads."""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from python_ref import ops as reference_ops
from python_ref.config import TransformerConfig
from python_ref.layers import Layer, Transformer


@dataclass(frozen=True, kw_only=True)
class ViTConfig(TransformerConfig):
    """`TransformerConfig`, the image and the classifier. Positions are learned, one per patch.

    Args:
        image: height and width of an image, in pixels.
        channels: values per pixel.
        patch: height and width of a patch; divides `image`.
        classes: number of logits of the classifier.
    """

    image: int
    channels: int = 3
    patch: int
    classes: int
    vocab_size: int = field(init=False, default=1)  # the class token
    context: int = field(init=False, default=1)  # the class token and the patches

    def __post_init__(self) -> None:
        for name in ("image", "channels", "patch", "classes"):
            self._check_size(name, getattr(self, name))
        if self.image % self.patch:
            raise ValueError(
                f"{self._name}: patch must divide image; got patches of {self.patch} in images of {self.image}"
            )
        if self.positions != "learned":
            raise ValueError(f"{self._name}: positions must be 'learned'; got {self.positions!r}")
        object.__setattr__(self, "context", 1 + (self.image // self.patch) ** 2)
        super().__post_init__()


def image_patches(images: Tensor, patch: int) -> Tensor:
    """The pixels of each patch, row by row, (B, C, H, W) -> (B, patches, C * P * P)."""
    x = images.unflatten(3, (-1, patch)).unflatten(2, (-1, patch))  # (B, C, h, P, w, P)
    return x.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


class PatchEmbedding(Layer):
    """The class token and a projection of each patch, plus position embeddings, then dropout."""

    def __init__(self, config: ViTConfig, ops: Any) -> None:
        super().__init__(ops, config.dropout_on("embedding"))
        self.shape = (config.channels, config.image, config.image)
        self.patch = config.patch
        self.projection = nn.Linear(config.channels * config.patch**2, config.width)
        self.class_token = nn.Parameter(torch.empty(1, config.width))
        self.positions = nn.Parameter(torch.empty(config.context, config.width))

    def forward(self, images: Tensor, segments: None = None, position_ids: None = None) -> Tensor:
        """Embed images (B, C, H, W) -> (B, 1 + patches, E); other arguments as in `Embedding`."""
        if images.shape[1:] != self.shape:
            raise ValueError(f"ViT: images must have shape (batch, {str(self.shape)[1:]}; got {tuple(images.shape)}")
        patches = self.projection(image_patches(images, self.patch))
        x = torch.cat((self.class_token.expand(len(images), 1, -1), patches), dim=1) + self.positions
        return F.dropout(x, self.dropout_p)


class ViT(Transformer):
    """images (B, C, H, W) -> logits (B, classes).

    Dosovitskiy et al., "An image is worth 16x16 words: transformers for image recognition at scale", 2021, section 3.1.
    """

    config: ViTConfig

    def __init__(self, config: ViTConfig, ops: Any = reference_ops) -> None:
        super().__init__(config, ops)
        self.embedding = PatchEmbedding(config, ops)  # type: ignore[assignment]
        self.classifier = nn.Linear(config.width, config.classes)
        self.initialise()

    def forward(self, images: Tensor, *, return_attention: bool = False) -> Any:
        """Classify each image.

        Args:
            images: floating (B, C, H, W).
            return_attention: also return each layer's attention weights, a list of (B, H, L, L).
        Returns:
            logits (B, classes).
        """
        maps: list[Tensor] | None = [] if return_attention else None
        logits = self.classifier(self.hidden_states(images, maps=maps)[:, 0])  # (B, E) -> (B, classes)
        return logits if maps is None else (logits, maps)

    def loss(self, images: Tensor, labels: Tensor, *, label_smoothing: float = 0.0) -> Tensor:
        """The mean cross-entropy of `forward(images)`; labels (B,) int64, -100 excludes an image."""
        return self.ops.cross_entropy(self(images), labels, label_smoothing=label_smoothing)

    def head_weights_per_token(self, length: int) -> float:
        of_patch = self.config.channels * self.config.patch**2 * self.config.width
        return of_patch + self.classifier.weight.numel() / length


# For scikit-learn's digits, 8 x 8 pixels: 16 patches of 2 x 2. 202,186 parameters.
VIT_DIGITS = ViTConfig(image=8, channels=1, patch=2, classes=10, width=64, layers=4, heads=4, dropout=0.0)

# ViT-B/16 (Dosovitskiy et al. 2021, table 1): 86,567,656 parameters.
VIT_BASE = ViTConfig(image=224, patch=16, classes=1000, width=768, layers=12, heads=12, norm_eps=1e-6)
