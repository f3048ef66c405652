"""Models of transformers as training steps: eager attention, SDPA, or patched."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor, nn

import transformer_kernels as tk
from benchmarks.peers import Skipped

BERT = {"num_hidden_layers": 4}
GPT2 = {"n_layer": 4}
"""Base sizes with fewer layers: a step then takes seconds on a CPU, with the cost per layer of the full model."""
LABELLED = 0.15
"""The fraction of tokens that BERT's masked language model predicts."""


class OtherModel(nn.Module):
    """A model of transformers under the method names that a step calls.

    Args:
        model: a language model that computes its own loss from `labels`.
        labelled: the fraction of tokens that have a label.
    """

    def __init__(self, model: Any, labelled: float) -> None:
        super().__init__()
        self.model, self.labelled, self.config = model, labelled, model.config

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean cross-entropy over the labelled tokens of (B, L), which come first."""
        count = round(self.labelled * targets.shape[1])
        labels = targets.masked_fill(torch.arange(targets.shape[1], device=targets.device) >= count, -100)
        return self.model(input_ids=tokens, labels=labels).loss

    def flops_per_token(self, length: int) -> float:
        """FLOPs of both passes: six per weight of a product, twelve per layer, key and column of attention."""
        weights = sum(parameter.numel() for parameter in self.model.parameters() if parameter.dim() == 2)
        tables = sum(module.num_embeddings for module in self.modules() if isinstance(module, nn.Embedding))
        width = self.config.hidden_size
        inside = weights - tables * width
        return 6.0 * (inside + self.config.vocab_size * width) + 12.0 * self.config.num_hidden_layers * width * length


def build(name: str, operations: str, dropout: float | None) -> OtherModel:
    """One of `MODELS`, with eager attention ("reference"), SDPA ("pytorch") or patched with one of our backends.

    Raises:
        Skipped: transformers is not installed.
    """
    if importlib.util.find_spec("transformers") is None:
        raise Skipped("transformers is not installed")
    make, labelled = MODELS[name]
    attention = "eager" if operations == "reference" else "sdpa"
    model = OtherModel(make(dropout, attention), labelled)
    if operations not in ("reference", "pytorch"):
        tk.patch(model, backend=operations)
    return model


def _bert(dropout: float | None, attention: str) -> nn.Module:
    import transformers

    rates = {} if dropout is None else {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    config = transformers.BertConfig(**BERT, **rates)
    return transformers.BertForMaskedLM._from_config(config, attn_implementation=attention)


def _gpt2(dropout: float | None, attention: str) -> nn.Module:
    import transformers

    rates = {} if dropout is None else dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    config = transformers.GPT2Config(**GPT2, use_cache=False, **rates)
    return transformers.GPT2LMHeadModel._from_config(config, attn_implementation=attention)


MODELS = {"transformers' BERT": (_bert, LABELLED), "transformers' GPT-2": (_gpt2, 1.0)}
