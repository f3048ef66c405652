"""Invalid arguments raise the same exception with the same text in every backend, before any launch."""

import math

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import transformer_kernels as tk
from tests.support.operations import EXAMPLES, function
from tests.support.parity import require

q = torch.randn(2, 4, 5, 8)
k = torch.randn(2, 2, 7, 8)
x = torch.randn(3, 6)
w = torch.ones(6)
sparse = torch.eye(6).to_sparse()
nested = torch.nested.nested_tensor([torch.ones(2, 6), torch.ones(3, 6)])
pair = TwoTensor(x, x)  # as a DTensor, it has no memory of its own
quantised = torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)
complex_x = torch.ones(3, 6, dtype=torch.complex64)
mask = torch.ones(2, 7, dtype=torch.bool)
t = torch.tensor([0, 5, -100])
head = torch.randn(9, 6)
tokens = torch.tensor([[0, 4, 1, 1], [2, 2, 2, 2]])
table = torch.randn(5, 6)
q4, k2 = torch.ones(2, 4, 5, 16), torch.ones(2, 2, 5, 16)  # of rotary
cos, sin = torch.ones(2, 5, 8)


def starts(*positions):
    return torch.tensor(positions, dtype=torch.int32)


TYPE_ERRORS = [
    (tk.gelu, (3,), {}, "gelu: x must be a tensor; got int"),
    (tk.gelu, (x.int(),), {}, "gelu: x must have one of the dtypes float32, float16, bfloat16, float64; got torch.int32"),
    (tk.gelu, (x > 0,), {}, "got torch.bool"),
    (tk.gelu, (complex_x,), {}, "got torch.complex64"),
    (tk.gelu, (sparse,), {}, "x must be a dense strided tensor; got layout torch.sparse_coo"),
    (tk.gelu, (nested,), {}, "x must be a dense strided tensor; got layout nested"),
    (tk.gelu, (quantised,), {}, "got torch.qint8"),
    (tk.gelu, (pair,), {}, "gelu: x must be a plain tensor; got TwoTensor: give the tensors that it is made of"),
    (tk.layer_norm, (x, TwoTensor(w, w)), {}, "layer_norm: weight must be a plain tensor; got TwoTensor"),
    (tk.linear_cross_entropy, (x, head, TwoTensor(t, t)), {}, "targets must be a plain tensor; got TwoTensor"),
    (tk.softmax, (x,), {"mask": TwoTensor(x > 0, x > 0)}, "softmax: mask must be a plain tensor; got TwoTensor"),
    (tk.bias_gelu, (x, None), {}, "bias_gelu: bias must be a tensor; got NoneType"),
    (tk.bias_relu, (x.long(), w), {}, "bias_relu: x must have one of the dtypes float32"),
    (tk.bias_relu, (x, 1.0), {}, "bias_relu: bias must be a tensor; got float"),
    (tk.embedding, ([[1]], table), {}, "embedding: tokens must be an int64 or int32 tensor; got list"),
    (tk.embedding, (tokens.float(), table), {}, "embedding: tokens must be int64 or int32; got torch.float32"),
    (tk.embedding, (tokens > 0, table), {}, "embedding: tokens must be int64 or int32; got torch.bool"),
    (tk.embedding, (tokens, tokens), {}, "embedding: weight must have one of the dtypes float32"),
    (tk.embedding, (tokens, table, table.half()), {}, "embedding: weight and positions must have one dtype; got torch.float32 and torch.float16"),
    (tk.embedding, (tokens, table, table), {"position_ids": 3}, "position_ids must be an int64 or int32 tensor; got int"),
    (tk.embedding, (tokens, table), {"scale": "2"}, "embedding: scale must be a number; got str"),
    (tk.softmax, (x,), {"mask": x}, "softmax: mask must be bool, True = keep; got torch.float32"),
    (tk.softmax, (x,), {"mask": (x > 0).int()}, "got torch.int32: use mask.bool()"),
    (tk.softmax, (x,), {"mask": [True]}, "mask must be a bool tensor; got list"),
    (tk.softmax, (x,), {"scale": "1"}, "softmax: scale must be a number; got str"),
    (tk.softmax, (x,), {"causal": 1}, "softmax: causal must be True or False; got int"),
    (tk.layer_norm, (x, w), {"eps": "small"}, "layer_norm: eps must be a number; got str"),
    (tk.layer_norm, (x, w), {"eps": True}, "layer_norm: eps must be a number; got bool"),
    (tk.add_layer_norm, (x, x.half(), w), {}, "x and residual must have one dtype; got torch.float32 and torch.float16"),
    (tk.add_layer_norm, (x, x, w), {"dropout_p": None}, "dropout_p must be a number; got NoneType"),
    (tk.attention, (q, k.half(), k), {}, "q, k and v must have one dtype; got torch.float32, torch.float16 and torch.float32"),
    (tk.attention, (q, k, k), {"key_padding_mask": mask.int()}, "key_padding_mask must be bool, True = keep; got torch.int32"),
    (tk.attention, (q, k, k), {"cu_seqlens": [0, 5]}, "attention: cu_seqlens must be an int32 tensor; got list"),
    (tk.attention, (q, k, k), {"cu_seqlens": torch.tensor([0, 5])}, "attention: cu_seqlens must be an int32 tensor; got torch.int64"),
    (tk.packed_attention, (q,), {"heads": 2.0}, "packed_attention: heads must be an int; got float"),
    (tk.attention, (q, k, k), {"window": 1.5}, "attention: window must be an int, a pair (left, right) or None; got float"),
    (tk.attention, (q, k, k), {"scale": 1j}, "attention: scale must be a number; got complex"),
    (tk.attention, (q, k, k), {"softcap": "50"}, "attention: softcap must be a number; got str"),
    (tk.attention, (q, k, k), {"return_lse": 1}, "attention: return_lse must be True or False; got int"),
    (tk.cross_entropy, (x.int(), t), {}, "cross_entropy: logits must have one of the dtypes float32, float16, bfloat16"),
    (tk.cross_entropy, (x, [0, 1, 2]), {}, "cross_entropy: targets must be an int64 or int32 tensor; got list"),
    (tk.cross_entropy, (x, t > 0), {}, "targets must be int64 or int32, one class for each row; got torch.bool"),
    (tk.cross_entropy, (x, t), {"weight": [1.0]}, "cross_entropy: weight must be a tensor; got list"),
    (tk.attention, (q, k, k), {"window": (1, 2.5)}, "attention: window must hold ints or None; got (1, 2.5)"),
    (tk.attention, (q, k, k), {"sinks": [1.0] * 4}, "attention: sinks must be a tensor; got list"),
    (tk.attention, (q, k, k), {"alibi_slopes": w.half()}, "alibi_slopes must be a float32 tensor; got torch.float16"),
    (tk.cross_entropy, (x, t), {"ignore_index": 1.0}, "cross_entropy: ignore_index must be an int; got float"),
    (tk.cross_entropy, (x, t), {"label_smoothing": "0"}, "cross_entropy: label_smoothing must be a number; got str"),
    (tk.linear_cross_entropy, (3, head, t), {}, "linear_cross_entropy: x must be a tensor; got int"),
    (tk.linear_cross_entropy, (x, None, t), {}, "linear_cross_entropy: weight must be a tensor; got NoneType"),
    (tk.linear_cross_entropy, (x, head, t, 1.0), {}, "linear_cross_entropy: bias must be a tensor; got float"),
    (tk.linear_cross_entropy, (x, head, x), {}, "targets must be int64 or int32, one class for each row"),
    (tk.linear_cross_entropy, (x, head, t), {"ignore_index": None}, "ignore_index must be an int; got NoneType"),
    (tk.rms_norm, ([1.0], w), {}, "rms_norm: x must be a tensor; got list"),
    (tk.rms_norm, (x.long(), w), {}, "rms_norm: x must have one of the dtypes float32"),
    (tk.add_rms_norm, (x, x.half(), w), {}, "add_rms_norm: x and residual must have one dtype; got"),
    *((op, (None,), {}, "gate must be a tensor; got NoneType") for op in (tk.swiglu, tk.geglu)),
    *((op, (x, x.half()), {}, "gate and up must have one dtype; got torch.float32") for op in (tk.swiglu, tk.geglu)),
    (tk.rotary, (q4, k2.half(), cos, sin), {}, "q and k must have one dtype; got torch.float32 and torch.float16"),
    (tk.rotary, (q4, k2, cos.double(), sin), {}, "rotary: cos must have the dtype of q"),
]  # fmt: skip

