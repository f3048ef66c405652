"""Conversion of handwritten tutorial models, saved by `torch.save(model.state_dict())`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from transformer_kernels._bind import build
from transformer_kernels.pretrained.folder import check_regular

if TYPE_CHECKING:
    from python_ref.layers import Transformer

NESTED = ("state_dict", "model_state_dict", "model")  # keys under which training loops store the weights
BUFFERS = re.compile(r"(.*\.)?(P|pe|tril|mask|bias_mask|position_ids|inv_freq)")  # not learned
POSITIONS = "embedding.positions"
HEADS = {"imdb_bert": "classifier.", "char_gpt": "head_"}
ATTENTION = r"(?:attention|self_attention|attn|self_attn|enc_self_attn|mha|sa)\.(?:[a-z]\w*\.)?"
FEED_FORWARD = r"(?:ffn|pos_ffn|ffwd|feed_forward|mlp|positionwise_feed_forward)\.(?:net\.|layers?\.)?"
NORM = r"(?:\.(?:ln|norm|layer_norm))?"
TABLE = r"(?:_?emb(?:ed(?:dings?)?)?)?(?:_table)?"
LAYER = re.compile(
    r"(?:\w+\.)?(?:blks|blocks|layers|transformer_blocks|encoder_layers|h)\.(?:block)?([0-9]{1,9})\.(.+)"
)
IN_A_LAYER = {
    ATTENTION
    + r"(?:heads\.(\d+)\.)?(?:[Ww]_?|to_)?([qkvQKV])(?:uery|ey|alue)?(?:_proj|_linear|_lin)?": "attention.qkv",
    ATTENTION + r"(?:qkv|qkv_proj|c_attn|in_proj)": "attention.qkv",
    ATTENTION + r"(?:[Ww]_?[oO]|to_out|out|out_proj|o_proj|proj|c_proj|fc|fc_out|output|linear|dense)": "attention.out",
    FEED_FORWARD + r"(?:dense_?1|fc_?1|linear_?1|lin_?1|[wW]_?1|up|c_fc|0)": "feed_forward.up",
    FEED_FORWARD + r"(?:dense_?2|fc_?2|linear_?2|lin_?2|[wW]_?2|down|c_proj|2|3)": "feed_forward.down",
    r"(?:addnorm_?1|add_norm_?1|norm_?1|ln_?1|layer_?norm_?1|attention_norm)" + NORM: "attention_norm",
    r"(?:addnorm_?2|add_norm_?2|norm_?2|ln_?2|layer_?norm_?2|feed_forward_norm)" + NORM: "feed_forward_norm",
}
OUTSIDE = {
    r"(?:embeddings?\.)?(?:tok|tokens?|word)" + TABLE + "|embedding|wte": "embedding.tokens",
    r"(?:embeddings?\.)?(?:pos|positions?|positional)" + TABLE + "|wpe": POSITIONS,
    r"(?:embeddings?\.)?(?:seg|segments?|token_type)" + TABLE: "embedding.segments",
    r"(?:embeddings?\.)(?:norm|ln|layer_norm|LayerNorm)": "embedding.norm",
    r"(?:\w+\.)?(?:ln_f|final_norm|norm|ln|ln_final)": "final_norm",
    r"(?:head|lm_head|output|out|dense|classifier|fc|fc_out|unembed|linear|output_layer|mlp_head)": "head",
}


def load_tutorial(
    path: str | os.PathLike[str],
    preset: str,
    *,
    names: Mapping[str, str] | None = None,
    backend: str | None = None,
    **fields: Any,
) -> Transformer:
    """Load the weights of a small handwritten BERT or character GPT.

    The usual names of such classes are recognised: token, position and segment embeddings (`token_embedding`,
    `tok_embed`, `pos_embedding`, ...), layers in `blks`, `blocks` or `layers`, in each of them `attention.W_q` or
    `attn.query` (or `heads.0.query`, one per head), `attention.W_o` or `proj`, `ffn.dense1` or `ffwd.net.0`,
    `addnorm1.ln`, `norm1` or `ln1`, and `head`, `dense` or `classifier` after the last layer. Sizes and biases are
    inferred from the tensors. The preset supplies the number of heads, pre- or post-norm, the activation, and
    sinusoidal positions if there is no position table.

    Args:
        path: a file written by `torch.save`: a state dict, or a dictionary with one under "state_dict",
            "model_state_dict" or "model". It is loaded with `weights_only=True`, so no code in it is executed.
        preset: "imdb_bert" or "char_gpt".
        names: additional names, mapped to names in our state dict.
        backend: as in `build`.
        fields: of the model's configuration; they override the preset and the inferred values.
    Returns:
        the model in evaluation mode, with float32 parameters.
    Raises:
        FileNotFoundError: no such file.
        ValueError: not a state dict, or tensors are unknown, missing or of another shape; all are listed.
    """
    if preset not in HEADS:
        raise ValueError(f"load_tutorial: preset must be one of {', '.join(HEADS)}; got {preset!r}")
    path = Path(path)
    state = _renamed(path, preset, names or {})
    found = {**_read_off(state, preset), **fields}
    if found.get("layers", 1) > max(1, len(state)):
        raise ValueError(f"{path}: {found['layers']} layers are named; there are {len(state)} tensors")
    model = build(preset, backend, **found)
    own = model.state_dict()
    wrong = [f"{name} is missing" for name in own if name not in state]
    wrong += [f"{name} is unknown to the model" for name in state if name not in own]
    wrong += [
        f"{name} has shape {tuple(state[name].shape)}; expected {tuple(own[name].shape)}"
        for name in own.keys() & state.keys()
        if own[name].shape != state[name].shape
    ]
    if wrong:
        raise ValueError(f"{path}: the weights are not those of {preset}: {'; '.join(sorted(wrong))}")
    model.load_state_dict(state)
    return model.eval()


def _renamed(path: Path, preset: str, names: Mapping[str, str]) -> dict[str, Tensor]:
    """The tensors under our names, in float32; split parameters are concatenated."""
    parts: dict[str, dict[tuple[int, int], Tensor]] = {}
    unknown = []
    for name, tensor in _read(path).items():
        ours, part = (names[name], (0, 0)) if name in names else _translated(name, preset)
        if ours is not None:
            parts.setdefault(ours, {})[part] = tensor.float()
        elif not BUFFERS.fullmatch(name):
            unknown.append(name)
    if unknown:
        raise ValueError(f"{path}: unknown names; map them to ours with names=: {', '.join(unknown)}")
    try:
        state = {name: torch.cat([stored[part] for part in sorted(stored)]) for name, stored in parts.items()}
        if POSITIONS in state:
            state[POSITIONS] = state[POSITIONS].flatten(0, -2)  # (1, L, E) or (L, E)
    except (RuntimeError, IndexError) as error:
        raise ValueError(f"{path}: tensors of shapes that no model has: {error}") from None
    return state


def _read(path: Path) -> dict[str, Tensor]:
    check_regular(path)
    try:
        given = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of every kind, for damaged bytes
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{path}: not a state dict that can be loaded without executing code: {reason}") from None
    if isinstance(given, dict):
        given = next((given[name] for name in NESTED if isinstance(given.get(name), dict)), given)
    if not isinstance(given, dict) or not all(isinstance(tensor, Tensor) for tensor in given.values()):
        raise ValueError(f"{path}: must contain a state dict (a dictionary of tensors); got {type(given).__name__}")
    if wrong := sorted(str(name) for name, tensor in given.items() if not _is_ordinary(tensor)):
        raise ValueError(f"{path}: expected finite numbers, stored in full; not so: {', '.join(wrong)}")
    return {str(name).removeprefix("module.").removeprefix("_orig_mod."): tensor for name, tensor in given.items()}


def _is_ordinary(tensor: Tensor) -> bool:
    """Whether it is a dense tensor of real numbers, finite, each of them stored."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta or tensor.is_nested:
        return False
    if tensor.is_complex() or tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        return False
    return bool(tensor.float().isfinite().all())


