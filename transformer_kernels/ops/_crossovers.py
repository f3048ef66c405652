"""From which size on a kernel is faster than PyTorch's operator on a CPU, and the calls that "auto" leaves for it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn.functional import scaled_dot_product_attention

from transformer_kernels.backends.dispatch import requested
from transformer_kernels.ops._plan import dispatch_modes, is_jit_tracing

NEVER = 1 << 62
CROSSOVERS: dict[tuple[str, int], tuple[int, int]] = {
    ("attention", 4): (1 << 16, 1 << 17),
    ("attention", 2): (1 << 16, 1 << 10),
    ("add_layer_norm", 4): (1 << 18, 0),
    ("add_rms_norm", 4): (1 << 14, 0),
    ("cross_entropy", 4): (1 << 17, 1 << 16),
    ("cross_entropy", 2): (1 << 17, 1 << 16),
    ("embedding", 4): (NEVER, NEVER),
    ("embedding", 2): (NEVER, NEVER),
    ("gelu", 4): (NEVER, NEVER),
    ("gelu", 2): (NEVER, NEVER),
    ("gelu_tanh", 4): (1 << 15, 1 << 15),
    ("gelu_tanh", 2): (1 << 15, 1 << 15),
    ("layer_norm", 4): (1 << 19, 1 << 19),
    ("layer_norm", 2): (1 << 19, 1 << 18),
    ("linear", 4): (NEVER, 0),
    ("rms_norm", 4): (1 << 15, 1 << 15),
    ("rms_norm", 2): (1 << 15, 1 << 14),
    ("softmax", 4): (1 << 16, 1 << 19),
    ("softmax", 2): (1 << 18, NEVER),
}
"""For "auto" on a CPU: elements from which our kernel is no slower than PyTorch's, (forward alone, with gradients).

By the bytes of an element. Counted are the elements of the first tensor, of the result in an embedding, and the scores
in attention; with gradients `linear` has a rule of its own (`are_ours`). CPU time of interleaved calls on two cores, in
float32 and bfloat16, of a Xeon with AMX; add_layer_norm, add_rms_norm and linear on an EPYC with AVX2.
"""


def is_small(name: str, x: Tensor, elements: int, backend: str | None) -> bool:
    """Whether an operation of so many elements is inference on a CPU in which PyTorch's operators are faster."""
    if torch.is_grad_enabled() or elements >= CROSSOVERS.get((name, x.dtype.itemsize), (0, 0))[0]:
        return False
    return is_automatic(x, backend)


def is_automatic(x: Tensor, backend: str | None) -> bool:
    """Whether a call that reads x on a CPU is eager and in the backend "auto", so that the sizes above decide."""
    if not x.is_cpu or is_compiling() or dispatch_modes() or is_jit_tracing():
        return False
    return requested(backend) == "auto"


def small_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, *, causal: bool, scale: float | None, backend: str | None
) -> Tensor | None:
    """PyTorch's attention where it is the faster one and means the same; None for all other calls.

    Args:
        q: (B, H, Lq, D). k, v: (B, Hk, Lk, D), Hk divides H. bias: broadcasts to (B, H, Lq, Lk).
    """
    queries, keys = q.shape[2], k.shape[2]
    sees_all = queries == 1 or not causal
    if not sees_all and (queries != keys or bias is not None):
        return None
    if not is_small("attention", q, q.shape[:3].numel() * keys, backend):
        return None
    grouped = q.shape[1] != k.shape[1]
    return scaled_dot_product_attention(q, k, v, bias, is_causal=not sees_all, scale=scale, enable_gqa=grouped)