VALUE_ERRORS = [
    (tk.attention, (q[0], k, k), {}, "attention: q must have 4 dimensions (B, H, L, D); got (4, 5, 8)"),
    (tk.attention, (q, k[..., :4], k), {}, "attention: k must have the head dimension of q (8); got k (2, 2, 7, 4)"),
    (tk.attention, (q, k, k[:, :, :3]), {}, "attention: v must have the batch size, heads and length of k (2, 2, 7); got v (2, 2, 3, 8)"),
    (tk.attention, (q, k[:1], k[:1]), {}, "attention: k must have the batch size of q (2); got k (1, 2, 7, 8)"),
    (tk.attention, (q, torch.randn(2, 3, 7, 8), torch.randn(2, 3, 7, 8)), {}, "the heads of k (3) must divide the heads of q (4)"),
    (tk.attention, (q[..., :0], k[..., :0], k[..., :0]), {}, "the head dimension must be positive"),
    (tk.attention, (q, k, k), {"key_padding_mask": mask[:, :3]}, "key_padding_mask must have shape (B, Lk) (2, 7); got (2, 3)"),
    (tk.attention, (q, k, k), {"attn_bias": torch.ones(3, 7)}, "attn_bias must broadcast to (2, 4, 5, 7); got (3, 7)"),
    (tk.attention, (q, k, k), {"attn_bias": torch.ones(3, 7).bool()}, "attn_bias must broadcast to (2, 4, 5, 7); got (3, 7)"),
    (tk.attention, (q, k, k), {"attn_bias": torch.ones(1, 1, 1, 5, 7)}, "attn_bias must broadcast to (2, 4, 5, 7); got (1, 1, 1, 5, 7)"),
    (tk.attention, (q, k, k), {"attn_bias": torch.ones(5, 7).half()}, "attn_bias must have the dtype of q (torch.float32) or torch.float32; got torch.float16"),
    (tk.attention, (q, k, k), {"dropout_p": 1.5}, "attention: dropout_p must be in [0, 1]; got 1.5"),
    (tk.attention, (q, k, k), {"dropout_p": math.nan}, "attention: dropout_p must be in [0, 1]; got nan"),
    (tk.attention, (q, k, k), {"scale": math.inf}, "attention: scale must be finite; got inf"),
    (tk.attention, (q, q, q), {"cu_seqlens": starts(0, 5)}, "with cu_seqlens the batch must be 1 and q as long as k; got q (2, 4, 5, 8), k (2, 4, 5, 8)"),
    (tk.attention, (q[:1], k[:1], k[:1]), {"cu_seqlens": starts(0, 5)}, "the batch must be 1 and q as long as k; got q (1, 4, 5, 8), k (1, 2, 7, 8)"),
    (tk.attention, (q[:1], q[:1], q[:1]), {"cu_seqlens": starts(0, 5)[None]}, "cu_seqlens must have shape (sequences + 1,); got (1, 2)"),
    (tk.attention, (q[:1], q[:1], q[:1]), {"cu_seqlens": starts(1, 5)}, "cu_seqlens must rise from 0 to at most 5; got [1, 5]"),
    (tk.attention, (q[:1], q[:1], q[:1]), {"cu_seqlens": starts(0, 3, 2)}, "cu_seqlens must rise from 0 to at most 5; got [0, 3, 2]"),
    (tk.attention, (q[:1], q[:1], q[:1]), {"cu_seqlens": starts(0, 6)}, "cu_seqlens must rise from 0 to at most 5; got [0, 6]"),
    (tk.packed_attention, (q[0],), {"heads": 2}, "packed_attention: qkv must have 4 dimensions (B, L, heads + 2 * kv_heads, D); got (4, 5, 8)"),
    (tk.packed_attention, (q,), {"heads": 0}, "packed_attention: heads must be positive; got 0"),
    (tk.packed_attention, (q,), {"heads": 3, "cos": q[0, :, 0, :2]}, "packed_attention: cos and sin go together; got cos alone"),
    (tk.packed_attention, (q,), {"heads": 3, "cos": q[0, :, 0], "sin": q[0, :, 0]}, "packed_attention: cos must have shape (L, R / 2) or (B, L, R / 2) with B = 2, L = 4 and R at most 8; got (4, 8)"),
    (tk.packed_attention, (q,), {"heads": 2}, "packed_attention: qkv must hold 2 query heads and as many key as value heads, a divisor of 2; got 5 heads in all"),
    (tk.attention, (q, k, k), {"window": 0}, "attention: window must be positive; got 0"),
    (tk.softmax, (torch.tensor(1.0),), {}, "softmax: x must have at least one dimension; got shape ()"),
    (tk.softmax, (torch.ones(3),), {"causal": True}, "softmax: causal needs x of shape (..., Lq, Lk); got (3,)"),
    (tk.softmax, (x,), {"mask": torch.ones(5, dtype=torch.bool)}, "softmax: mask must broadcast to (3, 6); got (5,)"),
    (tk.softmax, (x,), {"scale": math.nan}, "softmax: scale must be finite; got nan"),
    (tk.layer_norm, (x, torch.ones(5)), {}, "layer_norm: weight must have shape (6,); got (5,)"),
    (tk.layer_norm, (x, w, torch.ones(1)), {}, "layer_norm: bias must have shape (6,); got (1,)"),
    (tk.layer_norm, (x, w.half()), {}, "weight must have the dtype of x (torch.float32) or torch.float32; got torch.float16"),
    (tk.layer_norm, (x, w), {"eps": 0.0}, "layer_norm: eps must be positive; got 0.0"),
    (tk.layer_norm, (x, w), {"eps": math.nan}, "layer_norm: eps must be positive; got nan"),
    (tk.add_layer_norm, (x, x[:2], w), {}, "add_layer_norm: residual must have the shape of x (3, 6); got (2, 6)"),
    (tk.add_layer_norm, (x, x, w), {"dropout_p": -0.1}, "add_layer_norm: dropout_p must be in [0, 1]; got -0.1"),
    (tk.gelu, (x,), {"approximate": "sigmoid"}, "gelu: approximate must be \"none\" or \"tanh\"; got 'sigmoid'"),
    (tk.bias_gelu, (x, torch.ones(3)), {}, "bias_gelu: bias must have shape (6,); got (3,)"),
    (tk.bias_relu, (x, torch.ones(1, 6)), {}, "bias_relu: bias must have shape (6,); got (1, 6)"),
    (tk.bias_relu, (x, w.half()), {}, "bias_relu: bias must have the dtype of x (torch.float32) or torch.float32; got torch.float16"),
    (tk.bias_relu, (torch.tensor(1.0), w), {}, "bias_relu: x must have at least one dimension; got shape ()"),
    (tk.cross_entropy, (torch.tensor(1.0), t), {}, "cross_entropy: logits must have at least one dimension; got shape ()"),
    (tk.cross_entropy, (x[:, :0], t), {}, "cross_entropy: logits must have at least one class; got shape (3, 0)"),
    (tk.cross_entropy, (x, t[:2]), {}, "cross_entropy: targets must have shape (3,), one for each row; got (2,)"),
    (tk.cross_entropy, (x, t), {"label_smoothing": 1.5}, "cross_entropy: label_smoothing must be in [0, 1]; got 1.5"),
    (tk.cross_entropy, (x, t), {"reduction": "max"}, "cross_entropy: reduction must be \"mean\", \"sum\" or \"none\"; got 'max'"),
    (tk.linear_cross_entropy, (x, head[:, :4], t), {}, "linear_cross_entropy: weight must have shape (V, 6); got (9, 4)"),
    (tk.linear_cross_entropy, (x, head[:0], t), {}, "linear_cross_entropy: weight must have shape (V, 6); got (0, 6)"),
    (tk.linear_cross_entropy, (x, head.half(), t), {}, "weight must have the dtype of x (torch.float32); got torch.float16"),
    (tk.linear_cross_entropy, (x, head, t, w), {}, "linear_cross_entropy: bias must have shape (9,); got (6,)"),
    (tk.linear_cross_entropy, (x, head, t[:2]), {}, "linear_cross_entropy: targets must have shape (3,), one for each row; got (2,)"),
    (tk.linear_cross_entropy, (x, head, t), {"label_smoothing": -1.0}, "label_smoothing must be in [0, 1]; got -1.0"),
    (tk.linear_cross_entropy, (x, head, t), {"reduction": "max"}, "linear_cross_entropy: reduction must be \"mean\", \"sum\" or \"none\"; got 'max'"),
    (tk.linear_cross_entropy, (x, head, t), {"class_weight": w}, "linear_cross_entropy: class_weight must have shape (9,); got (6,)"),
    (tk.linear_cross_entropy, (x, head, t), {"z_loss": math.nan}, "linear_cross_entropy: z_loss must be finite; got nan"),
    (tk.linear_cross_entropy, (x, head, t), {"softcap": 0.0}, "linear_cross_entropy: softcap must be positive; got 0.0"),
    (tk.cross_entropy, (x, x[:2]), {}, "targets that are probabilities must have the shape of logits (3, 6); got (2, 6)"),
    (tk.cross_entropy, (x, x.clone().requires_grad_()), {}, "cross_entropy: targets have no gradient"),
    (tk.cross_entropy, (x, t), {"ignore_index": 2**70}, "cross_entropy: ignore_index must fit into 64 bits; got"),
    (tk.cross_entropy, (x, x), {"ignore_index": 1}, "ignore_index is of targets that are classes"),
    (tk.cross_entropy, (x, t), {"weight": w[:5]}, "cross_entropy: weight must have shape (6,); got (5,)"),
    (tk.cross_entropy, (x, t), {"z_loss": -0.1}, "cross_entropy: z_loss must not be negative; got -0.1"),
    (tk.cross_entropy, (x, t), {"softcap": math.inf}, "cross_entropy: softcap must be finite; got inf"),
    (tk.attention, (q, k, k), {"softcap": 0.0}, "attention: softcap must be positive; got 0.0"),
    (tk.attention, (q, k, k), {"softcap": math.inf}, "attention: softcap must be finite; got inf"),
    (tk.attention, (q, k, k), {"window": (-1, 2)}, "window must not be negative, None is without limit; got (-1, 2)"),
    (tk.attention, (q, k, k), {"window": (1, 2, 3)}, "window must be an int or a pair (left, right); got (1, 2, 3)"),
    (tk.attention, (q, k, k), {"alibi_slopes": w[:3]}, "alibi_slopes must have shape (Hq,) (4,) or (B, Hq) (2, 4); got (3,)"),
    (tk.attention, (q, k, k), {"alibi_slopes": torch.ones(4, requires_grad=True)}, "alibi_slopes have no gradient"),
    (tk.attention, (q, k, k), {"sinks": w[:3]}, "attention: sinks must have shape (Hq,) (4,); got (3,)"),
    (tk.attention, (q, k, k), {"cu_seqlens_k": starts(0, 7)}, "cu_seqlens_k is given without cu_seqlens"),
    (tk.attention, (q[:1], k[:1], k[:1]), {"cu_seqlens": starts(0, 5), "cu_seqlens_k": starts(0, 2, 7)}, "must name as many sequences; got 1 and 2"),
    (tk.attention, (q[:1], k[:1], k[:1]), {"cu_seqlens": starts(0, 5), "cu_seqlens_k": starts(0, 8)}, "cu_seqlens_k must rise from 0 to at most 7; got [0, 8]"),
    (tk.embedding, (tokens[0], table), {}, "embedding: tokens must have shape (batch, length); got (4,)"),
    (tk.embedding, (tokens, w), {}, "embedding: weight must have shape (V, E); got (6,)"),
    (tk.embedding, (tokens, table, table[:, :5]), {}, "embedding: positions must have shape (P, 6); got (5, 5)"),
    (tk.embedding, (tokens, table, table[:3]), {}, "positions must have a row for each token of a sequence; got 3 rows for 4 tokens"),
    (tk.embedding, (tokens, table), {"position_ids": tokens}, "embedding: position_ids need positions; got None"),
    (tk.embedding, (tokens, table, table), {"position_ids": tokens[:1]}, "position_ids must have the shape of tokens (2, 4); got (1, 4)"),
    (tk.embedding, (tokens, table, None, torch.ones(5)), {}, "embedding: norm_weight must have shape (6,); got (5,)"),
    (tk.embedding, (tokens, table, None, w.half()), {}, "norm_weight must have the dtype of weight (torch.float32) or torch.float32; got torch.float16"),
    (tk.embedding, (tokens, table, None, None, w), {}, "embedding: norm_bias needs a norm_weight; got None"),
    (tk.embedding, (tokens, table), {"scale": math.nan}, "embedding: scale must be finite; got nan"),
    (tk.embedding, (tokens, table), {"eps": 0.0}, "embedding: eps must be positive; got 0.0"),
    (tk.embedding, (tokens, table), {"dropout_p": 2.0}, "embedding: dropout_p must be in [0, 1]; got 2.0"),
    (tk.rms_norm, (torch.tensor(1.0), w), {}, "rms_norm: x must have at least one dimension"),
    (tk.rms_norm, (x, w[:3]), {}, "rms_norm: weight must have shape (6,); got (3,)"),
    (tk.rms_norm, (x, w), {"eps": 0.0}, "rms_norm: eps must be positive; got 0.0"),
    (tk.add_rms_norm, (x, x[:2], w), {}, "add_rms_norm: residual must have the shape of x (3, 6); got (2, 6)"),
    (tk.add_rms_norm, (x, x, w), {"dropout_p": 1.5}, "add_rms_norm: dropout_p must be in [0, 1]; got 1.5"),
    *((op, (x[:, :5],), {}, "without up, the width of gate must be even; got (3, 5)") for op in (tk.swiglu, tk.geglu)),
    *((op, (x, x[:, :5]), {}, "up must have the shape of gate (3, 6); got (3, 5)") for op in (tk.swiglu, tk.geglu)),
    (tk.geglu, (x,), {"approximate": "erf"}, "geglu: approximate must be \"none\" or \"tanh\"; got 'erf'"),
    (tk.rotary, (q4[0], k2, cos, sin), {}, "rotary: q must have 4 dimensions (B, H, L, D); got (4, 5, 16)"),
    (tk.rotary, (q4, k2[:, :, :4], cos, sin), {}, "k must have the shape of q but for its heads"),
    (tk.rotary, (q4, k2, cos[:4], sin[:4]), {}, "rotary: cos must have shape (L, R / 2) or (B, L, R / 2) with B = 2, L = 5 and R at most 16; got (4, 8)"),
    (tk.rotary, (q4, k2, cos.repeat(1, 2), sin), {}, "R at most 16; got (5, 16)"),
    (tk.rotary, (q4, k2, cos[:, :0], sin[:, :0]), {}, "R at most 16; got (5, 0)"),
    (tk.rotary, (q4, k2, cos, sin[:, :4]), {}, "cos and sin must have one shape and dtype"),
    (tk.rotary, (q4, k2, cos.clone().requires_grad_(), sin), {}, "cos has no gradient; detach it"),
    (tk.linear, (x, head), {"activation": "silu"}, "linear: activation must be None, relu, gelu or gelu_tanh; got "),
    (tk.linear, (x, head), {"activation": 1}, "linear: activation must be None, relu, gelu or gelu_tanh; got "),
    (tk.linear, (x, head), {"activation": "none"}, "linear: activation must be None, relu, gelu or gelu_tanh; got "),
]  # fmt: skip


