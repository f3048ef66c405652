"""Replacements of norms, gated MLPs, decoder layers and rotary attention, by the fingerprints of their forwards."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from transformer_kernels import ops
from transformer_kernels.patching._forms import fingerprint, forward_fingerprint, table_layout
from transformer_kernels.patching._fused import add_norm, gelu_kind
from transformer_kernels.patching._products import adopt_linear_layers
from transformer_kernels.patching._swap import (
    CHOICES,
    ByBackend,
    Mixin,
    class_path,
    is_plain,
    original_class,
    with_global,
)
from transformer_kernels.patching._torch_calls import default_eps

SILU_CLASSES = ("transformers.activations.SiLUActivation", "torch.nn.modules.activation.SiLU")
ROTATE = "apply_rotary_pos_emb"
"""The name of the function that rotates queries and keys in the modules of transformers."""


class RMSNorm(Mixin):
    """weight * normed(x).to(dtype): the result has the wider dtype of input and weight (Llama)."""

    operation = "rms_norm"
    small_below = "rms_norm module"

    def forward(self, hidden_states: Tensor) -> Tensor:
        return rms_norm_of(self, hidden_states, self.backend)


def rms_norm_of(module: Any, x: Tensor, backend: str | None) -> Tensor:
    """The result of an RMSNorm of transformers or torch.nn over the last axis of x."""
    weight, eps = module.weight, _eps(module)
    eps = default_eps(x.dtype) if eps is None else eps
    if weight is None:
        weight = x.new_ones(x.shape[-1])
    elif weight.dtype is not x.dtype:
        wide = torch.promote_types(x.dtype, weight.dtype)
        x, weight = x.to(wide), weight.to(wide)
    return ops.rms_norm(x, weight, eps=eps, backend=backend)


def _eps(norm: Any) -> Any:
    return norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps


class T5Norm(RMSNorm):
    """T5's norm: the result has 16 bits if the weight has."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        normed = RMSNorm.forward(self, hidden_states)
        return normed.to(self.weight.dtype) if self.weight.dtype in (torch.float16, torch.bfloat16) else normed


class RoundedRMSNorm(Mixin):
    """(weight * normed(x)).to(dtype), rounded once (OLMo 2, gpt-oss, Helium)."""

    operation = "rms_norm"

    def scale(self, x: Tensor) -> Tensor:
        """The factor of normalised rows of x."""
        return _weight_for(x, self.weight)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return ops.rms_norm(hidden_states, self.scale(hidden_states), eps=_eps(self), backend=self.backend)


class ShiftedRMSNorm(RoundedRMSNorm):
    """((1 + weight) * normed(x)).to(dtype) (Gemma)."""

    def scale(self, x: Tensor) -> Tensor:
        return _weight_for(x, 1.0 + self.weight.float())


class RoundedLayerNorm(Mixin):
    """(weight * normed(x)).to(dtype) of centred x, without a bias (Cohere)."""

    operation = "layer_norm"

    @staticmethod
    def refuses(module: Any) -> str | None:
        return "its weight has an axis of heads" if module.weight.dim() > 1 else None

    def forward(self, hidden_states: Tensor) -> Tensor:
        weight = _weight_for(hidden_states, self.weight)
        return ops.layer_norm(hidden_states, weight, eps=self.variance_epsilon, backend=self.backend)


def _weight_for(x: Tensor, weight: Tensor) -> Tensor:
    """The weight in a dtype that the norms support beside x."""
    return weight if weight.dtype in (x.dtype, torch.float32) and x.dtype is not torch.float64 else weight.to(x.dtype)


