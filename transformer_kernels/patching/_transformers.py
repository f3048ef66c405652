"""Replacements of modules of transformers by the path of their class, without importing transformers."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from transformer_kernels import ops
from transformer_kernels.ops._foreign import refused
from transformer_kernels.patching import _fused
from transformer_kernels.patching._fused import add_norm
from transformer_kernels.patching._products import by_columns
from transformer_kernels.patching._swap import Mixin, MovedDropout, is_plain, parameters, swap
from transformer_kernels.patching._torch_calls import is_autocast


class Activation(Mixin):
    """A GELU of transformers.activations."""

    operation = "gelu"
    small_below = "gelu module"

    def forward(self, x: Tensor) -> Tensor:
        approximate = _fused.GELU_CLASSES[_fused.class_path(self)]
        return ops.gelu(x, approximate=approximate, backend=self.backend)


class ExactActivation(Activation):
    small_below = "gelu rerouted"


class TanhActivation(Activation):
    small_below = "gelu_tanh rerouted"


class ResidualNorm(Mixin):
    """LayerNorm(dropout(dense(x)) + residual): the output of BERT's attention and feed-forward network."""

    operation = "add_layer_norm"
    small_below = "residual norm module"
    small_argument = 1

    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        branch = self.dense(hidden_states)
        return add_norm(branch, input_tensor, self.dropout, self.LayerNorm, self.backend)[0]


class DistilBertBlock(Mixin):
    """Attention and the feed-forward network, each fused with its residual addition and LayerNorm."""

    operation = "add_layer_norm"
    guards_itself = True  # the original code would not apply the moved dropout

    def _adopt(self) -> None:
        move(self.ffn, "dropout", self.backend)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        attended, _ = self.attention(hidden_states, attention_mask=attention_mask, **kwargs)
        fused = refused(type(self).__name__, self.backend, (attended, hidden_states)) is None
        hidden_states, _ = add_norm(attended, hidden_states, None, self.sa_layer_norm, self.backend, fused)
        moved = moved_dropout(self.ffn.dropout)
        return add_norm(self.ffn(hidden_states), hidden_states, moved, self.output_layer_norm, self.backend, fused)[0]


class GPT2Block(Mixin):
    """The residual addition after attention is fused with its dropout and the LayerNorm that reads the sum."""

    operation = "add_layer_norm"
    guards_itself = True  # the original code would not apply the moved dropout

    @staticmethod
    def refuses(module: Any) -> str | None:
        return "the block has cross-attention; its parts are patched" if hasattr(module, "crossattention") else None

    def _adopt(self) -> None:
        move(self.attn, "resid_dropout", self.backend)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        given = self.by_name(args, kwargs)
        hidden_states = given.pop("hidden_states")
        if given.pop("encoder_hidden_states", None) is not None:
            raise ValueError("GPT2Block: encoder_hidden_states need a model made with config.add_cross_attention=True")
        given.pop("encoder_attention_mask", None)
        attended, _ = self.attn(self.ln_1(hidden_states), **given)
        moved = moved_dropout(self.attn.resid_dropout)
        fused = refused(type(self).__name__, self.backend, (attended, hidden_states)) is None
        x, stream = add_norm(attended, hidden_states, moved, self.ln_2, self.backend, fused)
        return stream + self.mlp(x)


class Conv1D(Mixin):
    """x W + b with the weight as (K, N)."""

    operation = "linear"
    guards_itself = True

    def forward(self, x: Tensor) -> Tensor:
        return by_columns(x, *parameters(self), self.backend)


class LabelsOutside(Mixin):
    """A model that calls torch's cross-entropy inside its forward, replaced by this package's."""

    operation = "cross_entropy"

    def forward(self, *args: Any, labels: Tensor | None = None, **kwargs: Any) -> Any:
        if labels is None:
            return super().forward(*args, **kwargs)
        if not _is_mean(getattr(self, "mlm_loss_fct", None)):
            return super().forward(*args, labels=labels, **kwargs)
        given = self._given(labels, len(args), kwargs)
        out = super().forward(*args, **given)
        logits = out[0] if isinstance(out, tuple) else out.logits
        loss = ops.cross_entropy(logits.flatten(0, -2), labels.to(logits.device).flatten(), backend=self.backend)
        loss = loss if is_autocast(logits) else loss.to(logits.dtype)
        return (loss, *out) if isinstance(out, tuple) else type(out)(loss=loss, **out)

    def _given(self, labels: Tensor, positional: int, kwargs: dict[str, Any]) -> dict[str, Any]:
        return kwargs


