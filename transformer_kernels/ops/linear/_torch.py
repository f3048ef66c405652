"""A linear layer with backend="torch": PyTorch's product and activation."""

from transformer_kernels.ops.linear._products import Kernels as Kernels
