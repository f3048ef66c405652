"""scale * x / max(|x|, eps) * weight: RMSNorm as it is written with `F.normalize`, by the kernel of `rms_norm`.

With N columns it is RMSNorm times scale / sqrt(N), whose eps is eps^2 / N: the same to rounding, for rows of zeros too,
except where the length of a row is above 0 and near eps.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from transformer_kernels.ops._operation import reads_values
from transformer_kernels.ops.norm import rms_norm

FAR = 1e6
"""From this multiple of eps on, the length of a row is sqrt(|x|^2 + eps^2) to the last bit of float32."""
LEAST = 1e-37
"""The eps of `rms_norm` below which its square root may be 0 in float32."""
MIN_ELEMENTS, MIN_ELEMENTS_IN_TRAINING = 1 << 17, 1 << 13
"""Elements from which reading the lengths first is worth it, in inference and with gradients."""


def is_far(x: Tensor, eps: float) -> bool:
    """Whether every row of x is zero, or far longer than eps."""
    if not reads_values(x):
        return False
    lengths = torch.linalg.vector_norm(x.detach(), dim=-1)
    if not lengths.numel() or float(lengths.amin()) >= FAR * eps:
        return True
    return not bool(((lengths > 0.0) & (lengths < FAR * eps)).any())


def length_norm(
    x: Tensor, weight: Tensor | None, ones: Tensor, scale: float, eps: float, backend: str | None = None
) -> Tensor:
    """scale * x / max(|x|, eps) * weight, with the length |x| of the last axis.

    Args:
        x: (..., N), float32.
        weight: broadcasts to x; one number, or one per column, is a part of the kernel.
        ones: (N,).
        scale: of every element.
        eps: the least divisor.
        backend: as in `rms_norm`.
    """
    columns = x.shape[-1]
    if not is_far(x, eps):
        y = F.normalize(x, dim=-1, eps=eps) * scale
        return y if weight is None else y * weight
    gain = ones
    if weight is not None and (weight.numel() == 1 or weight.dim() == 1):
        gain, weight = weight.reshape(-1).expand(columns), None
    factor = scale / math.sqrt(columns)
    if factor != 1.0:
        gain = gain * factor
    y = rms_norm(x, gain, eps=eps * eps / columns, backend=backend)
    return y if weight is None else y * weight
