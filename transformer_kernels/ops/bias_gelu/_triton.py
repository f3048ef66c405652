"""gelu(x + bias) in Triton, on the kernels of `_triton_bias.py`."""

from torch import Tensor

from transformer_kernels._autograd import Grads, Wanted
from transformer_kernels.backends.triton_tiles import Tiles, column_blocks, persistent_blocks
from transformer_kernels.ops import _triton_bias
from transformer_kernels.ops.bias_gelu import BiasGeluCall

FORWARD = Tiles("bias_gelu forward", column_blocks, widest=256, narrowest=64)
BACKWARD = Tiles("bias_gelu backward", persistent_blocks, widest=256, narrowest=64)

ACTIVATIONS = {"none": "gelu", "tanh": "gelu_tanh"}


def forward(call: BiasGeluCall) -> Tensor:
    """y = gelu(x + bias), the sum in fp32."""
    return _triton_bias.forward(call.x, call.bias, ACTIVATIONS[call.approximate], FORWARD)


def backward(call: BiasGeluCall, result: None, grads: Grads, wanted: Wanted) -> tuple[Tensor, Tensor]:
    """(dx, dbias) with dx = dy * gelu'(x + bias) and dbias the sum of its unrounded rows."""
    x, bias, approximate = call
    return _triton_bias.backward(grads[0], x, bias, bias.dtype, ACTIVATIONS[approximate], BACKWARD)