CASES = [*((TypeError, *case) for case in TYPE_ERRORS), *((ValueError, *case) for case in VALUE_ERRORS)]


@pytest.mark.parametrize("backend", tk.BACKENDS)
@pytest.mark.parametrize(
    ("error", "function", "arguments", "options", "text"), CASES, ids=lambda v: v if isinstance(v, str) else None
)
def test_errors(error, function, arguments, options, text, backend):
    with pytest.raises(error) as caught:
        function(*arguments, **options, backend=backend)
    assert text in str(caught.value) and str(caught.value).startswith(function.__name__)


@pytest.mark.parametrize(
    "call",
    [
        lambda: tk.attention(q, k, k.to("meta")),
        lambda: tk.layer_norm(x, w.to("meta")),
        lambda: tk.add_layer_norm(x, x.to("meta"), w),
        lambda: tk.rms_norm(x, w.to("meta")),
        lambda: tk.swiglu(x, x.to("meta")),
        lambda: tk.rotary(q4, k2, cos.to("meta"), sin),
        lambda: tk.bias_gelu(x, w.to("meta")),
        lambda: tk.bias_relu(x, w.to("meta")),
        lambda: tk.embedding(tokens, table, table.to("meta")),
        lambda: tk.softmax(x, mask=torch.ones(3, 6, dtype=torch.bool, device="meta")),
        lambda: tk.cross_entropy(x, t.to("meta")),
        lambda: tk.linear_cross_entropy(x, head.to("meta"), t),
    ],
)
def test_tensors_on_different_devices_are_listed(call):
    with pytest.raises(RuntimeError, match=r"all tensors must be on one device; got .* on cpu.* on meta"):
        call()


