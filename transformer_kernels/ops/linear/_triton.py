"""A linear layer on a GPU with backend="triton": PyTorch's product, which is the vendor's library."""

from transformer_kernels.ops.linear._products import Kernels as Kernels
