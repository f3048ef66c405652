"""Every operation in float64, written from its formula: the oracle of random calls. Gradients are autograd's.

It shares no code with python_ref or the package.

Poison behind a mask is replaced first: the oracle does not read what an operation must not read.
Weights are exp(s - max) / sum. A score with a bias below ABSORBING is the bias alone, as in float32.
"""

import math

import numpy
import torch

ABSORBING = -1e8


def kept(seed, heads, rows, columns, p):
    """The dropout mask, bool (heads, rows, columns), True where kept: Philox4x32-7 with the key `seed`.

    Element (h, r, c) uses bits 16 (c % 8) to 16 (c % 8) + 15 of counter (c // 8, r, h, 0), and is kept if they are at
    least round(2^16 p).
    """
    c = numpy.zeros((4, heads, rows, -(-columns // 8)), dtype=numpy.uint64)
    c[0] += numpy.arange(c.shape[3], dtype=c.dtype)
    c[1] += numpy.arange(rows, dtype=c.dtype)[:, None]
    c[2] += numpy.arange(heads, dtype=c.dtype)[:, None, None]
    low = numpy.uint64(2**32 - 1)
    key = [numpy.uint64(seed % 2**32), numpy.uint64(seed >> 32)]
    for _ in range(7):
        a, b = c[0] * numpy.uint64(0xD2511F53), c[2] * numpy.uint64(0xCD9E8D57)
        shift = numpy.uint64(32)
        c = numpy.stack([(b >> shift) ^ c[1] ^ key[0], b & low, (a >> shift) ^ c[3] ^ key[1], a & low])
        key = [(key[0] + numpy.uint64(0x9E3779B9)) & low, (key[1] + numpy.uint64(0xBB67AE85)) & low]
    bits = numpy.stack([(word >> numpy.uint64(s)) & numpy.uint64(0xFFFF) for word in c for s in (0, 16)], axis=-1)
    return torch.from_numpy(bits.reshape(heads, rows, -1)[..., :columns] >= round(p * 2**16))


def kept_rows(x, p):
    """`kept` for the rows (..., N) of x, with the next seed of an operation."""
    if p == 0.0:
        return None
    return kept(next_seed(), 1, x.numel() // x.shape[-1], x.shape[-1], p).view(x.shape)


def next_seed():
    return int(torch.randint(0, 2**63 - 1, (1,)))


def drop(x, keep, p):
    if keep is None:
        return x
    threshold = round(p * 2**16)
    return torch.where(keep, x, 0.0) * (2**16 / (2**16 - threshold) if threshold < 2**16 else 0.0)


def weights_and_lse(scores, visible, sinks=None):
    """Softmax over the visible scores and a sink of each head, and the log of its denominator; 0 and -inf if empty."""
    scores = torch.where(visible, scores, -math.inf)
    some = (scores != -math.inf).any(-1, keepdim=True)
    if sinks is not None:
        column = torch.where(some, sinks.view(-1, 1, 1), -math.inf)
        scores = torch.cat((scores, column), dim=-1)
    scores = torch.where(some, scores, 0.0)
    top = scores.detach().amax(-1, keepdim=True)
    exponentials = torch.exp(scores - top)
    total = exponentials.sum(-1, keepdim=True)
    weights = torch.where(some, exponentials / total, 0.0)[..., : visible.shape[-1]]
    return weights, torch.where(some, top + total.log(), -math.inf).squeeze(-1)


def visible_pairs(queries, keys, causal=False, window=None, key_padding_mask=None, cu_seqlens=None, cu_seqlens_k=None):
    """Visibility of key j for query i, bool (B, 1, Lq, Lk), and the distance i + Lk - Lq - j within its sequence."""
    starts = [0, queries] if cu_seqlens is None else cu_seqlens.tolist()
    starts_k = [0, keys] if cu_seqlens is None else starts if cu_seqlens_k is None else cu_seqlens_k.tolist()
    seen = torch.zeros(queries, keys, dtype=torch.bool)
    distance = torch.zeros(queries, keys, dtype=torch.int64)
    left, right = window if isinstance(window, tuple) else (None, None) if window is None else (window - 1, window - 1)
    for a, b, c, d in zip(starts, starts[1:], starts_k, starts_k[1:], strict=False):
        ahead = torch.arange(a, b)[:, None] - b - (torch.arange(c, d) - d)
        distance[a:b, c:d] = ahead
        nearer = torch.ones_like(ahead, dtype=torch.bool) if left is None else ahead <= left
        seen[a:b, c:d] = nearer & (ahead >= (0 if causal else -math.inf if right is None else -right))
    seen = seen[None, None]
    return (seen if key_padding_mask is None else seen & key_padding_mask[:, None, None]), distance


def unread_tokens(length, key_padding_mask, starts):
    """Keys that no query may read, bool (B, L): padding, and tokens after the last packed sequence."""
    unread = torch.zeros(1, length, dtype=torch.bool) if key_padding_mask is None else ~key_padding_mask
    return unread if starts is None else unread | (torch.arange(length) >= int(starts[-1]))


def attend(
    q, k, v, *, attn_bias=None, alibi_slopes=None, sinks=None, scale=None, softcap=None, dropout_p=0.0, **hidden
):
    """The weights before dropout, the output (the weights without v) and lse."""
    batch, heads, queries, width = q.shape
    keys, group = k.shape[2], heads // k.shape[1]
    starts = hidden.get("cu_seqlens")
    visible, distance = visible_pairs(queries, keys, **hidden)
    starts_k = hidden.get("cu_seqlens_k")
    unread = unread_tokens(keys, hidden.get("key_padding_mask"), starts if starts_k is None else starts_k)
    q = torch.where(unread_tokens(queries, None, starts)[:, None, :, None], 0.0, q)
    k = torch.where(unread[:, None, :, None], 0.0, k)
    scores = (q.reshape(batch, -1, group * queries, width) @ k.mT).view(batch, heads, queries, keys)
    scores = scores * (width**-0.5 if scale is None else scale)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if attn_bias is not None:
        scores = torch.where(attn_bias < ABSORBING, scores - scores.detach(), scores) + attn_bias
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.view(-1, heads, 1, 1) * distance.abs()
    weights, lse = weights_and_lse(scores, visible.expand_as(scores), sinks)
    if v is None:
        return weights, weights, lse
    v = torch.where(unread[:, None, :, None], 0.0, v)
    dropped = weights
    if dropout_p > 0.0:
        dropped = drop(weights, kept(next_seed(), batch * heads, queries, keys, dropout_p).view_as(weights), dropout_p)
    dropped = dropped.reshape(batch, -1, group * queries, keys)
    reached = (dropped != 0.0).double() @ v.isnan().double() > 0.0  # by NaN, unless the weight is 0
    out = torch.where(reached, math.nan, dropped @ torch.where(v.isnan(), 0.0, v))
    return weights, out.view(batch, heads, queries, -1), lse


def attention(q, k, v, *, return_lse=False, **options):
    _, out, lse = attend(q, k, v, **options)
    return (out, lse) if return_lse else out


def attention_weights(q, k, **options):
    return attend(q, k, None, **options)[0]


def packed_attention(qkv, *, heads, cos=None, sin=None, interleaved=False, **options):
    by_head = qkv.transpose(1, 2)
    kv_heads = (by_head.shape[1] - heads) // 2
    q, k, v = by_head[:, :heads], by_head[:, heads : heads + kv_heads], by_head[:, heads + kv_heads :]
    if cos is not None and sin is not None:
        q, k = rotary(q, k, cos, sin, interleaved=interleaved)
    return attend(q, k, v, **options)[1].transpose(1, 2).flatten(2)


def rotary(q, k, cos, sin, *, interleaved=False):
    """Complex numbers a + ib times cos + i sin."""
    pairs = cos.shape[-1]
    first = torch.arange(pairs) * (2 if interleaved else 1)
    second = first + (1 if interleaved else pairs)
    cos, sin = (x.view(-1, 1, *x.shape[-2:]) for x in (cos, sin))

    def rotated(x):
        a, b = x[..., first], x[..., second]
        return x.index_copy(-1, first, a * cos - b * sin).index_copy(-1, second, a * sin + b * cos)

    return rotated(q), rotated(k)


def softmax(x, *, mask=None, causal=False, scale=1.0):
    visible = torch.ones(x.shape, dtype=torch.bool) if mask is None else mask.expand(x.shape)
    if causal:
        visible = visible & visible_pairs(x.shape[-2], x.shape[-1], causal=True)[0][0, 0]
    return weights_and_lse(torch.where(visible, x, 0.0) * scale, visible)[0]


def add_layer_norm(x, residual, weight, bias=None, *, eps, dropout_p=0.0, centred=True):
    s = drop(x, kept_rows(x, dropout_p), dropout_p)
    s = s if residual is None else s + residual
    mean = s.sum(-1, keepdim=True) / s.shape[-1] if centred else 0.0
    variance = ((s - mean) * (s - mean)).sum(-1, keepdim=True) / s.shape[-1]
    y = (s - mean) / (variance + eps).sqrt() * weight
    return (y if bias is None else y + bias), s


def layer_norm(x, weight, bias=None, *, eps):
    return add_layer_norm(x, None, weight, bias, eps=eps)[0]


def rms_norm(x, weight, *, eps):
    return add_layer_norm(x, None, weight, eps=eps, centred=False)[0]


def add_rms_norm(x, residual, weight, **options):
    return add_layer_norm(x, residual, weight, centred=False, **options)


def gelu(x, *, approximate="none"):
    if approximate == "none":
        return x * (1.0 + torch.erf(x * 0.5**0.5)) / 2.0
    return x * (1.0 + torch.tanh((x + 0.044715 * x * x * x) * (2.0 / math.pi) ** 0.5)) / 2.0


def bias_gelu(x, bias, *, approximate="none"):
    return gelu(x + bias, approximate=approximate)


def bias_relu(x, bias):
    return torch.where(x + bias > 0.0, x + bias, 0.0)


def linear(x, weight, bias=None, *, activation=None):
    y = x @ weight.mT if bias is None else x @ weight.mT + bias
    if activation in (None, "relu"):
        return y if activation is None else torch.where(y > 0.0, y, 0.0)
    return gelu(y, approximate="none" if activation == "gelu" else "tanh")


def halves(gate, up):
    width = gate.shape[-1] // 2
    return (gate, up) if up is not None else (gate[..., :width], gate[..., width:])


def swiglu(gate, up=None):
    gate, up = halves(gate, up)
    return gate * torch.sigmoid(gate) * up


def geglu(gate, up=None, *, approximate="none"):
    gate, up = halves(gate, up)
    return gelu(gate, approximate=approximate) * up


def cross_entropy(logits, targets, *, weight=None, label_smoothing=0.0, z_loss=0.0, softcap=None, reduction="mean"):
    """Classes are the last axis; targets of -100 are ignored."""
    classes = logits.shape[-1]
    if targets.is_floating_point():
        real, shares = torch.ones(logits.shape[:-1], dtype=torch.bool), targets
    else:
        real = targets != -100
        shares = torch.nn.functional.one_hot(torch.where(real, targets, 0).long(), classes).double()
    logits = torch.where(real[..., None], logits, 0.0)
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    weight = torch.ones(classes, dtype=torch.float64) if weight is None else weight
    top = logits.detach().amax(-1, keepdim=True)
    log_total = torch.exp(logits - top).sum(-1, keepdim=True).log()
    aims = weight * ((1.0 - label_smoothing) * shares + label_smoothing / classes)
    terms = torch.where(aims == 0.0, 0.0, aims * (log_total - (logits - top)))
    losses = terms.sum(-1) + z_loss * (top + log_total).squeeze(-1) ** 2
    losses = torch.where(real, losses, 0.0)
    if reduction == "none":
        return losses
    counted = real.sum() if targets.is_floating_point() else (shares * weight).sum(-1)[real].sum()
    return losses.sum() / (counted if reduction == "mean" else 1.0)


def linear_cross_entropy(x, weight, targets, bias=None, *, class_weight=None, **options):
    return cross_entropy(linear(x, weight, bias), targets, weight=class_weight, **options)


def embedding(
    tokens,
    weight,
    positions=None,
    norm_weight=None,
    norm_bias=None,
    *,
    position_ids=None,
    scale=1.0,
    eps=1e-5,
    dropout_p=0.0,
):
    x = weight[tokens.long()] * scale
    if positions is not None:
        ids = torch.arange(tokens.shape[1]) if position_ids is None else position_ids.long()
        x = x + positions[ids]
    if norm_weight is not None:
        x = layer_norm(x, norm_weight, norm_bias, eps=eps)
    return drop(x, kept_rows(x, dropout_p), dropout_p)
