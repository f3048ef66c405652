"""What the parity tests of every operation are parametrized over."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def dtype_id(value: Any) -> str | None:
    """float32 rather than torch.float32 in a test's name."""
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else None


def normal(*shape: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensor:
    """A standard normal leaf that requires grad, the same in every dtype up to rounding."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).to(device).requires_grad_()