class DecoderLayer(Mixin):
    """The residual addition after attention is fused with the norm that reads the sum."""

    operation = "add_rms_norm"
    small_below = "rms_norm module"

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        given = self.by_name(args, kwargs)
        hidden_states = given.pop("hidden_states")
        parts: Any = self._modules  # reading them as attributes takes ten times as long
        attended, _ = parts["self_attn"](hidden_states=parts["input_layernorm"](hidden_states), **given)
        x, stream = self._added(attended, hidden_states, parts["post_attention_layernorm"])
        return stream + parts["mlp"](x)

    def _added(self, attended: Tensor, stream: Tensor, norm: Any) -> tuple[Tensor, Tensor]:
        """(norm(s), s) with s = stream + attended."""
        if is_plain(norm, nn.LayerNorm):
            return add_norm(attended, stream, None, norm, self.backend)
        scale = _scale_of(norm, attended) if attended.dtype is stream.dtype else None
        if scale is None:
            summed = stream + attended
            return norm(summed), summed
        return ops.add_rms_norm(attended, stream, scale, eps=_eps(norm), backend=self.backend)


def _scale_of(norm: Any, x: Tensor) -> Tensor | None:
    """The factor that a plain, patched RMSNorm applies to normalised rows of x, if its result has the dtype of x."""
    if not is_plain(norm, original_class(norm)):
        return None
    if isinstance(norm, RoundedRMSNorm):
        return norm.scale(x)
    same = isinstance(norm, RMSNorm) and not isinstance(norm, T5Norm) and norm.weight.dtype is x.dtype
    return norm.weight if same else None


def gate_of(activation: Any) -> Callable[..., Tensor] | None:
    """The gated operation of a plain SiLU or GELU, None for every other activation."""
    approximate = gelu_kind(activation)
    if approximate is not None:
        return functools.partial(ops.geglu, approximate=approximate)
    silu = class_path(activation) in SILU_CLASSES and is_plain(activation, original_class(activation))
    return ops.swiglu if silu else None


def has_plain_silu(module: Any) -> bool:
    """Whether the activation of a gated feed-forward network is a plain SiLU."""
    return gate_of(module.act_fn) is ops.swiglu


class GatedMLP(Mixin):
    """down(act(gate(x)) * up(x)) of a SiLU or GELU."""

    operation = "swiglu or geglu"
    small_below = "gated mlp module"

    def forward(self, x: Tensor) -> Tensor:
        gate = gate_of(self.act_fn)
        if gate is None:
            return super().forward(x)
        return self.down_proj(gate(self.gate_proj(x), self.up_proj(x), backend=self.backend))


class PackedGatedMLP(Mixin):
    """down(up * act(gate)) of a SiLU or GELU, gate and up from one projection (Phi-3, GLM)."""

    operation = "swiglu or geglu"
    small_below = "packed mlp module"

    def forward(self, hidden_states: Tensor) -> Tensor:
        gate = gate_of(self.activation_fn)
        if gate is None:
            return super().forward(hidden_states)
        return self.down_proj(gate(self.gate_up_proj(hidden_states), backend=self.backend))


class T5GatedMLP(Mixin):
    """wo(dropout(gelu(wi_0(x)) * wi_1(x)))."""

    operation = "geglu"
    small_below = "gated mlp module"

    def forward(self, hidden_states: Tensor) -> Tensor:
        gate = gate_of(self.act)
        if gate is None:
            return super().forward(hidden_states)
        gated = self.dropout(gate(self.wi_0(hidden_states), self.wi_1(hidden_states), backend=self.backend))
        stored = getattr(self.wo, "weight", None)
        if isinstance(stored, Tensor) and stored.dtype is not gated.dtype and stored.dtype is not torch.int8:
            gated = gated.to(stored.dtype)  # the output projection may be kept in float32
        return self.wo(gated)


class MLP(Mixin):
    """The MLP of timm, whose linear layers are patched."""

    operation = "linear"

    def _adopt(self) -> None:
        adopt_linear_layers(self)


class RotaryAttention(ByBackend):
    """The original forward, in which `rotary` replaces `apply_rotary_pos_emb`, and with it our attention function."""

    operation = "rotary, attention"
    small_below = "attention module"

    @staticmethod
    def content(original: Any) -> dict[str, Any]:
        """Further attributes of the patched class: a forward for each backend."""
        options = ROTATIONS[str(fingerprint(_rotation_of(original)))]
        rotations = {backend: functools.partial(_rotate, backend=backend, **options) for backend in CHOICES}
        return {"_by_backend": {backend: with_global(original.forward, ROTATE, f) for backend, f in rotations.items()}}


