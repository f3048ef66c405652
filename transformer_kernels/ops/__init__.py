"""The operations, each in a folder of its own: the promise in `__init__.py`, one file for each backend."""

from transformer_kernels._dispatch import OPERATIONS
from transformer_kernels.ops.add_layer_norm import add_layer_norm
from transformer_kernels.ops.add_rms_norm import add_rms_norm
from transformer_kernels.ops.attention import attention
from transformer_kernels.ops.attention_weights import attention_weights
from transformer_kernels.ops.bias_gelu import bias_gelu
from transformer_kernels.ops.bias_relu import bias_relu
from transformer_kernels.ops.cross_entropy import cross_entropy
from transformer_kernels.ops.embedding import embedding
from transformer_kernels.ops.geglu import geglu
from transformer_kernels.ops.gelu import gelu
from transformer_kernels.ops.layer_norm import layer_norm
from transformer_kernels.ops.linear import linear
from transformer_kernels.ops.linear_cross_entropy import linear_cross_entropy
from transformer_kernels.ops.packed_attention import packed_attention
from transformer_kernels.ops.rms_norm import rms_norm
from transformer_kernels.ops.rotary import rotary
from transformer_kernels.ops.softmax import softmax
from transformer_kernels.ops.swiglu import swiglu

__all__ = [
    "add_layer_norm",
    "add_rms_norm",
    "attention",
    "attention_weights",
    "bias_gelu",
    "bias_relu",
    "cross_entropy",
    "embedding",
    "geglu",
    "gelu",
    "layer_norm",
    "linear",
    "linear_cross_entropy",
    "packed_attention",
    "rms_norm",
    "rotary",
    "softmax",
    "swiglu",
]

WITH_KERNELS = tuple(name for name, operation in OPERATIONS.items() if operation.kernels == name)
"""The operations that backends have files for; the others are answered by those of another."""
