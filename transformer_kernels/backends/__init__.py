"""What all operations of a backend share: how it is found, loaded or built, and why it cannot be."""

from torch import Tensor


def address(tensor: Tensor | None) -> int:
    """Where a tensor's first element lies, for compiled kernels; 0 for an absent one."""
    return 0 if tensor is None else tensor.data_ptr()
