"""Parameters of the parity tests of every operation."""

import torch

from transformer_kernels.verification.examples import normal as normal

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def rows(*parameters, like_x=()):
    """Makes x (..., N), others of its shape, and parameters (N,), which may have a dtype of their own."""

    def make(dtype, device, *shape, parameters_in=None):
        shapes = {**dict.fromkeys(("x", *like_x), shape), **dict.fromkeys(parameters, shape[-1:])}
        dtypes = dict.fromkeys(parameters, parameters_in or dtype)
        return {
            name: normal(*shape, dtype=dtypes.get(name, dtype), device=device, seed=seed)
            for seed, (name, shape) in enumerate(shapes.items(), start=1)
        }

    return make


def dtype_id(value):
    """A test id: float32 instead of torch.float32."""
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else None


def transposed(x):
    first, second = (-3, -2) if x.dim() > 2 else (0, -1)
    return x.transpose(first, second).contiguous().transpose(first, second)


def _unread(x, *shape):
    """NaN, or integers that are no index, or True."""
    value = torch.nan if x.is_floating_point() else x.dtype is torch.bool or 1 << 30
    return torch.full(shape, value, dtype=x.dtype, device=x.device)


def sliced(x):
    wide = _unread(x, *x.shape[:-1], x.shape[-1] + 9)
    wide[..., 5 : x.shape[-1] + 5] = x
    return wide[..., 5 : x.shape[-1] + 5]


def expanded(x):
    return x[:1].expand_as(x)


def misaligned(x):
    storage = _unread(x, x.numel() + 1)
    storage[1:] = x.flatten()
    return storage[1:].view(x.shape)


def strided(x):
    gaps = x if x.is_floating_point() else _unread(x, *x.shape)  # oneDNN multiplies what is between bfloat16 by 0
    return torch.stack((x, gaps), dim=-1).flatten(-2)[..., ::2]


def odd_along(x, axis):
    """The same values, where the stride of this axis alone is odd; those before the last axis are multiples of 16."""
    strides = [1] * x.dim()
    for i in reversed(range(x.dim() - 1)):
        strides[i] = -(-x.shape[i + 1] * strides[i + 1] // 16) * 16 + (i == axis)
    view = _unread(x, x.shape[0] * strides[0] + 16).as_strided(x.shape, strides)
    view.copy_(x)
    return view


LAYOUTS = (transposed, sliced, misaligned, strided)
"""The same values with other strides or another storage offset, surrounded by NaN."""
