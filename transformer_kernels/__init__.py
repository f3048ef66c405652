"""Fused kernels for small transformers, from attention to the loss, with a backend flag and proof of parity.

import transformer_kernels as tk

y = tk.attention(q, k, v, causal=True)             # the fastest backend that supports the call
model = tk.build("char_gpt", backend="triton")     # the same model definition as python_ref.build("char_gpt")
print(tk.explain("attention", q, k, v, causal=True))
"""

from transformer_kernels._bind import bind, build
from transformer_kernels._dispatch import BACKENDS, explain, get_backend, set_backend, use_backend
from transformer_kernels._errors import BackendUnavailable, UnsupportedByBackend
from transformer_kernels._version import __version__
from transformer_kernels.ops import (
    add_layer_norm,
    attention,
    bias_gelu,
    bias_relu,
    cross_entropy,
    embedding,
    gelu,
    layer_norm,
    linear_cross_entropy,
    packed_attention,
    softmax,
)
from transformer_kernels.patching import patch, unpatch

__all__ = [
    "BACKENDS",
    "BackendUnavailable",
    "UnsupportedByBackend",
    "__version__",
    "add_layer_norm",
    "attention",
    "bias_gelu",
    "bias_relu",
    "bind",
    "build",
    "cross_entropy",
    "embedding",
    "explain",
    "gelu",
    "get_backend",
    "layer_norm",
    "linear_cross_entropy",
    "packed_attention",
    "patch",
    "set_backend",
    "softmax",
    "unpatch",
    "use_backend",
]
