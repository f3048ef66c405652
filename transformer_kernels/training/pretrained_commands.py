"""Command-line functions for pretrained models: text generation, sentence embeddings, masked tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from python_ref import GPT
from python_ref.encoder import Encoder
from python_ref.vit import ViT
from transformer_kernels.pretrained import load_pretrained, load_tokenizer
from transformer_kernels.pretrained.generation import Choice, Sampling, generate_many
from transformer_kernels.pretrained.tokenizers import end_tokens
from transformer_kernels.training.distributed import Processes, choose_device

MASK = "[MASK]"
ROBERTA_MASK = "<mask>"
SHORTENED = 24  # maximum length of a text in a table


class Pretrained(NamedTuple):
    """A model on its device, its tokenizer, and the end-of-text tokens."""

    model: GPT | Encoder | ViT
    tokenizer: Any
    device: torch.device
    ends: frozenset[int]


def load(folder: str, backend: str, device: str) -> Pretrained:
    """Load model and tokenizer from one folder or file."""
    target = choose_device(device, Processes())
    model = load_pretrained(folder, backend=backend).to(target)
    return Pretrained(model, load_tokenizer(folder, model.config.vocab_size), target, end_tokens(folder))


def generate(loaded: Pretrained, prompts: list[str], count: int, sampling: Sampling) -> Iterator[list[Choice]]:
    """Generate `count` tokens after each prompt, step by step; fewer if all texts end earlier."""
    if not isinstance(loaded.model, GPT):
        raise ValueError("generate: --model must be a language model; this one is an encoder: use embed or fill-mask")
    tokens = [loaded.tokenizer.encode(prompt).ids for prompt in prompts]
    context = loaded.model.config.context
    return generate_many(loaded.model, tokens, count, sampling, context=context, device=loaded.device, ends=loaded.ends)


@torch.inference_mode()
def embed(loaded: Pretrained, texts: list[str], pooling: str) -> Tensor:
    """One unit vector per text, float32 (texts, E); texts are truncated to the model's context."""
    model = _encoder(loaded, "embed")
    loaded.tokenizer.enable_truncation(max_length=model.config.context)
    loaded.tokenizer.enable_padding()
    rows = loaded.tokenizer.encode_batch(texts)
    tokens = torch.tensor([row.ids for row in rows], device=loaded.device)
    mask = torch.tensor([row.attention_mask for row in rows], device=loaded.device).bool()
    return model.sentences(tokens, mask, pooling=pooling).cpu()


@torch.inference_mode()
def token_states(loaded: Pretrained, texts: list[str]) -> tuple[list[str], Tensor]:
    """The tokens of all texts, as "2.1: bank" for token 1 of the second, and their last hidden states, (tokens, E)."""
    model = _encoder(loaded, "embed")
    loaded.tokenizer.enable_truncation(max_length=model.config.context)
    names, states = [], []
    for number, row in enumerate(loaded.tokenizer.encode_batch(texts), 1):
        names += [f"{number}.{position}: {token}" for position, token in enumerate(row.tokens)]
        states.append(model.hidden_states(torch.tensor([row.ids], device=loaded.device))[0].float().cpu())
    return names, torch.cat(states)


def closest_tokens(names: list[str], states: Tensor) -> str:
    """Each token with the other token whose state has the largest cosine with its own."""
    vectors = torch.nn.functional.normalize(states, dim=1)
    cosines = (vectors @ vectors.T).fill_diagonal_(-2.0)
    width = max(map(len, names))
    best = [row.tolist() for row in cosines.max(1)]
    return "\n".join(
        f"{name:<{width}}  {cosine:7.4f}  {names[index]}" for name, cosine, index in zip(names, *best, strict=True)
    )


def cosine_table(texts: list[str], vectors: Tensor) -> str:
    """The cosine similarity of each pair of texts."""
    names = [text if len(text) <= SHORTENED else text[: SHORTENED - 3] + "..." for text in texts]
    width = max(map(len, names))
    cosines = (vectors @ vectors.T).tolist()
    lines = [
        f"{name:<{width}}  " + " ".join(f"{value:7.4f}" for value in row)
        for name, row in zip(names, cosines, strict=True)
    ]
    return "\n".join(lines)


@torch.inference_mode()
def fill_mask(loaded: Pretrained, text: str, count: int) -> list[tuple[str, float]]:
    """The `count` most likely tokens at [MASK], with their probabilities."""
    model = _encoder(loaded, "fill-mask")
    known = loaded.tokenizer.token_to_id(MASK)
    if known is None:
        known = loaded.tokenizer.token_to_id(ROBERTA_MASK)
    if known is None or text.count(MASK) != 1:
        raise ValueError(f"fill-mask: the text must have one {MASK}, and the tokenizer must know it; got {text!r}")
    ids = loaded.tokenizer.encode(text.replace(MASK, loaded.tokenizer.id_to_token(known))).ids
    hidden = model(torch.tensor([ids], device=loaded.device))
    shares = model.token_logits(hidden)[0, ids.index(known)].float().softmax(-1)
    likely = shares.topk(min(count, len(shares)))
    words = (loaded.tokenizer.id_to_token(index) for index in likely.indices.tolist())
    return list(zip(words, likely.values.tolist(), strict=True))


def _encoder(loaded: Pretrained, command: str) -> Encoder:
    if not isinstance(loaded.model, Encoder):
        raise ValueError(f"{command}: --model must be an encoder such as BERT; this one is a language model")
    return loaded.model