WRONG = {
    "list": torch.Tensor.tolist,
    "complex": lambda x: x.to(torch.complex64),
    "sparse": torch.Tensor.to_sparse,
    "subclass": lambda x: TwoTensor(x, x),
    "dtype": lambda x: x.long() if x.is_floating_point() else x.float(),
    "device": lambda x: x.to("meta"),
}


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("op", EXAMPLES)
def test_every_tensor_is_checked(op, kind):
    """One argument at a time is wrong; the error names the operation, and the argument unless its device is wrong."""
    tensors = EXAMPLES[op].make(4, 6)
    for name, tensor in tensors.items():
        if kind == "device" and len(tensors) == 1:
            continue
        expected = RuntimeError if kind == "device" else TypeError
        if kind == "dtype" and (op, name) == ("cross_entropy", "targets"):
            expected = ValueError  # probabilities of another shape
        text = "on meta" if kind == "device" else rf"\b{name}\b"
        named = "attention" if op == "attention_weights" else op
        with pytest.raises(expected, match=rf"^{named}: .*{text}"):
            function(op)(**{**tensors, name: WRONG[kind](tensor.detach())})


@pytest.mark.parametrize("backend", tk.BACKENDS)
@pytest.mark.parametrize("stray", [-1, 6, 2**40])
def test_a_target_outside_the_classes(stray, backend):
    targets = torch.tensor([0, stray, -100])
    text = rf"targets must be in \[0, 6\) or equal to ignore_index \(-100\); got {stray}"
    with pytest.raises(IndexError, match=f"^cross_entropy: {text}"):
        tk.cross_entropy(x, targets, backend=backend)
    with pytest.raises(IndexError, match=f"^linear_cross_entropy: {text}"):
        tk.linear_cross_entropy(x, head[:6], targets, backend=backend)