def _translated(name: str, preset: str) -> tuple[str | None, tuple[int, int]]:
    """Our name of a source tensor (None if unknown), and its part of our tensor: (q, k or v; head)."""
    name, kind = (name, "weight") if name.rpartition(".")[2] not in ("weight", "bias") else name.rsplit(".", 1)
    if layer := LAYER.fullmatch(name):
        for pattern, ours in IN_A_LAYER.items():
            if found := re.fullmatch(pattern, layer[2]):
                head, part = found.groups() if found.re.groups == 2 else (None, None)
                order = ("qkv".index(part.lower()) if part else 0, int(head or 0))
                return f"blocks.{layer[1]}.{ours}.{kind}", order
        return None, (0, 0)
    for pattern, ours in OUTSIDE.items():
        if re.fullmatch(pattern, name):
            ours = HEADS[preset] + kind if ours == "head" else ours if ours == POSITIONS else f"{ours}.{kind}"
            return ours, (0, 0)
    return None, (0, 0)


def _read_off(state: Mapping[str, Tensor], preset: str) -> dict[str, Any]:
    """The configuration fields that can be inferred from the tensors."""
    tokens, up = state.get("embedding.tokens.weight"), state.get("blocks.0.feed_forward.up.weight")
    if tokens is None or up is None or tokens.dim() != 2 or up.dim() != 2:
        return {}
    fields: dict[str, Any] = {"vocab_size": tokens.shape[0], "width": tokens.shape[1], "ffn_width": up.shape[0]}
    fields["layers"] = 1 + max(int(name.split(".")[1]) for name in state if name.startswith("blocks."))
    fields["attention_bias"] = "blocks.0.attention.out.bias" in state
    fields["ffn_bias"] = "blocks.0.feed_forward.up.bias" in state
    fields["norm_bias"] = "blocks.0.attention_norm.bias" in state
    fields["embedding_norm"] = "embedding.norm.weight" in state
    fields["final_norm"] = "final_norm.weight" in state
    fields["positions"] = "learned" if POSITIONS in state else "sinusoidal"
    if POSITIONS in state:
        fields["context"] = state[POSITIONS].shape[0]
    if preset == "char_gpt":
        return fields | {"tied": "head_weight" not in state, "head_bias": "head_bias" in state}
    fields["segments"] = len(state.get("embedding.segments.weight", ()))
    classifier = state.get("classifier.weight")
    return fields if classifier is None else fields | {"classes": classifier.shape[0]}
