"""The operations, in families: a folder has the public functions in `__init__.py` and one file for each backend.

| family | public functions |
| --- | --- |
| activation | gelu, bias_gelu, bias_relu, swiglu, geglu |
| attention | attention, packed_attention, attention_weights |
| embedding | embedding |
| linear | linear |
| loss | cross_entropy, linear_cross_entropy |
| norm | layer_norm, rms_norm, add_layer_norm, add_rms_norm |
| rotary | rotary |
| softmax | softmax |
"""

from transformer_kernels.ops.activation import bias_gelu, bias_relu, geglu, gelu, swiglu
from transformer_kernels.ops.attention import attention
from transformer_kernels.ops.attention.packed import packed_attention
from transformer_kernels.ops.attention.weights import attention_weights
from transformer_kernels.ops.embedding import embedding
from transformer_kernels.ops.linear import linear
from transformer_kernels.ops.loss import cross_entropy, linear_cross_entropy
from transformer_kernels.ops.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from transformer_kernels.ops.rotary import rotary
from transformer_kernels.ops.softmax import softmax

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
