"""In which precision a model computes; its weights and its statistics are float32 in all of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch


def autocast(device_type: str, dtype: str) -> AbstractContextManager:
    """Autocast to a half precision, nothing for float32 and tf32."""
    return torch.autocast(device_type, getattr(torch, dtype)) if dtype in ("bfloat16", "float16") else nullcontext()


@contextmanager
def matrix_products(dtype: str) -> Iterator[None]:
    """While entered, "tf32" lets float32 matrix products round their factors to TF32; afterwards all is as before."""
    if dtype != "tf32":
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
