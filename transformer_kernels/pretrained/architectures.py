"""Layouts of pretrained models: configurations and parameter names of transformers, mapped to `python_ref`.

A `Layout` specifies for each of our parameters the source tensors, which are concatenated along the rows and, if
`transposed`, stored as (inputs, outputs), as in GPT-2's Conv1D. Layouts are used in both directions.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from python_ref import GPTConfig
from python_ref.encoder import Encoder, EncoderConfig
from python_ref.vit import ViT, ViTConfig
from transformer_kernels.pretrained.language_model import PretrainedGPT

LIMIT = 2**31  # of the numbers in a configuration
ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}


class Entry(NamedTuple):
    """One of our parameters and its source tensors.

    The first `skipped` rows of the source are not used; `shape` is the source shape if it differs.
    """

    ours: str
    theirs: tuple[str, ...]
    transposed: bool = False
    skipped: int = 0
    shape: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Architecture:
    """A model family of transformers.

    Attributes:
        name: `model_type` in config.json.
        prefix: prefix of the names in a model with a head.
        ignored: patterns of names without counterpart: buffers, heads for pretraining.
        copies: our config -> names that may be stored a second time, each with the tensor that it must equal.
        configure: their config and tensor names -> our config.
        describe: our config -> their config; ValueError if they have no such model.
        entries: our config -> the parameters.
    """

    name: str
    prefix: str
    ignored: tuple[str, ...]
    copies: Callable[[Any], dict[str, str]]
    configure: Callable[[dict[str, Any], set[str]], Any]
    describe: Callable[[Any], dict[str, Any]]
    entries: Callable[[Any], Iterator[Entry]]

    def make(self, config: Any, ops: Any) -> PretrainedGPT | Encoder | ViT:
        models: dict[type, Any] = {GPTConfig: PretrainedGPT, EncoderConfig: Encoder, ViTConfig: ViT}
        return models[type(config)](config, ops)


def require(theirs: dict[str, Any], **expected: Any) -> None:
    """Reject a config that requires features that our definitions do not have."""
    for name, value in {**expected, "quantization_config": None}.items():
        if theirs.get(name, value) not in (value, None):
            raise ValueError(f"{name} must be {value!r}; got {theirs[name]!r}")


def activation_of(theirs: dict[str, Any], name: str) -> str:
    if (given := theirs.get(name, "gelu")) not in ACTIVATIONS:
        raise ValueError(f"{name} must be one of {', '.join(ACTIVATIONS)}; got {given!r}")
    return ACTIVATIONS[given]


def their_activation(ours: str) -> str:
    return {"gelu": "gelu", "gelu_tanh": "gelu_new", "relu": "relu"}[ours]


def with_bias(ours: str, *theirs: str, transposed: bool = False) -> Iterator[Entry]:
    """The weight and the bias of one layer."""
    yield Entry(f"{ours}.weight", tuple(f"{name}.weight" for name in theirs), transposed)
    yield Entry(f"{ours}.bias", tuple(f"{name}.bias" for name in theirs))


Fields = dict[str, str | tuple[str, Any]]
"""Fields of our config, each with their name for it, or with their name and its default."""


def read_fields(theirs: dict[str, Any], fields: Fields) -> dict[str, Any]:
    return {
        ours: read_field(theirs, ours, name) if isinstance(name, str) else read_field(theirs, ours, *name)
        for ours, name in fields.items()
    }


def read_field(theirs: dict[str, Any], ours: str, name: str, *default: Any) -> Any:
    """Their value for one of our fields: a number, but for `attention_bias`; without default it must be given."""
    value = theirs.get(name, *default) if default else theirs[name]
    if value is None and default:
        return None
    if ours == "attention_bias":
        return read_flag(theirs, name, *default)
    kinds = (int, float) if ours.endswith(("_eps", "dropout")) else (int,)
    if isinstance(value, bool) or not isinstance(value, kinds) or not 0 <= value < LIMIT:
        wanted = "a number" if float in kinds else "an integer"
        raise ValueError(f"{name} must be {wanted} in [0, {LIMIT}); got {reprlib.repr(value)}")
    return value


def read_flag(theirs: dict[str, Any], name: str, default: bool) -> bool:
    if not isinstance(value := theirs.get(name, default), bool):
        raise ValueError(f"{name} must be true or false; got {reprlib.repr(value)}")
    return value


def written_fields(ours: Any, fields: Fields) -> dict[str, Any]:
    values = {"ffn_width": ours.ffn_width or 4 * ours.width, "attention_dropout": ours.dropout_on("attention")}
    names = {field: name if isinstance(name, str) else name[0] for field, name in fields.items()}
    return {name: values[field] if field in values else getattr(ours, field) for field, name in names.items()}


ORDINARY: dict[str, Any] = {"window": None, "qk_norm": False, "value_dim": None, "ffn_dropout": 0.0}
BIASED = {**ORDINARY, "attention_bias": True, "ffn_bias": True, "norm_bias": True, "kv_heads": None}
PRE_NORM: dict[str, Any] = {"norm": "pre", "final_norm": True, "embedding_norm": False}
"""Values of our fields that a family of transformers has."""

SIZES: Fields = {
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "ffn_width": "intermediate_size",
}
TEXT: Fields = {"vocab_size": "vocab_size", "context": "max_position_embeddings", **SIZES}

Layer = dict[str, tuple[str, ...]]
"""Modules of one of our blocks, each with its source modules, without prefix."""


def layer_entries(layers: int, theirs: str, names: Layer) -> Iterator[Entry]:
    """The weights and biases of all blocks; the source blocks are numbered after the prefix `theirs`."""
    for layer in range(layers):
        for ours, parts in names.items():
            yield from with_bias(f"blocks.{layer}.{ours}", *(f"{theirs}.{layer}.{part}" for part in parts))


# GPT-2 and DistilGPT-2

GPT2: Fields = {
    "vocab_size": "vocab_size",
    "context": "n_positions",
    "width": "n_embd",
    "layers": "n_layer",
    "heads": "n_head",
    "ffn_width": ("n_inner", None),
    "norm_eps": ("layer_norm_epsilon", 1e-5),
    "dropout": ("resid_pdrop", 0.1),
    "embedding_dropout": ("embd_pdrop", 0.1),
    "attention_dropout": ("attn_pdrop", 0.1),
}


def gpt2_config(theirs: dict[str, Any], names: set[str]) -> GPTConfig:
    require(theirs, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False)
    return GPTConfig(
        **read_fields(theirs, GPT2),
        activation=activation_of(theirs | {"hidden_act": theirs.get("activation_function", "gelu_new")}, "hidden_act"),
        tied=read_flag(theirs, "tie_word_embeddings", True),
        init_scale_residual=True,
    )


def describe_gpt2(ours: GPTConfig) -> dict[str, Any]:
    refuse_others(ours, {**PRE_NORM, **BIASED, "positions": "learned", "head_bias": False})
    return {
        "architectures": ["GPT2LMHeadModel"],
        **written_fields(ours, GPT2),
        "n_inner": ours.ffn_width,
        "activation_function": their_activation(ours.activation),
        "resid_pdrop": ours.dropout_on("residual"),
        "embd_pdrop": ours.dropout_on("embedding"),
        "tie_word_embeddings": ours.tied,
        "bos_token_id": ours.vocab_size - 1,
        "eos_token_id": ours.vocab_size - 1,
    }


def gpt2_entries(config: GPTConfig) -> Iterator[Entry]:
    yield Entry("embedding.tokens.weight", ("transformer.wte.weight",))
    yield Entry("embedding.positions", ("transformer.wpe.weight",))
    for layer in range(config.layers):
        ours, theirs = f"blocks.{layer}", f"transformer.h.{layer}"
        yield from with_bias(f"{ours}.attention_norm", f"{theirs}.ln_1")
        yield from with_bias(f"{ours}.attention.qkv", f"{theirs}.attn.c_attn", transposed=True)
        yield from with_bias(f"{ours}.attention.out", f"{theirs}.attn.c_proj", transposed=True)
        yield from with_bias(f"{ours}.feed_forward_norm", f"{theirs}.ln_2")
        yield from with_bias(f"{ours}.feed_forward.up", f"{theirs}.mlp.c_fc", transposed=True)
        yield from with_bias(f"{ours}.feed_forward.down", f"{theirs}.mlp.c_proj", transposed=True)
    yield from with_bias("final_norm", "transformer.ln_f")
    if not config.tied:
        yield Entry("head_weight", ("lm_head.weight",))


# BERT, MiniLM and DistilBERT

BERT: Fields = {
    **TEXT,
    "norm_eps": ("layer_norm_eps", 1e-12),
    "dropout": ("hidden_dropout_prob", 0.1),
    "attention_dropout": ("attention_probs_dropout_prob", 0.1),
    "segments": ("type_vocab_size", 2),
}


def bert_config(theirs: dict[str, Any], names: set[str]) -> EncoderConfig:
    require(theirs, position_embedding_type="absolute", is_decoder=False, tie_word_embeddings=True)
    return EncoderConfig(
        **read_fields(theirs, BERT),
        activation=activation_of(theirs, "hidden_act"),
        pooler=any(name.endswith("pooler.dense.weight") for name in names),
        masked_lm="cls.predictions.bias" in names or "lm_head.bias" in names,
        **ENCODER,
    )


ENCODER: dict[str, Any] = {"norm": "post", "final_norm": False, "embedding_norm": True}
ENCODER_LIKE = {**ENCODER, **BIASED, "positions": "learned"}


def describe_bert(ours: EncoderConfig) -> dict[str, Any]:
    refuse_others(ours, ENCODER_LIKE)
    return {
        "architectures": ["BertForMaskedLM" if ours.masked_lm else "BertModel"],
        **written_fields(ours, BERT),
        "hidden_act": their_activation(ours.activation),
    }


BERT_LAYER: Layer = {
    "attention.qkv": tuple(f"attention.self.{name}" for name in ("query", "key", "value")),
    "attention.out": ("attention.output.dense",),
    "attention_norm": ("attention.output.LayerNorm",),
    "feed_forward.up": ("intermediate.dense",),
    "feed_forward.down": ("output.dense",),
    "feed_forward_norm": ("output.LayerNorm",),
}


def bert_entries(config: EncoderConfig) -> Iterator[Entry]:
    yield Entry("embedding.tokens.weight", ("bert.embeddings.word_embeddings.weight",))
    yield Entry("embedding.positions", ("bert.embeddings.position_embeddings.weight",))
    yield Entry("embedding.segments.weight", ("bert.embeddings.token_type_embeddings.weight",))
    yield from with_bias("embedding.norm", "bert.embeddings.LayerNorm")
    yield from layer_entries(config.layers, "bert.encoder.layer", BERT_LAYER)
    if config.pooler:
        yield from with_bias("pooler", "bert.pooler.dense")
    if config.masked_lm:
        yield from with_bias("masked_lm.dense", "cls.predictions.transform.dense")
        yield from with_bias("masked_lm.norm", "cls.predictions.transform.LayerNorm")
        yield Entry("masked_lm.bias", ("cls.predictions.bias",))


PADDING = 2  # position rows of RoBERTa up to the padding row; the first token uses the next one
ROBERTA_NAMES = {
    "bert.": "roberta.",
    "cls.predictions.transform.dense.": "lm_head.dense.",
    "cls.predictions.transform.LayerNorm.": "lm_head.layer_norm.",
    "cls.predictions.bias": "lm_head.bias",
}


def roberta_config(theirs: dict[str, Any], names: set[str]) -> EncoderConfig:
    require(theirs, pad_token_id=PADDING - 1)
    rows = read_field(theirs, "context", "max_position_embeddings")
    return bert_config({**theirs, "max_position_embeddings": max(rows - PADDING, 0)}, names)


def roberta_entries(config: EncoderConfig) -> Iterator[Entry]:
    for entry in bert_entries(config):
        names = tuple(
            next(new + name[len(old) :] for old, new in ROBERTA_NAMES.items() if name.startswith(old))
            for name in entry.theirs
        )
        yield entry._replace(theirs=names, skipped=PADDING if entry.ours == "embedding.positions" else 0)


DISTILBERT: Fields = {
    "vocab_size": "vocab_size",
    "context": "max_position_embeddings",
    "width": "dim",
    "layers": "n_layers",
    "heads": "n_heads",
    "ffn_width": "hidden_dim",
    "dropout": ("dropout", 0.1),
    "attention_dropout": ("attention_dropout", 0.1),
}


def distilbert_config(theirs: dict[str, Any], names: set[str]) -> EncoderConfig:
    require(theirs, sinusoidal_pos_embds=False, tie_word_embeddings=True)
    return EncoderConfig(
        **read_fields(theirs, DISTILBERT),
        activation=activation_of(theirs, "activation"),
        norm_eps=1e-12,
        segments=0,
        pooler=False,
        masked_lm="vocab_projector.bias" in names,
        **ENCODER,
    )


def describe_distilbert(ours: EncoderConfig) -> dict[str, Any]:
    refuse_others(ours, ENCODER_LIKE | {"norm_eps": 1e-12, "pooler": False, "segments": 0})
    return {
        "architectures": ["DistilBertForMaskedLM" if ours.masked_lm else "DistilBertModel"],
        **written_fields(ours, DISTILBERT),
        "activation": their_activation(ours.activation),
    }


DISTILBERT_LAYER: Layer = {
    "attention.qkv": tuple(f"attention.{name}_lin" for name in "qkv"),
    "attention.out": ("attention.out_lin",),
    "attention_norm": ("sa_layer_norm",),
    "feed_forward.up": ("ffn.lin1",),
    "feed_forward.down": ("ffn.lin2",),
    "feed_forward_norm": ("output_layer_norm",),
}


def distilbert_entries(config: EncoderConfig) -> Iterator[Entry]:
    yield Entry("embedding.tokens.weight", ("distilbert.embeddings.word_embeddings.weight",))
    yield Entry("embedding.positions", ("distilbert.embeddings.position_embeddings.weight",))
    yield from with_bias("embedding.norm", "distilbert.embeddings.LayerNorm")
    yield from layer_entries(config.layers, "distilbert.transformer.layer", DISTILBERT_LAYER)
    if config.masked_lm:
        yield from with_bias("masked_lm.dense", "vocab_transform")
        yield from with_bias("masked_lm.norm", "vocab_layer_norm")
        yield Entry("masked_lm.bias", ("vocab_projector.bias",))


# Llama

LLAMA: Fields = {
    **TEXT,
    "kv_heads": ("num_key_value_heads", None),
    "norm_eps": ("rms_norm_eps", 1e-6),
    "attention_bias": ("attention_bias", False),
    "attention_dropout": ("attention_dropout", 0.0),
}


ROTARY_SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def llama_config(theirs: dict[str, Any], names: set[str]) -> GPTConfig:
    sizes = read_fields(theirs, LLAMA)
    require(theirs, hidden_act="silu", mlp_bias=False, head_dim=sizes["width"] // sizes["heads"])
    require(theirs, partial_rotary_factor=1.0, sliding_window=None)
    rotary = theirs.get("rope_parameters") or {"rope_theta": theirs.get("rope_theta", 10_000.0)}
    rotary = {**rotary, **(theirs.get("rope_scaling") or {})}
    kind = rotary.get("rope_type", rotary.get("type", "default"))
    if kind not in ("default", "llama3") or rotary.get("type", kind) != kind:
        raise ValueError(f"rope_type must be 'default' or 'llama3'; got {reprlib.repr(rotary.get('type', kind))}")
    require(rotary, partial_rotary_factor=1.0)
    if unknown := rotary.keys() - {"rope_type", "type", "rope_theta", "partial_rotary_factor", *ROTARY_SCALING}:
        raise ValueError(f"rope_parameters: {', '.join(sorted(unknown))} is not supported")
    return GPTConfig(
        **sizes,
        activation="swiglu",
        norm="rms",
        positions="rotary",
        rotary_base=_positive(rotary, "rope_theta"),
        rotary_scaling=_rotary_scaling(rotary) if kind == "llama3" else None,
        dropout=0.0,
        ffn_bias=False,
        tied=read_flag(theirs, "tie_word_embeddings", False),
    )


def _positive(rotary: dict[str, Any], name: str) -> float:
    if type(value := rotary[name]) not in (int, float) or not 0 < value < math.inf:
        raise ValueError(f"{name} must be a positive number; got {reprlib.repr(value)}")
    return value


def _rotary_scaling(rotary: dict[str, Any]) -> tuple[float, ...]:
    found = tuple(_positive(rotary, name) for name in ROTARY_SCALING)
    if not found[1] < found[2]:
        raise ValueError(f"low_freq_factor must be below high_freq_factor; got {found[1]} and {found[2]}")
    return found


def describe_llama(ours: GPTConfig) -> dict[str, Any]:
    wanted = {**PRE_NORM, **ORDINARY, "norm": "rms", "positions": "rotary", "activation": "swiglu", "head_bias": False}
    wanted |= {"ffn_bias": False, "rotary_width": None, "rotary_interleaved": False, "rotary_scaling": None}
    refuse_others(ours, wanted)
    return {
        "architectures": ["LlamaForCausalLM"],
        **written_fields(ours, LLAMA),
        "num_key_value_heads": ours.kv_heads or ours.heads,
        "hidden_act": "silu",
        "rope_parameters": {"rope_type": "default", "rope_theta": ours.rotary_base},
        "tie_word_embeddings": ours.tied,
    }


def llama_entries(config: GPTConfig) -> Iterator[Entry]:
    yield Entry("embedding.tokens.weight", ("model.embed_tokens.weight",))
    for layer in range(config.layers):
        ours, theirs = f"blocks.{layer}", f"model.layers.{layer}"
        yield Entry(f"{ours}.attention_norm.weight", (f"{theirs}.input_layernorm.weight",))
        for kind in ("weight", "bias") if config.attention_bias else ("weight",):
            parts = tuple(f"{theirs}.self_attn.{name}_proj.{kind}" for name in "qkv")
            yield Entry(f"{ours}.attention.qkv.{kind}", parts)
            yield Entry(f"{ours}.attention.out.{kind}", (f"{theirs}.self_attn.o_proj.{kind}",))
        yield Entry(f"{ours}.feed_forward_norm.weight", (f"{theirs}.post_attention_layernorm.weight",))
        gate = (f"{theirs}.mlp.gate_proj.weight", f"{theirs}.mlp.up_proj.weight")
        yield Entry(f"{ours}.feed_forward.up.weight", gate)
        yield Entry(f"{ours}.feed_forward.down.weight", (f"{theirs}.mlp.down_proj.weight",))
    yield Entry("final_norm.weight", ("model.norm.weight",))
    if not config.tied:
        yield Entry("head_weight", ("lm_head.weight",))


# ViT

VIT: Fields = {
    "image": "image_size",
    "channels": ("num_channels", 3),
    "patch": "patch_size",
    **SIZES,
    "norm_eps": ("layer_norm_eps", 1e-12),
    "dropout": ("hidden_dropout_prob", 0.0),
    "attention_dropout": ("attention_probs_dropout_prob", 0.0),
}


def vit_config(theirs: dict[str, Any], names: set[str]) -> ViTConfig:
    require(theirs, qkv_bias=True)
    labels = theirs.get("id2label", {0: "LABEL_0", 1: "LABEL_1"})
    if not isinstance(labels, dict):
        raise ValueError(f"id2label must be an object; got {reprlib.repr(labels)}")
    return ViTConfig(
        **read_fields(theirs, VIT),
        classes=len(labels),
        activation=activation_of(theirs, "hidden_act"),
    )


def describe_vit(ours: ViTConfig) -> dict[str, Any]:
    refuse_others(ours, {**PRE_NORM, **BIASED})
    labels = [f"LABEL_{index}" for index in range(ours.classes)]
    return {
        "architectures": ["ViTForImageClassification"],
        **written_fields(ours, VIT),
        "id2label": dict(enumerate(labels)),
        "label2id": {label: index for index, label in enumerate(labels)},
        "hidden_act": their_activation(ours.activation),
        "qkv_bias": True,
    }


VIT_LAYER: Layer = {
    "attention.qkv": tuple(f"attention.attention.{name}" for name in ("query", "key", "value")),
    "attention.out": ("attention.output.dense",),
    "attention_norm": ("layernorm_before",),
    "feed_forward.up": ("intermediate.dense",),
    "feed_forward.down": ("output.dense",),
    "feed_forward_norm": ("layernorm_after",),
}


def vit_entries(config: ViTConfig) -> Iterator[Entry]:
    projection, bias = with_bias("embedding.projection", "vit.embeddings.patch_embeddings.projection")
    yield projection._replace(shape=(config.width, config.channels, config.patch, config.patch))
    yield bias
    yield Entry("embedding.class_token", ("vit.embeddings.cls_token",), shape=(1, 1, config.width))
    shape = (1, config.context, config.width)
    yield Entry("embedding.positions", ("vit.embeddings.position_embeddings",), shape=shape)
    yield from layer_entries(config.layers, "vit.encoder.layer", VIT_LAYER)
    yield from with_bias("final_norm", "vit.layernorm")
    yield from with_bias("classifier", "classifier")


def refuse_others(ours: Any, wanted: dict[str, Any]) -> None:
    """ValueError if a field of our config differs from what the family supports."""
    for name, value in wanted.items():
        if getattr(ours, name) != value:
            raise ValueError(
                f"export_pretrained: {name}={getattr(ours, name)!r} has no counterpart; it must be {value!r}"
            )


POSITION_IDS = r"(.*\.)?embeddings\.position_ids"
NEXT_SENTENCE = r"cls\.seq_relationship\.(weight|bias)"
CAUSAL_MASKS = r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)"
FREQUENCIES = r"(model\.)?layers\.\d+\.self_attn\.rotary_emb\.inv_freq"


def tied_head(embedding: str) -> Callable[[GPTConfig], dict[str, str]]:
    return lambda config: {"lm_head.weight": embedding} if config.tied else {}


def masked_lm_head(decoder: str, embedding: str, bias: str = "") -> Callable[[EncoderConfig], dict[str, str]]:
    copies = {f"{decoder}.weight": embedding} | ({f"{decoder}.bias": bias} if bias else {})
    return lambda config: copies if config.masked_lm else {}


BERT_HEAD = masked_lm_head("cls.predictions.decoder", "bert.embeddings.word_embeddings.weight", "cls.predictions.bias")
ROBERTA_HEAD = masked_lm_head("lm_head.decoder", "roberta.embeddings.word_embeddings.weight", "lm_head.bias")
DISTILBERT_HEAD = masked_lm_head("vocab_projector", "distilbert.embeddings.word_embeddings.weight")
GPT2_HEAD, LLAMA_HEAD = tied_head("transformer.wte.weight"), tied_head("model.embed_tokens.weight")

ARCHITECTURES = {
    architecture.name: architecture
    for architecture in (
        Architecture("gpt2", "transformer.", (CAUSAL_MASKS,), GPT2_HEAD, gpt2_config, describe_gpt2, gpt2_entries),
        Architecture(
            "bert", "bert.", (POSITION_IDS, NEXT_SENTENCE), BERT_HEAD, bert_config, describe_bert, bert_entries
        ),
        Architecture(
            "roberta", "roberta.", (POSITION_IDS,), ROBERTA_HEAD, roberta_config, describe_bert, roberta_entries
        ),
        Architecture("vit", "vit.", (), lambda config: {}, vit_config, describe_vit, vit_entries),
        Architecture(
            "distilbert",
            "distilbert.",
            (POSITION_IDS,),
            DISTILBERT_HEAD,
            distilbert_config,
            describe_distilbert,
            distilbert_entries,
        ),
        Architecture("llama", "model.", (FREQUENCIES,), LLAMA_HEAD, llama_config, describe_llama, llama_entries),
    )
}
