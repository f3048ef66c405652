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
    add_rms_norm,
    attention,
    attention_weights,
    bias_gelu,
    bias_relu,
    cross_entropy,
    embedding,
    geglu,
    gelu,
    layer_norm,
    linear_cross_entropy,
    packed_attention,
    rms_norm,
    rotary,
    softmax,
    swiglu,
)
from transformer_kernels.patching import patch, unpatch

__all__ = [
    "BACKENDS",
    "BackendUnavailable",
    "UnsupportedByBackend",
    "__version__",
    "add_layer_norm",
    "add_rms_norm",
    "attention",
    "attention_weights",
    "bias_gelu",
    "bias_relu",
    "bind",
    "build",
    "cross_entropy",
    "embedding",
    "explain",
    "geglu",
    "gelu",
    "get_backend",
    "layer_norm",
    "linear_cross_entropy",
    "packed_attention",
    "patch",
    "rms_norm",
    "rotary",
    "set_backend",
    "softmax",
    "swiglu",
    "unpatch",
    "use_backend",
]
