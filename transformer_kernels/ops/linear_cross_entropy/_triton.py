"""A linear layer's cross-entropy with the row kernels of cross_entropy in Triton."""

from torch import Tensor

from transformer_kernels.backends import triton as _triton
from transformer_kernels.ops.cross_entropy._triton import reduced, row_losses, row_losses_and_gradient

__all__ = ["reduced", "row_losses", "row_losses_and_gradient", "unsupported"]


def unsupported(x: Tensor, *others: object) -> str | None:
    """The reason why these kernels do not take the call, or None."""
    return _triton.unsupported_dtype(x.dtype)
