"""Fused kernels for small transformers, from attention to the loss, selected by a backend flag.

import transformer_kernels as tk

y = tk.attention(q, k, v, causal=True)             # the fastest backend that supports the call
model = tk.build("char_gpt", backend="triton")     # the same model definition as python_ref.build("char_gpt")
print(tk.explain("attention", q, k, v, causal=True))
"""

from transformer_kernels._bind import bind, build
from transformer_kernels._version import __version__
from transformer_kernels.backends.dispatch import BACKENDS, explain, get_backend, set_backend, use_backend
from transformer_kernels.backends.errors import BackendUnavailable, UnsupportedByBackend
from transformer_kernels.graphs import graphed
from transformer_kernels.ops import *  # noqa: F403 - every operation; ops/__init__.py lists them
from transformer_kernels.ops import __all__ as _operations
from transformer_kernels.patching import accelerate, patch, unpatch
from transformer_kernels.pretrained import export_pretrained, load_pretrained

__all__ = [
    "BACKENDS",
    "BackendUnavailable",
    "UnsupportedByBackend",
    "__version__",
    "accelerate",
    "bind",
    "build",
    "explain",
    "export_pretrained",
    "get_backend",
    "graphed",
    "load_pretrained",
    "patch",
    "set_backend",
    "unpatch",
    "use_backend",
    *_operations,
]
