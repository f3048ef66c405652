"""Encoders that leave out padding at their entry and return zeros for it (`patch(model, unpad=True)`).

Between these the code of the padded model runs on one row of packed sequences, as transformers' own padding-free code
makes it. Attention receives the bounds of the sequences; nothing else in these encoders mixes tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from transformer_kernels.patching._real_tokens import RealTokens, zeroed
from transformer_kernels.patching._report import Row
from transformer_kernels.patching._swap import Mixin, class_path, original_class, replaced_method, restore, swap
from transformer_kernels.patching._torch import TransformerEncoder

OF_TOKENS = ("input_ids", "inputs_embeds", "token_type_ids", "position_ids")
"""Arguments of a model with a value for each token."""

HARMLESS = ("return_dict", "num_items_in_batch")
"""Arguments that may be given beside them and the mask."""


class UnpaddedModel(Mixin):
    """An encoder of transformers that maps tokens to hidden states."""

    operation = "without padding"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = self.by_name(args, kwargs)
        if not self._zeroes_padding(given):
            return super().forward(*args, **kwargs)
        real = given["attention_mask"] != 0
        tokens = RealTokens.of(real, self.config.hidden_size)
        if tokens is None:
            out = super().forward(*args, **kwargs)
            out.last_hidden_state = zeroed(out.last_hidden_state, real)
            return out
        given |= {"position_ids": self._positions(given), "attention_mask": None}
        given |= {name: tokens.packed(given[name]) for name in OF_TOKENS if given.get(name) is not None}
        bounds = dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), tokens.bounds)
        out = super().forward(**given, **bounds, max_length_q=tokens.longest, max_length_k=tokens.longest)
        out.last_hidden_state = tokens.padded(out.last_hidden_state)
        if getattr(out, "pooler_output", None) is not None:
            out.pooler_output = self.pooler(out.last_hidden_state)
        return out

    def _zeroes_padding(self, given: dict[str, Any]) -> bool:
        """Whether the arguments are a mask of tokens and values for them, and no other results are requested."""
        mask = given.get("attention_mask")
        if not isinstance(mask, Tensor) or mask.dim() != 2:
            return False
        for name, value in given.items():
            if name in OF_TOKENS:
                if value is not None and (value.shape[:2] != mask.shape or value.device != mask.device):
                    return False
            elif name not in HARMLESS and value is not mask and value is not None and value is not False:
                return False
        if any(getattr(self.config, name, None) for name in ("output_hidden_states", "output_attentions")):
            return False
        return bool(given.get("return_dict", getattr(self.config, "return_dict", True)))

    def _positions(self, given: dict[str, Any]) -> Tensor:
        """The positions (B, L) that the padded model gives to its tokens."""
        positions, tokens = given.get("position_ids"), given.get("input_ids")
        if positions is not None:
            return positions
        embeddings = self.embeddings
        mask = given["attention_mask"]
        if not hasattr(embeddings, "create_position_ids_from_input_ids"):
            return torch.arange(mask.shape[1], device=mask.device).expand(mask.shape)
        if tokens is None:
            return embeddings.create_position_ids_from_inputs_embeds(given["inputs_embeds"], embeddings.padding_idx)
        return embeddings.create_position_ids_from_input_ids(tokens, embeddings.padding_idx)


FAMILIES = (
    *("bert.Bert", "roberta.Roberta", "xlm_roberta.XLMRoberta", "camembert.Camembert", "electra.Electra"),
    *("distilbert.DistilBert", "modernbert.ModernBert"),
)
MODELS = frozenset(
    f"transformers.models.{folder}.modeling_{folder}.{name}Model"
    for folder, name in (family.split(".") for family in FAMILIES)
)
"""Encoders of tokens whose layers pass the bounds of packed sequences to their attention."""


def unpad_encoders(model: nn.Module, backend: str | None, unpad: bool) -> Iterator[Row]:
    """Let the encoders of a patched model leave out padding, or compute it again."""
    for name, module in list(model.named_modules()):
        if class_path(module) in MODELS:
            patched = isinstance(module, UnpaddedModel)
            reason = _why_not(model, module) if unpad else None
            if unpad and reason is None and not patched:
                swap(module, UnpaddedModel, backend)
            elif patched and (not unpad or reason is not None):
                restore(module)
        elif isinstance(module, TransformerEncoder):
            module.unpad, reason = unpad, None
        else:
            continue
        if unpad:
            yield Row(
                name, original_class(module).__name__, UnpaddedModel.operation if reason is None else None, reason
            )


def _why_not(model: nn.Module, encoder: Any) -> str | None:
    """Why an encoder of transformers computes its padding."""
    from transformer_kernels.huggingface import NAME

    if (method := replaced_method(encoder)) is not None:
        return f"its method {method} is replaced on this instance"
    if encoder.config._attn_implementation != NAME:
        return "its attention is not patched"
    if any(getattr(module, "is_causal", False) for module in encoder.modules()):
        return "it is a decoder"
    around = (module for module in model.modules() if any(part is encoder for part in module.modules()))
    if any("start_positions" in inspect.signature(module.forward).parameters for module in around):
        return "the loss of spans reads padded positions"
    return None
