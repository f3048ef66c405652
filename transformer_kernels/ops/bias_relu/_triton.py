"""relu(x + bias) in Triton, on the kernels of `_triton_bias.py`."""

from torch import Tensor

from transformer_kernels._autograd import Grads, Wanted
from transformer_kernels.backends.triton_tiles import Tiles, column_blocks, persistent_blocks
from transformer_kernels.ops import _triton_bias
from transformer_kernels.ops.bias_relu import BiasReluCall

FORWARD = Tiles("bias_relu forward", column_blocks, widest=256, narrowest=64)
BACKWARD = Tiles("bias_relu backward", persistent_blocks, widest=256, narrowest=64)


def forward(call: BiasReluCall) -> Tensor:
    """y = relu(x + bias), the sum in fp32."""
    x, bias = call
    return _triton_bias.forward(x, bias, "relu", FORWARD)


def backward(call: BiasReluCall, y: Tensor, grads: Grads, wanted: Wanted) -> tuple[Tensor, Tensor]:
    """(dx, dbias) with dx = dy where y > 0, and dbias the sum of its rows."""
    (dy,), dbias_dtype = grads, call.bias.dtype
    return _triton_bias.backward(dy, y, None, dbias_dtype, "relu", BACKWARD)
