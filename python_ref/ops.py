"""The operations as defined in the literature: plain tensor algebra, gradients by autograd only.

Every kernel of `transformer_kernels` is tested against this file in float64. Each function is its formula; nothing is
fused, saved or skipped. Shapes: B batch, H heads, L length, D head width, M rows, N columns. Masks are True where a key
may be seen.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from python_ref.positions import RotaryScaling as RotaryScaling
from python_ref.positions import learned_positions as learned_positions
from python_ref.positions import rotary as rotary
from python_ref.positions import rotary_table as rotary_table
from python_ref.positions import sinusoidal_positions as sinusoidal_positions

SQRT_2_OVER_PI = math.sqrt(2.0 / math.pi)
TANH_CUBIC = 0.044715

PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
PHILOX_WEYL = (0x9E3779B9, 0xBB67AE85)
PHILOX_ROUNDS = 7
WORD = 0xFFFFFFFF

Window = int | tuple[int | None, int | None] | None
"""Window size on both sides of a query, or (left, right)."""


# Dropout: a pure function of (seed, element position)


def draw_seed(device: torch.device | str) -> Tensor:
    """One dropout seed, int64 (1,) in [0, 2^63), from torch's default generator of `device`."""
    return torch.randint(0, 2**63 - 1, (1,), device=device, dtype=torch.int64)