@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_a_head_dimension_above_the_maximum_names_who_takes_it(backend):
    require("attention", backend, q.device, q.dtype)
    wide = torch.randn(1, 1, 2, 257)
    message = rf"^attention: backend '{backend}' does not support .*257.*backend='torch'"
    with pytest.raises(tk.UnsupportedByBackend, match=message):
        tk.attention(wide, wide, wide, backend=backend)
    assert tk.attention(wide, wide, wide, backend="torch").shape == wide.shape


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: tk.attention(x, x, x, is_causal=True), r"attention: .*'is_causal'; write torch's .* as .*causal=True"),
        (lambda x: tk.attention(x, x, x, attn_mask=x), r"attention: .*'attn_mask'; write torch's .* as .*attn_bias=bias"),
        (lambda x: tk.softmax(x, -1), r"softmax: takes 1 positional .* as softmax\(x\), over the last axis"),
        (lambda x: tk.softmax(x, dim=1), r"softmax: .*'dim'"),
        (lambda x: tk.gelu(x, "tanh"), r"gelu: .* as gelu\(x, approximate='tanh'\)"),
        (lambda x: tk.layer_norm(x, (8,), x[0, 0, 0], x[0, 0, 0]), r"layer_norm: .* as layer_norm\(x, weight, bias, eps=eps\)"),
        (lambda x: tk.rms_norm(x, (8,), x[0, 0, 0]), r"rms_norm: .* as rms_norm\(x, weight, eps=eps\)"),
        (lambda x: tk.cross_entropy(x, x, x), r"cross_entropy: .* as cross_entropy\(logits, targets, weight=weight\)"),
        (lambda x: tk.embedding(x, x, padding_idx=0), r"embedding: .*'padding_idx'"),
    ],
    ids=["is_causal", "attn_mask", "axis", "dim", "approximate", "layer_norm", "rms_norm", "weight", "padding_idx"],
)  # fmt: skip
def test_pytorchs_spelling_is_answered_by_ours(call, message):
    with pytest.raises(TypeError, match=message):
        call(torch.randn(1, 2, 4, 8))
