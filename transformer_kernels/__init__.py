"""Fused kernels for small transformers, from attention to the loss, selected by a backend flag.

import transformer_kernels as tk

y = tk.attention(q, k, v, causal=True)             # the fastest backend that supports the call
model = tk.compile(model)                          # any PyTorch program, recognised by what it computes
print(tk.patch(model))                             # a model of torch.nn or transformers, in place
model = tk.build("char_gpt", backend="triton")     # the same model definition as python_ref.build("char_gpt")

models      compile, patch, unpatch, accelerate, build, bind, graphed
pretrained  load_pretrained, export_pretrained
attention   attention, packed_attention, attention_weights, flex_attention, rotary
norm        layer_norm, rms_norm, add_layer_norm, add_rms_norm
activation  softmax, gelu, bias_gelu, bias_relu, swiglu, geglu
products    linear, embedding, cross_entropy, linear_cross_entropy
numbers     compare, certify, reproducible
backend     explain, use_backend, set_backend, get_backend, BACKENDS, BackendUnavailable, UnsupportedByBackend
modules     nn: the operations as modules with the state dicts of torch.nn

help(tk.attention) documents one of them.
"""

from transformer_kernels import _interruption

if _interruption.is_training():
    _interruption.end_on_signals()  # while the imports below load PyTorch, too

from transformer_kernels._bind import bind, build
from transformer_kernels._version import __version__
from transformer_kernels.backends import dispatch as _dispatch
from transformer_kernels.backends.dispatch import BACKENDS, explain, get_backend, set_backend, use_backend
from transformer_kernels.backends.errors import BackendUnavailable, UnsupportedByBackend
from transformer_kernels.graphs import graphed
from transformer_kernels.ops import *  # noqa: F403 - every operation; ops/__init__.py lists them
from transformer_kernels.ops import __all__ as _operations
from transformer_kernels.ops._reproducible import reproducible
from transformer_kernels.ops.attention.flex import flex_attention
from transformer_kernels.patching import accelerate, compile, patch, unpatch
from transformer_kernels.pretrained import export_pretrained, load_pretrained
from transformer_kernels.verification import trust as _trust
from transformer_kernels.verification.certificate import certify
from transformer_kernels.verification.compare import compare

__all__ = [
    "BACKENDS",
    "BackendUnavailable",
    "UnsupportedByBackend",
    "__version__",
    "accelerate",
    "bind",
    "build",
    "certify",
    "compare",
    "compile",
    "explain",
    "export_pretrained",
    "flex_attention",
    "get_backend",
    "graphed",
    "load_pretrained",
    "patch",
    "reproducible",
    "set_backend",
    "unpatch",
    "use_backend",
    *_operations,
]

_dispatch.distrusted = _trust.distrusted


def __dir__() -> list[str]:
    return [*__all__, "nn"]
