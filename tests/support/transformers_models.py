"""Small random models of transformers, one for each family, and their inputs: padded batches and labels."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra `test`)")

VOCABULARY, LENGTH = 97, 12
ENCODER = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
ENCODER |= {"intermediate_size": 64, "max_position_embeddings": 64}
DECODER = {**ENCODER, "num_key_value_heads": 2}
DISTILBERT = {"vocab_size": VOCABULARY, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64}
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
T5 = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
VIT = {key: ENCODER[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")}
SIDE = {"layers": 1, "ffn_dim": 64, "attention_heads": 4}  # of an encoder or a decoder in BART's configurations

FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("BertForMaskedLM", "BertConfig", ENCODER),
    "roberta": ("RobertaForMaskedLM", "RobertaConfig", ENCODER),
    "distilbert": ("DistilBertForMaskedLM", "DistilBertConfig", DISTILBERT | {"max_position_embeddings": 64}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2 | {"scale_attn_by_inverse_layer_idx": True}),
    "llama": ("LlamaForCausalLM", "LlamaConfig", DECODER),
    "mistral": ("MistralForCausalLM", "MistralConfig", DECODER | {"sliding_window": 5}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", DECODER),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", DECODER | {"head_dim": 8}),
    "t5": ("T5ForConditionalGeneration", "T5Config", T5),
    "t5_gated": ("T5ForConditionalGeneration", "T5Config", T5 | {"feed_forward_proj": "gated-gelu"}),
    "vit": ("ViTForImageClassification", "ViTConfig", VIT | {"image_size": 16, "patch_size": 4, "num_labels": 5}),
}
CAUSAL = ("gpt2", "llama", "mistral", "qwen2", "qwen3")
TOKENS = {"pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 2}


def save_encoder(folder, kind, words):
    """A small BERT with a vocabulary, saved as a folder of transformers."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    config = transformers.BertConfig(vocab_size=len(words), max_position_embeddings=8, initializer_range=0.5, **sizes)
    getattr(transformers, kind)(config).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(words))
    return folder


def make(family, attention="eager", dropout=0.0, **overrides):
    """A model with random weights, none at its initial 0 or 1, in training mode."""
    model, config, options = FAMILIES[family]
    rates = ("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout_rate", "attention_dropout", "dropout")
    rates += ("resid_pdrop", "embd_pdrop", "attn_pdrop")
    dropouts = {name: dropout for name in rates if hasattr(getattr(transformers, config)(), name)}
    special = {} if family == "vit" else TOKENS | ({"decoder_start_token_id": 1} if family.startswith("t5") else {})
    torch.manual_seed(0)
    configured = getattr(transformers, config)(**{**options, **dropouts, **special, **overrides})
    made = getattr(transformers, model)._from_config(configured, attn_implementation=attention)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            shift = 1.0 if parameter.dim() == 1 and name.endswith("weight") else 0.0
            parameter.add_(torch.randn_like(parameter), alpha=0.05 if shift else 0.1)
    return made.train()


def inputs(family, padding="right", labels=True):
    """A batch of three, with rows of 12, 8 and 5 real tokens unless `padding` is None; padding is never predicted."""
    generator = torch.Generator().manual_seed(1)
    if family == "vit":
        pixels = torch.randn(3, 3, 16, 16, generator=generator)
        return {"pixel_values": pixels} | ({"labels": torch.tensor([0, 3, 4])} if labels else {})
    tokens = torch.randint(3, VOCABULARY, (3, LENGTH), generator=generator)
    mask = torch.ones_like(tokens)
    if padding is not None:
        mask[1, 8:], mask[2, 5:] = 0, 0
        mask = mask.flip(1) if padding == "left" else mask
    batch = {"input_ids": tokens.masked_fill(mask == 0, 1), "attention_mask": mask}
    if labels:
        known = mask & torch.nn.functional.pad(mask, (1, -1), value=1)  # a causal model predicts from the token before
        batch["labels"] = tokens.roll(1, 1).masked_fill(known == 0, -100)
    elif family.startswith("t5"):
        batch["decoder_input_ids"] = tokens
    return batch


def real(family, batch):
    """Positions of compared logits: real tokens; all in a decoder with its own tokens, and in ViT."""
    if family == "vit" or family.startswith("t5"):
        return torch.tensor(True)
    return batch["attention_mask"].bool().unsqueeze(-1)


def exact(model):
    """The same weights in float64 with SDPA, since eager computes some softmaxes in float32."""
    wide = copy.deepcopy(model).double()
    wide.set_attn_implementation("sdpa")
    return wide


def run(family, model, batch):
    """The compared logits, the loss, and the gradient of every parameter."""
    model.zero_grad()
    dtype = next(model.parameters()).dtype
    given = {name: value.to(dtype) if value.is_floating_point() else value for name, value in batch.items()}
    out = model(**given)
    out.loss.backward()
    gradients = {f"d{name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    logits = out.logits if family == "vit" else out.logits.masked_fill(given["labels"].unsqueeze(-1) == -100, 0.0)
    return {"logits": logits.detach(), "loss": out.loss.detach(), **copy.deepcopy(gradients)}


def assert_within_budget(ours, eager, exact):
    """Forward within twice, gradients within three times the largest error of eager, plus the rounding of an element.

    `exact` is the result in float64 with the same weights. A gradient that is 0 there, such as that of a key bias, is a
    sum of terms that cancel: it has the rounding of the largest gradient.
    """
    assert ours.keys() == eager.keys() == exact.keys()
    largest = max(value.abs().max() for name, value in exact.items() if name.startswith("d"))
    for name, expected in exact.items():
        factor = 3.0 if name.startswith("d") else 2.0
        unit = 2.0**-8 if eager["logits"].dtype is torch.bfloat16 else 2.0**-21
        size = expected.abs().max()
        size = largest if name.startswith("d") and size < 1e-12 * largest else size
        allowed = factor * (eager[name] - expected).abs().max() + unit * size + 1e-9
        error = (ours[name] - expected).abs().max()
        assert error <= allowed, f"{name}: {error:.3g} > {allowed:.3g}"


@pytest.fixture(autouse=True)
def one_thread():
    """Models of this size are slower with a second thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
