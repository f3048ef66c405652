"""A vision transformer (ViT or Swin) that classifies scikit-learn's handwritten digits."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from transformer_kernels.pretrained.folder import check_regular
from transformer_kernels.training._optional import require
from transformer_kernels.training.config import TrainingConfig, build_preset, option
from transformer_kernels.training.distributed import Processes
from transformer_kernels.training.recipe import Classified, Recipe, Trained
from transformer_kernels.training.step import Batch, to_device

CLASSES = tuple("0123456789")
SIDE = 8  # pixels
WHITE = 16.0  # maximum pixel value of the digits


@dataclass(kw_only=True)
class VitConfig(TrainingConfig):
    """A vision transformer (ViT or Swin) on handwritten digits (bundled with scikit-learn)."""

    recipe: ClassVar[str] = "vit"
    default_length: ClassVar[tuple[str, int]] = ("epochs", 40)

    preset: str = option(
        "vit_digits", "model definition that --model changes", choices=("vit_digits", "swin_digits"), fixed=True
    )
    patch: int = option(2, "patch height and width in pixels; images are 8 x 8", fixed=True)
    held_out: int = option(360, "validation images, of 1,797", fixed=True)
    lr: float = option(2e-3, "peak learning rate")
    weight_decay: float = option(0.05, "AdamW weight decay, applied to matrices only")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.held_out < 1797:
            raise ValueError(f"held_out must leave some of the 1,797 digits for training; got {self.held_out}")


class DigitsViT(Recipe):
    """1,797 greyscale images of 8 x 8 pixels with their digits."""

    Config = VitConfig

    def __init__(self, config: VitConfig, tokenizer: None = None) -> None:
        self.config = config
        digits = require("sklearn.datasets").load_digits()
        self.images = normalised(torch.from_numpy(digits.images).float() / WHITE)
        self.labels = torch.from_numpy(digits.target).long()
        self.fingerprint = hashlib.sha256(digits.images.tobytes()).hexdigest()
        order = torch.randperm(len(self.labels), generator=torch.Generator().manual_seed(config.seed))
        self.train_length = len(order) - config.held_out
        self.training, self.held_out = order.split([self.train_length, config.held_out])

    @classmethod
    def build(cls, config: VitConfig, tokenizer: None) -> nn.Module:
        return build_preset(config.preset, config, patch=config.patch)

    def batch(self, indices: Tensor, device: torch.device) -> Batch:
        """Training images at `indices` (B, 1, 8, 8), and their digits (B,)."""
        return self._batch(self.training[indices], device)

    def validation_batches(self, device: torch.device, processes: Processes) -> Iterator[Batch]:
        """This process's share of the validation images."""
        for part in processes.parts(self.held_out, 4 * self.config.batch_size):
            yield self._batch(part, device)

    @classmethod
    def classify(cls, trained: Trained, texts: list[str]) -> Classified:
        """The digits in image files, bright on dark or dark on bright; images are resized to 8 x 8 pixels."""
        images = torch.stack([read_image(path) for path in texts]).to(trained.device)
        with torch.no_grad():
            return Classified(CLASSES, trained.model(images).float().softmax(-1).cpu())

    def _batch(self, numbers: Tensor, device: torch.device) -> Batch:
        images, labels = (to_device(tensor[numbers], device) for tensor in (self.images, self.labels))
        class_token = self.config.preset == "vit_digits"
        tokens = len(numbers) * (class_token + (SIDE // self.config.patch) ** 2)
        return Batch((images,), labels, tokens, tokens)


def normalised(brightness: Tensor) -> Tensor:
    """From [0, 1], (..., 8, 8), to [-1, 1] with one channel, (..., 1, 8, 8)."""
    return (2.0 * brightness - 1.0).unsqueeze(-3)


def read_image(path: str) -> Tensor:
    """An image file as model input, (1, 8, 8); one whose border is bright, as ink on paper, is inverted."""
    pillow: Any = require("PIL.Image")
    numpy: Any = require("numpy")
    check_regular(Path(path))
    try:
        with pillow.open(path) as picture:
            if picture.mode.startswith(("I", "F")):
                raise ValueError(f"it must have 8 bits per channel; its mode is {picture.mode}")
            grey = picture.convert("L").resize((SIDE, SIDE), pillow.Resampling.BOX)
    except (OSError, ValueError, SyntaxError, pillow.DecompressionBombError) as error:
        raise ValueError(f"{path}: not an image that can be read: {error}") from error
    brightness = torch.from_numpy(numpy.asarray(grey, dtype="float32")) / 255.0
    border = torch.cat((brightness[[0, -1]].flatten(), brightness[:, [0, -1]].flatten()))
    return normalised(1.0 - brightness if border.median() > 0.5 else brightness)