def philox4x32(seed: Tensor, counter: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-7: four words of 32 random bits for each 128-bit counter.

    Args:
        seed: int64 (1,), the 64-bit key.
        counter: four int64 tensors with 32-bit values that broadcast together.
    Returns:
        four int64 tensors with values in [0, 2^32).

    Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011, table 2: seven rounds are the
    minimum that passes every test of BigCrush.
    """
    c0, c1, c2, c3 = torch.broadcast_tensors(*counter)
    key0, key1 = seed & WORD, (seed >> 32) & WORD
    for _ in range(PHILOX_ROUNDS):
        product0 = c0 * PHILOX_MULTIPLIERS[0]  # 64 bits; the wrap into the sign is harmless: only bits are used
        product1 = c2 * PHILOX_MULTIPLIERS[1]
        high0, low0 = (product0 >> 32) & WORD, product0 & WORD
        high1, low1 = (product1 >> 32) & WORD, product1 & WORD
        c0, c1, c2, c3 = high1 ^ c1 ^ key0, low1, high0 ^ c3 ^ key1, low0
        key0, key1 = (key0 + PHILOX_WEYL[0]) & WORD, (key1 + PHILOX_WEYL[1]) & WORD
    return c0, c1, c2, c3


def dropout_keep(seed: Tensor, heads: int, rows: int, columns: int, p: float) -> Tensor:
    """Which elements dropout keeps, bool (heads, rows, columns), each True with probability 1 - p.

    The element (head, row, column) uses 16 bits of the counter (column // 8, row, head, 0): the lower half of word
    `column // 2 % 4` for even columns, the upper half for odd ones. It is kept if their value
    is at least round(p * 2^16).
    """
    group = torch.arange(math.ceil(columns / 8), device=seed.device).view(1, 1, -1)
    row = torch.arange(rows, device=seed.device).view(1, -1, 1)
    head = torch.arange(heads, device=seed.device).view(-1, 1, 1)
    four = philox4x32(seed, (group, row, head, torch.zeros_like(group)))
    halves = torch.stack([half for word in four for half in (word & 0xFFFF, word >> 16)], dim=-1)
    return halves.reshape(heads, rows, -1)[..., :columns] >= round(p * 2**16)


def _dropout(x: Tensor, keep: Tensor, p: float) -> Tensor:
    """Kept elements divided by the keep probability 1 - round(p * 2^16) / 2^16, so that the mean is preserved."""
    share = 1.0 - round(p * 2**16) / 2**16
    return torch.where(keep, x * (1.0 / share if share > 0.0 else 0.0), 0.0)


# Softmax


def _masked_softmax(scores: Tensor, visible: Tensor, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Probabilities and log-sum-exp over the visible entries of the last axis; 0 and -inf for a fully masked row.

    The exponential of a sink (H,) joins the sum of each row of scores (B, H, Lq, Lk) that is not fully masked.
    """
    scores = scores.masked_fill(~visible, -math.inf)
    highest = scores.detach().amax(dim=-1, keepdim=True)
    empty = highest == -math.inf
    if sinks is not None:
        logits = sinks.to(scores.dtype).view(-1, 1, 1)
        highest = torch.maximum(highest, logits.detach())
    highest = highest.masked_fill(empty, 0.0)
    exponentials = torch.exp(scores - highest)
    total = exponentials.sum(dim=-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp((logits - highest).masked_fill(empty, -math.inf))
    total = total.masked_fill(empty, 1.0)
    lse = (highest + total.log()).masked_fill(empty, -math.inf)
    return exponentials / total, lse.squeeze(-1)


def _causal(queries: int, keys: int, device: torch.device) -> Tensor:
    """Bool (queries, keys), bottom-right aligned: query i attends to the keys j <= i + keys - queries."""
    i = torch.arange(queries, device=device).view(-1, 1) + (keys - queries)
    return torch.arange(keys, device=device) <= i


def softmax(x: Tensor, *, mask: Tensor | None = None, causal: bool = False, scale: float = 1.0) -> Tensor:
    """softmax(scale * x) over the last axis: y_j = exp(scale x_j) / sum_k exp(scale x_k).

    Args:
        x: floating (..., N).
        mask: bool, broadcasts to x; entries that are False get weight 0.
        causal: x is (..., Lq, Lk) and query i attends to the keys j <= i + Lk - Lq.
        scale: multiplies x.
    Returns:
        the shape of x. A fully masked row gives 0; without a mask a row of -inf gives NaN, as in PyTorch.
    """
    scores = scale * x
    if mask is None and not causal:
        exponentials = torch.exp(scores - scores.detach().amax(dim=-1, keepdim=True)) if x.numel() else scores
        return exponentials / exponentials.sum(dim=-1, keepdim=True)
    visible = torch.ones((), dtype=torch.bool, device=x.device) if mask is None else mask
    if causal:
        visible = visible & _causal(x.shape[-2], x.shape[-1], x.device)
    return _masked_softmax(scores, visible.expand_as(scores))[0]


# Attention


def visible_keys(
    queries: int,
    keys: int,
    device: torch.device,
    *,
    causal: bool = False,
    key_padding_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    window: Window = None,
) -> Tensor:
    """Which keys are visible to each query, bool (B or 1, 1, queries, keys).

    With i' = i + keys - queries: causal keeps j <= i'. A window keeps i' - j < window and, if not causal, j - i' <
    window. A window (left, right) keeps i' - left <= j <= i' + right. The padding mask (B, keys) keeps real tokens.
    cu_seqlens keeps the keys of the query's own sequence.
    """
    distance = key_distances(queries, keys, device, cu_seqlens=cu_seqlens, cu_seqlens_k=cu_seqlens_k)
    visible = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    left, right = window if isinstance(window, tuple) else (None, None) if window is None else (window - 1, window - 1)
    if left is not None:
        visible = visible & (distance <= left)
    if right is not None:
        visible = visible & (-distance <= right)
    if cu_seqlens is not None:
        own = sequence_numbers(cu_seqlens, queries)[:, None]
        other = sequence_numbers(cu_seqlens if cu_seqlens_k is None else cu_seqlens_k, keys)
        visible = visible & (own == other) & (other >= 0)
    visible = visible.view(1, 1, queries, keys)
    if key_padding_mask is not None:
        visible = visible & key_padding_mask[:, None, None, :]
    return visible


def key_distances(
    queries: int,
    keys: int,
    device: torch.device,
    *,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
) -> Tensor:
    """The distance of each key before each query, int64 (queries, keys): i' - j with i' = i + keys - queries.

    Queries and keys with different packing are aligned at the end of each sequence: with cu_seqlens_k, token i of
    sequence s has i' = i + cu_seqlens_k[s + 1] - cu_seqlens[s + 1].
    """
    position = torch.arange(queries, device=device) + (keys - queries)
    if cu_seqlens is not None and cu_seqlens_k is not None:
        sequence = sequence_numbers(cu_seqlens, queries)
        ends = (cu_seqlens_k.long() - cu_seqlens.long())[sequence.clamp(min=0) + (len(cu_seqlens) > 1)]
        position = torch.arange(queries, device=device) + ends
    return position[:, None] - torch.arange(keys, device=device)


def sequence_numbers(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """The packed sequence index of each token, int64 (tokens,); -1 after the last sequence.

    Sequence s holds the tokens from cu_seqlens[s] up to, not including, cu_seqlens[s + 1].
    """
    position = torch.arange(tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    number = torch.searchsorted(cu_seqlens, position, right=True) - 1
    return number.masked_fill(position >= cu_seqlens[-1], -1)


def positions_in_sequence(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """The position of each token in its packed sequence, int64 (tokens,): 0, 1, ...; 0 after the last sequence."""
    number = sequence_numbers(cu_seqlens, tokens)
    position = torch.arange(tokens, device=cu_seqlens.device) - cu_seqlens.long()[number.clamp(min=0)]
    return position.masked_fill(number < 0, 0)


def alibi_bias(
    slopes: Tensor, queries: int, keys: int, *, cu_seqlens: Tensor | None = None, cu_seqlens_k: Tensor | None = None
) -> Tensor:
    """-slope * |i' - j| for each head, (B or 1, H, queries, keys): a penalty that grows with the distance.

    Args:
        slopes: floating (H,) or (B, H).
        cu_seqlens, cu_seqlens_k: see `key_distances`, which defines i'.

    Press, Smith, Lewis, "Train short, test long: attention with linear biases", 2022, section 3.
    """
    distance = key_distances(queries, keys, slopes.device, cu_seqlens=cu_seqlens, cu_seqlens_k=cu_seqlens_k)
    return -slopes.view(-1, slopes.shape[-1], 1, 1) * distance.abs()


def _scores(q: Tensor, k: Tensor, attn_bias: Tensor | None, scale: float | None, softcap: float | None) -> Tensor:
    """scale * q k^T, capped, plus the bias: (B, Hq, Lq, Lk); key heads are repeated for their group of query heads."""
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = scale * (q @ k.transpose(-2, -1))
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if attn_bias is not None and attn_bias.dtype is torch.bool:
        return scores.masked_fill(~attn_bias, -math.inf)
    return scores if attn_bias is None else scores + attn_bias


def _repeat_heads(x: Tensor, heads: int) -> Tensor:
    return x if x.shape[1] == heads else x.repeat_interleave(heads // max(x.shape[1], 1), dim=1)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    key_padding_mask: Tensor | None = None,
    attn_bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    window: Window = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Scaled dot-product attention: dropout(softmax(scale * q k^T + bias)) v over the keys visible to each query.

    Args:
        q: floating (B, Hq, Lq, D). k: (B, Hk, Lk, D), v: (B, Hk, Lk, Dv) where Hk divides Hq; Dv may differ from D.
        causal: query i attends to the keys j <= i + Lk - Lq.
        key_padding_mask: bool (B, Lk), True = a real token.
        attn_bias: added to the scores, or bool, True = visible; broadcasts to (B, Hq, Lq, Lk).
        alibi_slopes: (Hq,) or (B, Hq); -slope * |i + Lk - Lq - j| is added to the scores.
        cu_seqlens: int32 (S + 1,), offsets of S concatenated sequences (B = 1).
        cu_seqlens_k: the offsets of the keys, if they differ from the offsets of the queries.
        window: a query attends to the nearest `window` keys on each side (only before it, if causal), itself included;
            a pair (left, right) gives the numbers of keys before and after it, itself excluded; None means all.
        dropout_p: probability of dropping a weight.
        scale: multiplies q k^T; default 1 / sqrt(D).
        softcap: replaces the scores by softcap * tanh(scores / softcap), before bias and masks.
        sinks: (Hq,), a logit of each head that joins the denominator of the softmax and has no value.
        return_lse: also return log(sum(exp(scores))) over the visible keys and the sink, (B, Hq, Lq).
    Returns:
        (B, Hq, Lq, Dv); a query without visible keys gives 0, and -inf as its lse.

    Vaswani et al., "Attention Is All You Need", 2017, equation 1; Gemma Team, "Gemma 2", 2024, section 2 (softcap).
    """
    batch, heads, queries, _ = q.shape
    k, v = _repeat_heads(k, heads), _repeat_heads(v, heads)
    if key_padding_mask is not None:  # values behind the mask, NaN included, must not reach a product with 0
        padding = ~key_padding_mask[:, None, :, None]
        k, v = k.masked_fill(padding, 0.0), v.masked_fill(padding, 0.0)
    if cu_seqlens is not None:  # nor must values after the last sequence
        filler = (sequence_numbers(cu_seqlens if cu_seqlens_k is None else cu_seqlens_k, k.shape[2]) < 0)[:, None]
        k, v = k.masked_fill(filler, 0.0), v.masked_fill(filler, 0.0)
    visible = visible_keys(
        queries,
        k.shape[2],
        q.device,
        causal=causal,
        key_padding_mask=key_padding_mask,
        cu_seqlens=cu_seqlens,
        cu_seqlens_k=cu_seqlens_k,
        window=window,
    )
    if k.shape[2] == 0:
        out = (q * 0.0).sum(dim=-1, keepdim=True) + v.sum(dim=2, keepdim=True)  # zeros (B, Hq, Lq, Dv), with gradients
        lse = torch.full(q.shape[:3], -math.inf, dtype=q.dtype, device=q.device)
        return (out, lse) if return_lse else out
    scores = _scores(q, k, attn_bias, scale, softcap)
    if alibi_slopes is not None:
        packing = {"cu_seqlens": cu_seqlens, "cu_seqlens_k": cu_seqlens_k}
        scores = scores + alibi_bias(alibi_slopes, queries, k.shape[2], **packing)
    weights, lse = _masked_softmax(scores, visible.expand_as(scores), sinks)  # (B, Hq, Lq, Lk), (B, Hq, Lq)
    if dropout_p > 0.0:
        keep = dropout_keep(draw_seed(q.device), batch * heads, queries, k.shape[2], dropout_p)
        weights = _dropout(weights, keep.view_as(weights), dropout_p)
    out = weights.to(v.dtype) @ v
    return (out, lse.to(torch.promote_types(lse.dtype, torch.float32))) if return_lse else out


def packed_attention(
    qkv: Tensor,
    *,
    heads: int,
    causal: bool = False,
    key_padding_mask: Tensor | None = None,
    attn_bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    interleaved: bool = False,
    window: Window = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Self-attention from one packed projection to the input of the next.

    Args:
        qkv: floating (B, L, heads + 2 * kv_heads, D): query heads, then key heads, then value heads.
        heads: number of query heads.
        causal, key_padding_mask, attn_bias, alibi_slopes, cu_seqlens, window, dropout_p, scale, softcap, sinks: as
            in `attention`.
        cos, sin, interleaved: as in `rotary`; None: queries and keys are not rotated.
    Returns:
        (B, L, heads * D).
    """
    kv_heads = (qkv.shape[2] - heads) // 2
    q, k, v = (part.transpose(1, 2) for part in qkv.split([heads, kv_heads, kv_heads], dim=2))
    if cos is not None and sin is not None:
        q, k = rotary(q, k, cos, sin, interleaved=interleaved)
    out = attention(
        q,
        k,
        v,
        causal=causal,
        key_padding_mask=key_padding_mask,
        attn_bias=attn_bias,
        alibi_slopes=alibi_slopes,
        cu_seqlens=cu_seqlens,
        window=window,
        dropout_p=dropout_p,
        scale=scale,
        softcap=softcap,
        sinks=sinks,
    )
    assert isinstance(out, Tensor)  # no return_lse
    return out.transpose(1, 2).flatten(2)  # (B, H, L, D) -> (B, L, H * D)


def attention_weights(
    q: Tensor,
    k: Tensor,
    *,
    causal: bool = False,
    key_padding_mask: Tensor | None = None,
    attn_bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    window: Window = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The weights of the values in `attention`, before dropout, for visualisation.

    Args:
        q, k, causal, key_padding_mask, attn_bias, alibi_slopes, cu_seqlens, cu_seqlens_k, window, scale, softcap,
            sinks: as in `attention`.
    Returns:
        (B, Hq, Lq, Lk); a row sums to 1 (with its sink), or is 0 where the query has no visible key.
    """
    k = _repeat_heads(k, q.shape[1])
    if key_padding_mask is not None:
        k = k.masked_fill(~key_padding_mask[:, None, :, None], 0.0)
    visible = visible_keys(
        q.shape[2],
        k.shape[2],
        q.device,
        causal=causal,
        key_padding_mask=key_padding_mask,
        cu_seqlens=cu_seqlens,
        cu_seqlens_k=cu_seqlens_k,
        window=window,
    )
    if k.shape[2] == 0:
        return (q @ k.transpose(-2, -1)) * 0.0
    scores = _scores(q, k, attn_bias, scale, softcap)
    if alibi_slopes is not None:
        packing = {"cu_seqlens": cu_seqlens, "cu_seqlens_k": cu_seqlens_k}
        scores = scores + alibi_bias(alibi_slopes, q.shape[2], k.shape[2], **packing)
    return _masked_softmax(scores, visible.expand_as(scores), sinks)[0]


def additive_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    score_weight: Tensor,
    *,
    key_padding_mask: Tensor | None = None,
) -> Tensor:
    """Attention with a learned score, score(q, k) = w . tanh(W_q q + W_k k); q and k may differ in width.

    Args:
        q: (B, Lq, Dq). k: (B, Lk, Dk). v: (B, Lk, Dv).
        query_weight: (hidden, Dq). key_weight: (hidden, Dk). score_weight: (hidden,).
        key_padding_mask: bool (B, Lk), True = a real token.
    Returns:
        (B, Lq, Dv).

    Bahdanau, Cho, Bengio, "Neural machine translation by jointly learning to align and translate", 2015, A.1.2.
    """
    hidden = torch.tanh((q @ query_weight.T)[:, :, None, :] + (k @ key_weight.T)[:, None, :, :])
    mask = None if key_padding_mask is None else key_padding_mask[:, None, :]
    return softmax(hidden @ score_weight, mask=mask) @ v


def similarity_attention(q: Tensor, k: Tensor, v: Tensor, *, kernel: str = "gaussian", width: float = 1.0) -> Tensor:
    """Attention with a fixed similarity: sum_j K(|q - k_j| / width) v_j / sum_j K(|q - k_j| / width).

    Args:
        q: (..., Lq, D). k: (..., Lk, D). v: (..., Lk, Dv).
        kernel: "gaussian", K(u) = exp(-u^2 / 2), or "boxcar", K(u) = 1 where u < 1.
        width: the unit of distance.
    Returns:
        (..., Lq, Dv); a query with no key within the boxcar gives 0.

    Nadaraya, "On estimating regression", 1964; Watson, "Smooth regression analysis", 1964.
    """
    distance = (q[..., :, None, :] - k[..., None, :, :]).square().sum(dim=-1).sqrt() / width  # (..., Lq, Lk)
    if kernel == "gaussian":
        return softmax(-0.5 * distance.square()) @ v
    if kernel == "boxcar":
        return softmax(torch.zeros_like(distance), mask=distance < 1.0) @ v
    raise ValueError(f'similarity_attention: kernel must be "gaussian" or "boxcar"; got {kernel!r}')


def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, key_padding_mask: Tensor | None = None, chunk: int = 64
) -> Tensor:
    """Attention with the similarity phi(q) . phi(k), phi(x) = elu(x) + 1: linear in the length, not quadratic.

    out_i = phi(q_i)^T S / phi(q_i)^T z with S = sum_j phi(k_j) v_j^T and z = sum_j phi(k_j). When causal, the sums run
    over j <= i: S and z of all earlier chunks are accumulated, and weights are computed only within a chunk.

    Args:
        q: floating (B, H, Lq, D). k: (B, H, Lk, D). v: (B, H, Lk, Dv). Lq = Lk when causal.
        key_padding_mask: bool (B, Lk), True = a real token.
        chunk: tokens per chunk; it affects the order of summation only.
    Returns:
        (B, H, Lq, Dv); a query without visible keys gives 0.

    Katharopoulos et al., "Transformers are RNNs: fast autoregressive transformers with linear attention", 2020,
    equations 5, 7 and 9.
    """
    return _linear_attention(F.elu(q) + 1.0, F.elu(k) + 1.0, v, causal, key_padding_mask, chunk)


def _linear_attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, key_padding_mask: Tensor | None, chunk: int
) -> Tensor:
    """`linear_attention` of the features phi(q) and phi(k)."""
    if causal and q.shape[2] != k.shape[2]:
        raise ValueError(f"linear_attention: causal needs as many queries as keys; got {q.shape[2]} and {k.shape[2]}")
    if key_padding_mask is not None:
        padding = ~key_padding_mask[:, None, :, None]
        k, v = k.masked_fill(padding, 0.0), v.masked_fill(padding, 0.0)
    v = torch.cat((v, torch.ones_like(v[..., :1])), dim=-1)  # a last column of ones accumulates the sum of the weights
    if not causal:
        return _normalised(q @ (k.transpose(-2, -1) @ v))
    state = torch.zeros((*k.shape[:2], k.shape[3], v.shape[3]), dtype=v.dtype, device=v.device)  # (B, H, D, Dv + 1)
    outputs = []
    for q_chunk, k_chunk, v_chunk in zip(*(x.split(chunk, dim=2) for x in (q, k, v)), strict=True):
        within = (q_chunk @ k_chunk.transpose(-2, -1)).tril()  # (B, H, chunk, chunk)
        outputs.append(q_chunk @ state + within @ v_chunk)
        state = state + k_chunk.transpose(-2, -1) @ v_chunk
    return _normalised(torch.cat(outputs, dim=2))


def positive_random_features(x: Tensor, projection: Tensor) -> Tensor:
    """phi(x) = exp(w_m . x - |x|^2 / 2) / sqrt(features), whose products estimate exp(x . y) without bias.

    Args:
        x: floating (..., D), queries or keys, each already multiplied with D^(-1/4) for scaled dot products.
        projection: (features, D), rows w_m drawn from N(0, 1); see `orthogonal_projection`.
    Returns:
        (..., features), positive.

    Choromanski et al., "Rethinking attention with Performers", 2021, lemma 1.
    """
    exponent = x @ projection.T - 0.5 * x.square().sum(dim=-1, keepdim=True)
    return torch.exp(exponent) / math.sqrt(len(projection))


def orthogonal_projection(features: int, width: int, *, generator: torch.Generator | None = None) -> Tensor:
    """Random rows (features, width), float64: orthogonal within each block of `width`, with norms of normal vectors.

    Choromanski et al., "Rethinking attention with Performers", 2021, section 2.4.
    """
    blocks = -(-features // width)
    normal = torch.randn(2, blocks, width, width, dtype=torch.float64, generator=generator)
    columns, upper = torch.linalg.qr(normal[0])
    signs = upper.diagonal(dim1=-2, dim2=-1).sign()  # without LAPACK's choice of signs the rows are uniform
    directions = (columns * signs.unsqueeze(-2)).transpose(-2, -1)
    return (directions * normal[1].norm(dim=-1, keepdim=True)).flatten(0, 1)[:features]


def performer_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    projection: Tensor,
    *,
    causal: bool = False,
    key_padding_mask: Tensor | None = None,
    chunk: int = 64,
) -> Tensor:
    """Softmax attention estimated by random features: its cost is linear in the length, its error falls with features.

    Args:
        q, k, v, causal, key_padding_mask, chunk: as in `linear_attention`.
        projection: (features, D), from `orthogonal_projection`.
    Returns:
        (B, H, Lq, Dv); a query without visible keys gives 0.

    Choromanski et al., "Rethinking attention with Performers", 2021, equations 4 and 5.
    """
    q, k = (positive_random_features(x * x.shape[-1] ** -0.25, projection.to(x.dtype)) for x in (q, k))
    return _linear_attention(q, k, v, causal, key_padding_mask, chunk)


def _normalised(sums: Tensor) -> Tensor:
    """All columns but the last, divided by the last; 0 where that is 0."""
    out, total = sums[..., :-1], sums[..., -1:]
    return out / total.masked_fill(total == 0.0, 1.0)


# Normalisation


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, eps: float = 1e-5) -> Tensor:
    """y = (x - mean) / sqrt(var + eps) * weight + bias over the last axis, with the biased variance.

    Args:
        x: floating (..., N). weight, bias: (N,).
        eps: added to the variance.
    Returns:
        the shape of x.

    Ba, Kiros, Hinton, "Layer Normalization", 2016, equation 4.
    """
    centred = x - x.mean(dim=-1, keepdim=True)
    rstd = torch.rsqrt(centred.square().mean(dim=-1, keepdim=True) + eps)
    y = centred * rstd * weight
    return y if bias is None else y + bias


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """(layer_norm(s), s) with s = dropout(x) + residual: the boundary between two sublayers of a transformer.

    Args:
        x: floating (..., N), output of the sublayer. residual: the same shape, its input.
        weight, bias, eps: as in `layer_norm`.
        dropout_p: probability of dropping an element of x.
    Returns:
        two tensors of the shape of x.
    """
    total = _dropped_rows(x, dropout_p) + residual
    return layer_norm(total, weight, bias, eps=eps), total


def _dropped_rows(x: Tensor, p: float) -> Tensor:
    if p == 0.0:
        return x
    keep = dropout_keep(draw_seed(x.device), 1, x.numel() // max(x.shape[-1], 1), x.shape[-1], p)
    return _dropout(x, keep.view_as(x), p)


def add_dropped(x: Tensor, residual: Tensor, p: float) -> Tensor:
    """dropout(x) + residual, the sum in `add_layer_norm`."""
    return _dropped_rows(x, p) + residual


def rms_norm(x: Tensor, weight: Tensor, *, eps: float = 1e-5) -> Tensor:
    """y = x / sqrt(mean(x^2) + eps) * weight over the last axis: LayerNorm without centring and without bias.

    Args:
        x: floating (..., N). weight: (N,).
        eps: added to the mean of the squares.
    Returns:
        the shape of x.

    Zhang, Sennrich, "Root Mean Square Layer Normalization", 2019, equation 4.
    """
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, *, eps: float = 1e-5, dropout_p: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(rms_norm(s), s) with s = dropout(x) + residual; arguments as in `rms_norm` and `add_layer_norm`."""
    total = _dropped_rows(x, dropout_p) + residual
    return rms_norm(total, weight, eps=eps), total


# Activation


def gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    """x * Phi(x) with the normal distribution function Phi, or its tanh approximation.

    "none": x / 2 * (1 + erf(x / sqrt(2))). "tanh": x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))).

    Hendrycks, Gimpel, "Gaussian Error Linear Units", 2016, section 2.
    """
    if approximate == "none":
        return 0.5 * x * (1.0 + torch.erf(x / math.sqrt(2.0)))
    if approximate == "tanh":
        return 0.5 * x * (1.0 + torch.tanh(SQRT_2_OVER_PI * (x + TANH_CUBIC * x * x * x)))
    raise ValueError(f'gelu: approximate must be "none" or "tanh"; got {approximate!r}')


def bias_gelu(x: Tensor, bias: Tensor, *, approximate: str = "none") -> Tensor:
    """gelu(x + bias), x (..., N), bias (N,): the activation after the first linear layer of a feed-forward network."""
    return gelu(x + bias, approximate=approximate)


def bias_relu(x: Tensor, bias: Tensor) -> Tensor:
    """max(x + bias, 0), x (..., N), bias (N,), with gradient 0 at 0.

    Nair, Hinton, "Rectified linear units improve restricted Boltzmann machines", 2010, section 2.
    """
    return torch.relu(x + bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str | None = None) -> Tensor:
    """activation(x weight^T + bias): x (..., K), weight (N, K), bias (N,) -> (..., N).

    The activation is None, "relu", "gelu" (erf) or "gelu_tanh".
    """
    y = F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
    if activation is None:
        return y
    if activation == "relu":
        return torch.relu(y)
    if activation in ("gelu", "gelu_tanh"):
        return gelu(y, approximate="none" if activation == "gelu" else "tanh")
    raise ValueError(f"linear: activation must be None, relu, gelu or gelu_tanh; got {activation!r}")


def swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """SwiGLU: silu(gate) * up with silu(x) = x / (1 + exp(-x)).

    Args:
        gate: floating (..., N); without `up`, (..., 2 N): one packed projection, gate columns first.
        up: (..., N), the linear part.
    Returns:
        (..., N).

    Shazeer, "GLU variants improve transformer", 2020, equation 5.
    """
    gate, up = gate.chunk(2, dim=-1) if up is None else (gate, up)
    return gate * torch.sigmoid(gate) * up


def geglu(gate: Tensor, up: Tensor | None = None, *, approximate: str = "none") -> Tensor:
    """gelu(gate) * up; gate and up as in `swiglu`, approximate as in `gelu` (Shazeer 2020, equation 5)."""
    gate, up = gate.chunk(2, dim=-1) if up is None else (gate, up)
    return gelu(gate, approximate=approximate) * up


# Loss


def cross_entropy(
    logits: Tensor,
    targets: Tensor,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
) -> Tensor:
    """-sum_j w_j t_j log p_j with p = softmax(logits); for a class t, the weighted negative log-probability of t.

    Args:
        logits: floating (..., V), or (B, V, ...) as in torch; an error where the shape of the targets fits both.
        targets: int64 or int32 (...) or (B, ...), classes; or floating (M, V), class probabilities t.
        weight: (V,), w.
        ignore_index: rows with this class have loss 0 and are excluded from the mean.
        label_smoothing: eps; t is replaced by (1 - eps) t + eps / V.
        z_loss: adds z_loss * log(sum_j exp(logit_j))^2 to the loss of a row.
        softcap: logits are replaced by softcap * tanh(logits / softcap).
        reduction: "none", "sum", or "mean": the sum divided by the total weight of the classes that are not ignored
            (NaN if all are ignored), or by the number of rows for class probabilities.
    Returns:
        float32 (float64 for float64), a scalar, or (...) for "none".

    Szegedy et al., "Rethinking the Inception architecture for computer vision", 2016, section 7 (smoothing); Chowdhery
    et al., "PaLM", 2022, section 5 (z_loss); Gemma Team, "Gemma 2", 2024, section 2 (softcap).
    """
    if logits.dim() > 2 and (targets.is_floating_point() or targets.shape == (logits.shape[0], *logits.shape[2:])):
        if targets.is_floating_point() or targets.shape == logits.shape[:-1]:
            raise ValueError(
                f"cross_entropy: the classes of {tuple(logits.shape)} can be in axis 1 or the last; give rows"
            )
        logits = logits.movedim(1, -1)
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    highest = scores.detach().amax(dim=-1, keepdim=True)
    log_total = (scores - highest).exp().sum(dim=-1, keepdim=True).log()  # (..., 1)
    log_p = (scores - highest) - log_total  # (..., V)
    weights = scores.new_ones(scores.shape[-1]) if weight is None else weight.to(scores.dtype)
    if targets.is_floating_point():
        losses = -(weights * targets * log_p.masked_fill(targets == 0.0, 0.0)).sum(dim=-1)  # (...)
        ignored = torch.zeros_like(losses, dtype=torch.bool)
        counted = torch.ones_like(losses)
    else:
        ignored = targets == ignore_index
        classes = targets.masked_fill(ignored, 0).long()
        losses = -weights[classes] * log_p.gather(-1, classes.unsqueeze(-1)).squeeze(-1)  # (...)
        counted = weights[classes].masked_fill(ignored, 0.0)
    if label_smoothing > 0.0:
        losses = (1.0 - label_smoothing) * losses - label_smoothing * (weights * log_p).mean(dim=-1)
    if z_loss > 0.0:
        losses = losses + z_loss * (highest + log_total).squeeze(-1).square()
    losses = losses.masked_fill(ignored, 0.0)
    if reduction == "none":
        return losses
    if reduction not in ("mean", "sum"):
        raise ValueError(f'cross_entropy: reduction must be "mean", "sum" or "none"; got {reduction!r}')
    return losses.sum() if reduction == "sum" else losses.sum() / counted.sum()


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
) -> Tensor:
    """cross_entropy(x W^T + b, targets): a language model's head and its loss.

    Args:
        x: floating (..., E). weight: (V, E). bias: (V,). targets: (...), classes.
        class_weight: (V,), the `weight` of `cross_entropy`.
        ignore_index, label_smoothing, z_loss, softcap, reduction: as in `cross_entropy`.
    """
    return cross_entropy(
        x @ weight.T if bias is None else x @ weight.T + bias,
        targets,
        weight=class_weight,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        softcap=softcap,
        reduction=reduction,
    )


# Embedding


def check_ids(name: str, ids: Tensor, count: int) -> None:
    """Raise for ids outside an embedding of `count` rows; on the CPU only, because on a GPU this would synchronise."""
    if ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"embedding: {name} must be int64 or int32; got {ids.dtype}")
    readable = type(ids) is Tensor and ids.device.type == "cpu" and not torch.compiler.is_compiling()
    if readable and ids.numel():
        lowest, highest = (int(end) for end in ids.aminmax())
        if lowest < 0 or highest >= count:
            raise IndexError(f"embedding: {name} must be in [0, {count}); got ids from {lowest} to {highest}")


def embedding(
    tokens: Tensor,
    weight: Tensor,
    positions: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    *,
    position_ids: Tensor | None = None,
    scale: float = 1.0,
    eps: float = 1e-5,
    dropout_p: float = 0.0,
) -> Tensor:
    """dropout(layer_norm(scale * weight[token] + positions[position])): token and position embedding.

    Args:
        tokens: int64 or int32 (B, L), rows of `weight` (V, E).
        positions: (P, E); token l has position l, or position_ids[b, l] if those (B, L) are given.
        norm_weight, norm_bias, eps: as in `layer_norm`; without norm_weight no LayerNorm is applied.
        scale: multiplies the rows of `weight`.
        dropout_p: probability of dropping an element of the result.
    Returns:
        (B, L, E).

    Vaswani et al., "Attention Is All You Need", 2017, sections 3.4 and 5.4.
    """
    check_ids("tokens", tokens, weight.shape[0])
    x = scale * F.embedding(tokens, weight)  # (B, L) -> (B, L, E)
    if positions is not None and position_ids is not None:
        check_ids("position_ids", position_ids, positions.shape[0])
        x = x + F.embedding(position_ids, positions)
    elif positions is not None:
        x = x + positions[: tokens.shape[1]]
    if norm_weight is not None:
        x = layer_norm(x, norm_weight, norm_bias, eps=eps)
    return _dropped_rows(x, dropout_p)