def _is_mean(loss: Any) -> bool:
    """Whether a model's own loss module, if it has one (DistilBERT), is a plain cross-entropy without options."""
    if loss is None:
        return True
    plain = is_plain(loss, nn.CrossEntropyLoss) and loss.weight is None
    return plain and (loss.ignore_index, loss.reduction, loss.label_smoothing) == (-100, "mean", 0.0)


class LabelsShiftedIn(LabelsOutside):
    """T5 derives the decoder's tokens from the labels."""

    def _given(self, labels: Tensor, positional: int, kwargs: dict[str, Any]) -> dict[str, Any]:
        given = any(kwargs.get(name) is not None for name in ("decoder_input_ids", "decoder_inputs_embeds"))
        return kwargs if given or positional > 2 else {**kwargs, "decoder_input_ids": self._shift_right(labels)}


def causal_lm_loss(
    logits: Tensor,
    labels: Tensor | None,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    *,
    backend: str | None = None,
    **kwargs: Any,
) -> Tensor:
    """The loss of causal language models as transformers calls it: token l predicts label l + 1."""
    if shift_labels is None:
        assert labels is not None
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    return masked_lm_loss(logits, shift_labels, vocab_size, num_items_in_batch, ignore_index, backend=backend)


def masked_lm_loss(
    logits: Tensor,
    labels: Tensor,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    *,
    backend: str | None = None,
    **kwargs: Any,
) -> Tensor:
    """The loss of masked language models: the mean, or with num_items_in_batch the sum over that number."""
    rows, classes = logits.reshape(-1, vocab_size), labels.reshape(-1).to(logits.device)
    reduction = "mean" if num_items_in_batch is None else "sum"
    if refused("cross_entropy", backend, (rows, classes)) is not None:
        loss = F.cross_entropy(rows.float(), classes, ignore_index=ignore_index, reduction=reduction)
    else:
        loss = ops.cross_entropy(rows, classes, ignore_index=ignore_index, reduction=reduction, backend=backend)
    if num_items_in_batch is None:
        return loss
    return loss / (num_items_in_batch.to(loss.device) if isinstance(num_items_in_batch, Tensor) else num_items_in_batch)


LOSSES = {"ForCausalLM": causal_lm_loss, "ForMaskedLM": masked_lm_loss}


def move(owner: Any, name: str, backend: str | None) -> None:
    """Move a plain dropout to the enclosing block."""
    if is_plain(dropout := getattr(owner, name), nn.Dropout) and not isinstance(dropout, MovedDropout):
        swap(dropout, MovedDropout, backend)


def moved_dropout(dropout: nn.Module) -> nn.Module | None:
    """The dropout if the block has to apply it."""
    return dropout if isinstance(dropout, MovedDropout) else None


BERT, ROBERTA = "transformers.models.bert.modeling_bert.Bert", "transformers.models.roberta.modeling_roberta.Roberta"
DISTILBERT = "transformers.models.distilbert.modeling_distilbert."
GPT2 = "transformers.models.gpt2.modeling_gpt2.GPT2"
T5 = "transformers.models.t5.modeling_t5.T5"

REPLACEMENTS: dict[str, type] = {
    **dict.fromkeys(_fused.GELU_CLASSES, Activation),
    "transformers.activations.GELUActivation": ExactActivation,
    "transformers.activations.GELUTanh": TanhActivation,
    **{f"{family}{name}": ResidualNorm for family in (BERT, ROBERTA) for name in ("SelfOutput", "Output")},
    f"{DISTILBERT}TransformerBlock": DistilBertBlock,
    "transformers.pytorch_utils.Conv1D": Conv1D,
    f"{GPT2}Block": GPT2Block,
    f"{BERT}ForMaskedLM": LabelsOutside,
    f"{ROBERTA}ForMaskedLM": LabelsOutside,
    f"{DISTILBERT}DistilBertForMaskedLM": LabelsOutside,
    f"{T5}ForConditionalGeneration": LabelsShiftedIn,
}
