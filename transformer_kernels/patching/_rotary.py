"""What takes the place of the modules of Llama, Mistral, Qwen2 and Qwen3, and of T5's norms and gates."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from transformer_kernels import ops
from transformer_kernels.ops._crossovers import is_small
from transformer_kernels.patching._fused import class_path, gelu_kind
from transformer_kernels.patching._swap import Mixin, is_plain, original_class

SILU_CLASSES = ("transformers.activations.SiLUActivation", "torch.nn.modules.activation.SiLU")
FAMILIES = tuple(
    f"transformers.models.{folder}.modeling_{folder}.{family}"
    for folder, family in (("llama", "Llama"), ("mistral", "Mistral"), ("qwen2", "Qwen2"), ("qwen3", "Qwen3"))
)
RMS_NORMS = tuple(f"{family}RMSNorm" for family in FAMILIES)
T5 = "transformers.models.t5.modeling_t5.T5"


class RMSNorm(Mixin):
    """The RMSNorm of Llama and its relatives; the result has the wider dtype of input and weight."""

    answered = "rms_norm"

    def forward(self, hidden_states: Tensor) -> Tensor:
        return rms_norm_of(self, hidden_states, self.backend)


def rms_norm_of(module: Any, x: Tensor, backend: str | None) -> Tensor:
    """What an RMSNorm of transformers or torch.nn over the last axis makes of x."""
    wide = x.dtype if module.weight is None else torch.promote_types(x.dtype, module.weight.dtype)
    weight = x.new_ones(x.shape[-1]) if module.weight is None else module.weight.to(wide)
    eps = module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    return ops.rms_norm(x.to(wide), weight, eps=eps, backend=backend)


class T5Norm(RMSNorm):
    """T5's; a weight in 16 bits gives a result in 16 bits."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        normed = RMSNorm.forward(self, hidden_states)
        return normed.to(self.weight.dtype) if self.weight.dtype in (torch.float16, torch.bfloat16) else normed


class DecoderLayer(Mixin):
    """The residual addition after attention is fused with the RMSNorm that reads the sum."""

    answered = "add_rms_norm"

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        given = self.by_name(args, kwargs)
        hidden_states = given.pop("hidden_states")
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **given)
        norm = self.post_attention_layernorm
        fused = not is_small("add_rms_norm", attended, attended.numel(), self.backend) and class_path(norm) in RMS_NORMS
        fused = fused and is_plain(norm, original_class(norm))
        if fused and attended.dtype is hidden_states.dtype is norm.weight.dtype:
            eps = norm.variance_epsilon
            x, stream = ops.add_rms_norm(attended, hidden_states, norm.weight, eps=eps, backend=self.backend)
        else:
            stream = hidden_states + attended
            x = norm(stream)
        return stream + self.mlp(x)


def has_plain_silu(module: Any) -> bool:
    """Whether the activation of a gated feed-forward network is SiLU and nothing else."""
    return class_path(module.act_fn) in SILU_CLASSES and is_plain(module.act_fn, original_class(module.act_fn))


class GatedMLP(Mixin):
    """down(silu(gate(x)) * up(x))."""

    answered = "swiglu"

    def forward(self, x: Tensor) -> Tensor:
        if not has_plain_silu(self):
            return super().forward(x)
        return self.down_proj(ops.swiglu(self.gate_proj(x), self.up_proj(x), backend=self.backend))


class T5GatedMLP(Mixin):
    """wo(dropout(gelu(wi_0(x)) * wi_1(x)))."""

    answered = "geglu"

    def forward(self, hidden_states: Tensor) -> Tensor:
        approximate = gelu_kind(self.act)
        if approximate is None:
            return super().forward(hidden_states)
        gate, up = self.wi_0(hidden_states), self.wi_1(hidden_states)
        gated = self.dropout(ops.geglu(gate, up, approximate=approximate, backend=self.backend))
        stored = getattr(self.wo, "weight", None)
        if isinstance(stored, Tensor) and stored.dtype is not gated.dtype and stored.dtype is not torch.int8:
            gated = gated.to(stored.dtype)  # the output projection may be kept in float32
        return self.wo(gated)


class RotaryAttention(Mixin):
    """Projections, rotary positions and attention."""

    answered = "rotary, attention"

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        from transformers import Cache

        from transformer_kernels.huggingface import attention_forward

        given = self.by_name(args, kwargs)
        if given.get("read_index") is not None:  # a paged cache, which is updated in another way
            return super().forward(*args, **kwargs)
        caches = [name for name, value in given.items() if isinstance(value, Cache)]  # its name depends on the release
        cache = given.pop(caches[0]) if caches else None
        hidden_states, position_embeddings = given.pop("hidden_states"), given.pop("position_embeddings")
        attention_mask = given.pop("attention_mask", None)
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q, k = self.q_proj(hidden_states).view(shape), self.k_proj(hidden_states).view(shape)
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)
        v = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        cos, sin = (_angles(table, shape[0]) for table in position_embeddings)
        q, k = ops.rotary(q.transpose(1, 2), k.transpose(1, 2), cos, sin, backend=self.backend)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        window = getattr(self if hasattr(self, "sliding_window") else self.config, "sliding_window", None)
        out, weights = attention_forward(
            self,
            q,
            k,
            v,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            sliding_window=window,
            **given,
        )
        return self.o_proj(out.flatten(2)), weights


def _angles(table: Tensor, batch: int) -> Tensor:
    """cos or sin of the angle of each pair, (L, D / 2) or (B, L, D / 2); transformers has them twice over."""
    half = table[..., : table.shape[-1] // 2]
    return half[0] if half.shape[0] == 1 and batch != 1 else half


ATTENTION = {f"{family}Attention": RotaryAttention for family in FAMILIES}
REPLACEMENTS: dict[str, type] = {
    **dict.fromkeys(RMS_NORMS, RMSNorm),
    **{f"{family}DecoderLayer": DecoderLayer for family in FAMILIES},
    **{f"{family}MLP": GatedMLP for family in FAMILIES},
    f"{T5}LayerNorm": T5Norm,
    f"{T5}DenseGatedActDense": T5GatedMLP,
}