def _rotate(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    unsqueeze_dim: int = 1,
    *,
    interleaved: bool,
    table: str,
    backend: str | None,
) -> tuple[Tensor, Tensor]:
    """`apply_rotary_pos_emb` of transformers; its tables cos and sin have each angle twice."""
    if unsqueeze_dim == 2:  # (B, L, H, D)
        q, k = _rotate(
            q.transpose(1, 2), k.transpose(1, 2), cos, sin, interleaved=interleaved, table=table, backend=backend
        )
        return q.transpose(1, 2), k.transpose(1, 2)
    cos, sin = (_angles(tensor, q.shape[0], table) for tensor in (cos, sin))
    return ops.rotary(q, k, cos, sin, interleaved=interleaved, backend=backend)


def _angles(table: Tensor, batch: int, layout: str) -> Tensor:
    """cos or sin of the angle of each pair, (L, D / 2) or (B, L, D / 2)."""
    half = table[..., ::2] if layout == "pairs" else table[..., : table.shape[-1] // 2]
    return half[0] if half.shape[0] == 1 and batch != 1 else half


def _rotation_of(layer_class: Any) -> Any:
    """The function named ROTATE that an attention layer applies to queries and keys, or None."""
    forward = inspect.unwrap(layer_class.forward)
    named = isinstance(forward, types.FunctionType) and ROTATE in forward.__code__.co_names
    return forward.__globals__.get(ROTATE) if named else None


def rotates_by_tables(model: nn.Module, layer: nn.Module) -> bool:
    """Whether an attention layer has a known rotation, and all tables of the model have its layout."""
    known = ROTATIONS.get(str(fingerprint(_rotation_of(original_class(layer)))))
    if known is None:
        return False
    tables = {original_class(module) for module in model.modules() if original_class(module).__name__.endswith(TABLES)}
    return bool(tables) and all(table_layout(table) == known["table"] for table in tables)


TABLES = "RotaryEmbedding"
HALVES = {"interleaved": False, "table": "halves"}
ROTATIONS: dict[str, dict[str, Any]] = {
    "d4ce50baf172": HALVES,  # Llama
    "7b5c29545c35": HALVES,  # of a part of each head: GPT-NeoX
    "76d63e8908be": HALVES,  # the same: Phi-3
    "09c6ea26b7d9": HALVES,  # in float32: OLMo
    "1e6cc7c61d83": {"interleaved": True, "table": "halves"},  # GLM
    "ba9630769faa": {"interleaved": True, "table": "halves"},  # Helium
    "4a650ae7f284": {"interleaved": True, "table": "pairs"},  # Cohere
}
FORMS: dict[str, type] = {
    "f5db5a7d38f4": RMSNorm,  # Llama
    "f724a9a9255c": T5Norm,
    "e1cb58882ae9": RoundedRMSNorm,  # OLMo 2
    "5756a2eac5f6": RoundedRMSNorm,  # Helium
    "822cd4e345e9": ShiftedRMSNorm,  # Gemma
    "b3d3a460ead7": RoundedLayerNorm,  # Cohere
    "34fdc85cc10e": GatedMLP,  # Llama
    "70b2a0d02719": GatedMLP,  # Idefics
    "95bd1dc7ed8d": PackedGatedMLP,  # Phi-3
    "0c9b6c184b06": T5GatedMLP,
    "7abd61c6f9d2": MLP,  # timm
    "f4483cc6de91": DecoderLayer,  # Llama
}


@functools.cache
def replacement_of(kind: type) -> Any:
    """The replacement of a class of modules by the form of its forward; None for one that torch defines."""
    return None if kind.__module__.startswith("torch.") else FORMS.get(str(forward_fingerprint(kind)))


def replacement_for(module: nn.Module) -> Any:
    """The replacement of a module."""
    return replacement_of(original_class(module))
