"""DeepSeek-V3: latent attention, a mixture of experts, and the prediction of several tokens.

Shapes as in `layers`, and: R rotated columns of a head, C columns without position, V columns of a value head, N
experts of which each token uses K, M = B * L tokens.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed
import torch.nn.functional as F
from torch import Tensor, nn

from python_ref import ops as reference_ops
from python_ref.gpt import GPT, GPTConfig
from python_ref.layers import Attention, Block, FeedForward, Layer, Linear, PreNormBlock, RMSNorm

FIXED = {
    "positions": "rotary",
    "norm": "rms",
    "activation": "swiglu",
    "kv_heads": None,
    "qk_norm": False,
    "global_tokens": 0,
    "final_norm": True,
    "embedding_norm": False,
}
"""Fields of `TransformerConfig` that have one value in this model."""


@dataclass(frozen=True, kw_only=True)
class DeepseekConfig(GPTConfig):
    """`GPTConfig`, the latents, the experts and the further predictions.

    Args:
        latent: width of the vector from which all keys and values of a token are computed, and which is cached.
        query_latent: width of that vector for queries. None means that queries are projections of the input.
        content_width: C, columns of a query or key head that carry no position.
        rotary_width: R, columns of a query head that are rotated; all heads share one rotated key.
        value_dim: V, width of a value head.
        dense_layers: number of layers, from the first, with a feed-forward network of `ffn_width` and no experts.
        experts: N, routed experts per layer.
        experts_per_token: K, of which each token uses these.
        shared_experts: experts that each token uses, computed as one network of their joint width.
        expert_width: hidden width of an expert.
        expert_groups: the experts are in this many groups of equal size; divides `experts`.
        groups_per_token: a token's experts are in at most this many groups.
        expert_scale: factor of the routed experts' weighted mean.
        balance_rate: change of an expert's selection bias per training step; 0 disables it.
        predictions: further tokens that are predicted in training, each by one more block.
        prediction_weight: weight of their mean loss.

    Raises:
        ValueError: besides the cases of `TransformerConfig`, a field of `FIXED` has another value, or the experts do
            not divide into their groups, or there are too few for a token.
    """

    latent: int
    query_latent: int | None = None
    content_width: int
    rotary_width: int
    value_dim: int
    dense_layers: int = 1
    experts: int
    experts_per_token: int
    shared_experts: int = 1
    expert_width: int
    expert_groups: int = 1
    groups_per_token: int = 1
    expert_scale: float = 1.0
    balance_rate: float = 1e-3
    predictions: int = 1
    prediction_weight: float = 0.3
    positions: str = "rotary"
    norm: str = "rms"
    activation: str = "swiglu"
    rotary_interleaved: bool = True
    attention_bias: bool = False
    ffn_bias: bool = False
    tied: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, value in FIXED.items():
            if getattr(self, name) != value:
                raise ValueError(f"{self._name}: {name} must be {value!r}; got {getattr(self, name)!r}")
        sizes = ("latent", "content_width", "experts", "experts_per_token", "expert_width", "expert_groups")
        for name in (*sizes, "groups_per_token", *(["query_latent"] if self.query_latent is not None else [])):
            self._check_size(name, getattr(self, name))
        for name in ("dense_layers", "shared_experts", "predictions", "expert_scale", "balance_rate"):
            if getattr(self, name) < 0:
                raise ValueError(f"{self._name}: {name} must not be negative; got {getattr(self, name)}")
        if self.experts % self.expert_groups or self.groups_per_token > self.expert_groups:
            raise ValueError(
                f"{self._name}: expert_groups must divide experts, and groups_per_token be at most expert_groups; got "
                f"{self.experts} experts in {self.expert_groups} groups, {self.groups_per_token} per token"
            )
        if self.experts_per_token > self.experts // self.expert_groups * self.groups_per_token:
            raise ValueError(
                f"{self._name}: experts_per_token must be at most the experts of groups_per_token groups; got "
                f"{self.experts_per_token}"
            )

    @property
    def cache_shape(self) -> tuple[int, int, int]:
        return 1, self.latent, self.rotary_width

    def _check_rotary(self) -> None:
        if self.rotary_width % 2:
            raise ValueError(f"{self._name}: rotary_width must be even; got {self.rotary_width}")


class LatentAttention(Attention):
    """Multi-head latent attention with decoupled rotary positions.

    c = norm(x W_down) is one vector per token; keys and values are [k_C | v] = c W_up in each head, and the rotated key
    k_R = rotary(x W_R) is shared by all heads. Head h has the scores (q_C . k_C + q_R . k_R) / sqrt(C + R). The cache
    holds c and k_R: latent + R numbers per token instead of H (C + R + V).

    A single new token is not worth the expansion of all cached latents: W_up is absorbed by its query and its output,
    (q_C W_k) . c = q_C . (W_k c), and attention runs on one key head [c | k_R] with the value c.

    DeepSeek-AI, "DeepSeek-V2", 2024, equations 9-19 and appendix C.
    """

    def __init__(self, config: DeepseekConfig, ops: Any, layer: int = 0) -> None:
        Layer.__init__(self, ops, config.dropout_on("attention"))
        self.heads, self.across, self.window = config.heads, False, config.window_of(layer)
        self.content, self.rotated, self.value_dim = config.content_width, config.rotary_width, config.value_dim
        self.head_dim, self.latent = self.content + self.rotated, config.latent
        self.interleaved = config.rotary_interleaved
        inputs, bias = config.query_latent or config.width, config.attention_bias
        self.query_down = Linear(ops, config.width, inputs, bias) if config.query_latent else None
        self.query_norm = RMSNorm(config, ops, inputs) if config.query_latent else None
        self.query_up = Linear(ops, inputs, self.heads * self.head_dim, False)
        self.down = Linear(ops, config.width, self.latent + self.rotated, bias)
        self.latent_norm = RMSNorm(config, ops, self.latent)
        self.up = Linear(ops, self.latent, self.heads * (self.content + self.value_dim), False)
        self.out = Linear(ops, self.heads * self.value_dim, config.width, bias)

    def forward(  # type: ignore[override]
        self,
        x: Tensor,
        *,
        rotation: tuple[Tensor, Tensor],
        remember: Any = None,
        maps: list[Tensor] | None = None,
        **visible: Any,
    ) -> Tensor:
        """Attention of the tokens x (B, L, E) to themselves and to cached ones; arguments as in `Attention`."""
        visible |= {"window": self.window, "scale": self.head_dim**-0.5}
        inputs = x if self.query_down is None or self.query_norm is None else self.query_norm(self.query_down(x))
        q, q_rotated = self._heads_of(self.query_up(inputs), self.rotated)  # (B, H, L, C), (B, H, L, R)
        latent, k_rotated = self.down(x).unsqueeze(1).split([self.latent, self.rotated], -1)  # (B, 1, L, ...)
        latent = self.latent_norm(latent)
        q_rotated, k_rotated = self.ops.rotary(q_rotated, k_rotated, *rotation, interleaved=self.interleaved)
        if remember is not None:
            latent, k_rotated, visible["key_padding_mask"] = remember(latent, k_rotated)
        absorbed = remember is not None and x.shape[1] == 1
        if absorbed:
            up_keys, up_values = self.up.weight.unflatten(0, (self.heads, -1)).split([self.content, self.value_dim], 1)
            q, k, v = q @ up_keys, latent, latent  # (B, H, 1, latent), (B, 1, Lk, latent) twice
        else:
            k, v = self._heads_of(self.up(latent.squeeze(1)), self.value_dim)  # (B, H, Lk, C), (B, H, Lk, V)
        q = torch.cat((q, q_rotated), dim=-1)
        k = torch.cat((k, k_rotated.expand(-1, k.shape[1], -1, -1)), dim=-1)
        if maps is not None:
            maps.append(self.ops.attention_weights(q, k, **visible))
        mixed = self.ops.attention(q, k, v, dropout_p=self.dropout_p, **visible)
        if absorbed:
            mixed = mixed @ up_values.transpose(-2, -1)  # (B, H, 1, V)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def _heads_of(self, projected: Tensor, last: int) -> tuple[Tensor, Tensor]:
        """The first C and the `last` columns of each head, from (B, L, H * (C + last))."""
        heads = projected.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        first, second = heads.split([self.content, last], -1)
        return first, second


class MixtureOfExperts(Layer):
    """y = shared(x) + scale * sum_i w_i expert_i(x) over the K experts with the highest s_i + b_i.

    s = sigmoid(x W_router) and w_i = s_i / sum of the chosen s. The bias b affects the choice only. It balances the
    experts without a loss term: after a training step b_i rises by `balance_rate` if expert i had fewer tokens than the
    mean, and falls if it had more.

    DeepSeek-AI, "DeepSeek-V3", 2024, equations 12-16; Wang et al., "Auxiliary-loss-free load balancing strategy for
    mixture-of-experts", 2024, algorithm 1.
    """

    def __init__(self, config: DeepseekConfig, ops: Any) -> None:
        super().__init__(ops)
        self.config = config
        width, inner = config.width, config.expert_width
        self.router = nn.Parameter(torch.empty(config.experts, width))
        self.balance: Tensor
        self.register_buffer("balance", torch.zeros(config.experts))
        self.up = nn.Parameter(torch.empty(config.experts, 2 * inner, width))
        self.down = nn.Parameter(torch.empty(config.experts, width, inner))
        self.shared = FeedForward(config, ops, config.shared_experts * inner) if config.shared_experts else None

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)  # (M, E)
        weights, chosen = self.route(rows)  # (M, K)
        if chosen.numel() <= self.config.experts:  # too few pairs to group: each reads its expert's weights
            hidden = self.ops.swiglu((self.up[chosen] @ rows[:, None, :, None]).squeeze(-1))  # (M, K, F)
            outputs = (self.down[chosen] @ hidden.unsqueeze(-1)).squeeze(-1)  # (M, K, E)
        else:
            outputs = self._grouped(rows, chosen)
        mixed = (self.config.expert_scale * weights.to(x.dtype).unsqueeze(-1) * outputs).sum(dim=1).view_as(x)
        return mixed if self.shared is None else mixed + self.shared(x)

    def route(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The weights and the indices of each token's experts, both (M, K), from rows (M, E); at least in float32."""
        config, dtype = self.config, torch.promote_types(rows.dtype, torch.float32)
        scores = F.linear(rows.to(dtype), self.router.to(dtype)).sigmoid()  # (M, N)
        preferred = scores.detach() + self.balance
        if config.groups_per_token < config.expert_groups:
            groups = preferred.unflatten(-1, (config.expert_groups, -1))
            strength = groups.topk(min(2, groups.shape[-1]), dim=-1).values.sum(dim=-1)  # (M, groups)
            best = strength.topk(config.groups_per_token, dim=-1).indices
            hidden = torch.ones_like(strength, dtype=torch.bool).scatter(1, best, False)
            preferred = groups.masked_fill(hidden.unsqueeze(-1), -torch.inf).flatten(1)
        chosen = preferred.topk(config.experts_per_token, dim=-1, sorted=False).indices
        if self.training and config.balance_rate:
            self._rebalance(chosen)
        weights = scores.gather(1, chosen)
        return weights / weights.sum(dim=-1, keepdim=True), chosen

    def _grouped(self, rows: Tensor, chosen: Tensor) -> Tensor:
        """The outputs (M, K, E) of the chosen experts, each computed once for all of its tokens."""
        pairs = chosen.flatten()
        order = pairs.argsort(stable=True)
        counts = pairs.bincount(minlength=self.config.experts).tolist()
        tokens = rows[order // chosen.shape[1]].split(counts)  # one part per expert
        outputs = [
            self.ops.linear(self.ops.swiglu(self.ops.linear(part, up)), down)
            for part, up, down in zip(tokens, self.up.unbind(), self.down.unbind(), strict=True)
            if len(part)
        ]
        return torch.cat(outputs)[order.argsort()].unflatten(0, chosen.shape)

    @torch.no_grad()
    def _rebalance(self, chosen: Tensor) -> None:
        load = torch.zeros_like(self.balance).index_add_(0, chosen.flatten(), self.balance.new_ones(chosen.numel()))
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(load)
        self.balance += self.config.balance_rate * (load.mean() - load).sign()


class DeepseekBlock(PreNormBlock):
    """Latent attention, then experts, or in the first layers a dense feed-forward network."""

    def __init__(self, config: DeepseekConfig, ops: Any, layer: int) -> None:
        Layer.__init__(self, ops)
        self.attention_norm = RMSNorm(config, ops)
        self.attention = LatentAttention(config, ops, layer)
        self.cross_norm = self.cross_attention = None
        self.feed_forward_norm = RMSNorm(config, ops)
        kind: Any = FeedForward if layer < config.dense_layers else MixtureOfExperts
        self.feed_forward = kind(config, ops)


class Predictor(Layer):
    """One prediction further ahead: a block on [norm(embedding of token i + d), norm(hidden state i)] W.

    DeepSeek-AI, "DeepSeek-V3", 2024, equations 21-23.
    """

    def __init__(self, config: DeepseekConfig, ops: Any) -> None:
        super().__init__(ops)
        self.token_norm, self.hidden_norm = RMSNorm(config, ops), RMSNorm(config, ops)
        self.merge = Linear(ops, 2 * config.width, config.width, False)
        self.block = DeepseekBlock(config, ops, config.layers)
        self.final_norm = RMSNorm(config, ops)

    def forward(self, hidden: Tensor, embedded: Tensor, **attention: Any) -> Tensor:
        """The hidden states one token further ahead, from those before and the embeddings, all (B, L, E)."""
        x = self.merge(torch.cat((self.token_norm(embedded), self.hidden_norm(hidden)), dim=-1))
        stream, branch = self.block(x, **attention)
        return self.final_norm.add(branch, stream)[0]


class Deepseek(GPT):
    """A decoder-only language model with latent attention and experts; `forward` and its cache work as in `GPT`.

    In training mode `loss` adds the mean loss of the further predictions. Steps of more pairs of token and expert than
    there are experts have shapes that depend on the data, so they cannot be captured or compiled as one graph.

    DeepSeek-AI, "DeepSeek-V3 technical report", 2024, section 2. Its sequence-wise balance loss (equation 17), YaRN and
    FP8 are not implemented.
    """

    config: DeepseekConfig

    def __init__(self, config: DeepseekConfig, ops: Any = reference_ops) -> None:
        super().__init__(config, ops)
        self.predictors = nn.ModuleList(Predictor(config, ops) for _ in range(config.predictions))
        self.initialise()

    def make_block(self, layer: int) -> Block:
        return DeepseekBlock(self.config, self.ops, layer)

    def loss(self, tokens: Tensor, targets: Tensor, *, label_smoothing: float = 0.0) -> Tensor:
        """The mean cross-entropy of `forward(tokens)`; in training mode plus the losses of the further predictions.

        loss + prediction_weight / D * sum_d loss_d, where loss_d is the mean cross-entropy of the token d + 1 positions
        ahead (DeepSeek-V3, equations 24 and 25).

        Args:
            tokens: (B, L) int64.
            targets: (B, L) int64, the next tokens; -100 excludes a position.
            label_smoothing: as in `ops.cross_entropy`.
        """
        hidden = self.hidden_states(tokens)
        loss = self.loss_of(hidden, targets, label_smoothing)
        if not self.training:
            return loss
        share = self.config.prediction_weight / max(1, self.config.predictions)
        for ahead, further in enumerate(self.further(hidden, targets), 1):
            following = targets[:, ahead:].masked_fill(targets[:, ahead - 1 : -1] < 0, -100)
            loss = loss + share * self.loss_of(further, following, label_smoothing)
        return loss

    def further(self, hidden: Tensor, targets: Tensor) -> list[Tensor]:
        """The hidden states that predict the tokens after `targets`, one (B, L - d, E) for d = 1, 2, ... below L.

        Args:
            hidden: (B, L, E), from `hidden_states`.
            targets: (B, L) int64, the next tokens; negative ones are replaced by token 0.
        """
        results: list[Tensor] = []
        for ahead, predictor in zip(range(1, targets.shape[1]), self.predictors, strict=False):
            known = targets[:, ahead - 1 : -1].clamp(min=0)  # (B, L - d): the token d positions ahead of each
            rotation = self._rotation(known, None)
            hidden = predictor(hidden[:, :-1], self.embedding(known), rotation=rotation, causal=True)
            results.append(hidden)
        return results

    def head_weights_per_token(self, length: int) -> float:
        """The weights of the head and of a token's routed experts; the further predictions are not counted."""
        config = self.config
        active = 3 * config.experts_per_token * config.expert_width * config.width
        routers = config.experts * config.width
        return super().head_weights_per_token(length) + (active + routers) * max(0, config.layers - config.dense_layers)


# A character model with experts, for training on two CPU cores: each token uses as many columns of its experts, shared
# and routed, as the dense layer has. 1,741,376 parameters, of which a token uses 856,640;
# 538,288 more predict a second token in training.
DEEPSEEK = DeepseekConfig(
    vocab_size=65,
    context=64,
    width=128,
    layers=4,
    heads=4,
    latent=48,
    content_width=32,
    rotary_width=16,
    value_dim=32,
    ffn_width=384,
    experts=8,
    experts_per_token=2,
    expert_width=128,
    dropout=0.0,
)
