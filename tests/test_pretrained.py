"""Pretrained folders and files: results of transformers, export, and errors of invalid files."""

import json
import os
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import transformer_kernels as tk
from python_ref import GPT, GPTConfig
from python_ref.encoder import Encoder, EncoderConfig
from python_ref.vit import ViT
from tests.support.real_weights import minilm, smollm2
from transformer_kernels.pretrained.architectures import ARCHITECTURES
from transformer_kernels.pretrained.gguf import GGUF
from transformer_kernels.pretrained.tokenizers import load_tokenizer

transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra `test`)")

BERT = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
VIT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
VIT |= {"image_size": 8, "patch_size": 4, "num_channels": 2, "num_labels": 5}
DISTILBERT = {"vocab_size": 97, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48}
GPT2 = {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 1}
LLAMA = {**BERT, "num_key_value_heads": 2, "max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 16}

FAMILIES = {
    "bert": ("BertForMaskedLM", "BertConfig", BERT),
    "bert_with_pooler": ("BertModel", "BertConfig", BERT | {"hidden_act": "relu"}),
    "roberta": ("RobertaForMaskedLM", "RobertaConfig", BERT | {"max_position_embeddings": 20, "type_vocab_size": 1}),
    "roberta_with_pooler": ("RobertaModel", "RobertaConfig", BERT | {"layer_norm_eps": 1e-5}),
    "vit": ("ViTForImageClassification", "ViTConfig", VIT),
    "distilbert": ("DistilBertForMaskedLM", "DistilBertConfig", DISTILBERT),
    "distilbert_alone": ("DistilBertModel", "DistilBertConfig", DISTILBERT),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2),
    "gpt2_alone": ("GPT2Model", "GPT2Config", GPT2),
    "gpt2_untied": ("GPT2LMHeadModel", "GPT2Config", GPT2 | {"tie_word_embeddings": False, "n_inner": 40}),
    "llama": ("LlamaForCausalLM", "LlamaConfig", LLAMA),
    "llama_tied": ("LlamaForCausalLM", "LlamaConfig", LLAMA | {"tie_word_embeddings": True, "attention_bias": True}),
    "llama_scaled": ("LlamaForCausalLM", "LlamaConfig", LLAMA | {"rope_parameters": LLAMA3}),
}


def save(family, folder, **overrides):
    """A random model of transformers, saved; and the model."""
    model, config, options = FAMILIES[family]
    torch.manual_seed(0)
    made = getattr(transformers, model)(getattr(transformers, config)(**options | overrides)).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    made.save_pretrained(folder)
    return made


def tokens_and_mask():
    tokens = torch.randint(3, 97, (3, 12), generator=torch.Generator().manual_seed(1))
    lengths = torch.tensor([12, 7, 3])
    return tokens, torch.arange(12) < lengths[:, None]


def results(model):
    """The hidden states and the outputs of the heads at real tokens."""
    tokens, mask = tokens_and_mask()
    if isinstance(model, ViT) or getattr(model.config, "model_type", "") == "vit":
        out = model(torch.randn(2, 2, 8, 8, generator=torch.Generator().manual_seed(3)))
        return {"logits": out if isinstance(out, torch.Tensor) else out.logits}
    if isinstance(model, GPT):
        return {"logits": model(tokens)}
    if isinstance(model, Encoder):
        hidden = model(tokens, mask)
        given = {"hidden": hidden * mask.unsqueeze(-1)}
        given |= {"pooled": model.pooled(hidden)} if model.pooler is not None else {}
        return given | ({"logits": model.token_logits(hidden) * mask.unsqueeze(-1)} if model.masked_lm else {})
    if model.config.model_type in ("gpt2", "llama"):
        out = model(tokens)
        return {"logits": out.logits if "logits" in out else out.last_hidden_state @ model.wte.weight.t()}
    out = model(tokens, attention_mask=mask.long(), output_hidden_states=True)
    given = {"hidden": out.hidden_states[-1] * mask.unsqueeze(-1)}
    given |= {"pooled": out.pooler_output} if "pooler_output" in out else {}
    return given | ({"logits": out.logits * mask.unsqueeze(-1)} if "logits" in out else {})


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_loaded_models_match_transformers(family, tmp_path):
    theirs = save(family, tmp_path)
    ours = tk.load_pretrained(tmp_path)
    unused = 2 * 32 if family.startswith("roberta") else 0  # the positions of padding
    assert not ours.training and ours.num_parameters() == theirs.num_parameters() - unused
    expected, given = results(theirs), results(ours)
    assert given.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(given[name], value, rtol=1e-5, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in ("gpt2_alone", "llama_scaled")])
@torch.no_grad()
def test_exported_models_are_loaded_by_transformers(family, tmp_path):
    save(family, tmp_path / "theirs")
    ours = tk.load_pretrained(tmp_path / "theirs")
    tk.export_pretrained(ours, tmp_path / "ours")
    kind = getattr(transformers, FAMILIES[family][0].replace("Roberta", "Bert"))
    loaded, report = kind.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    given, expected = results(loaded.eval()), results(ours)
    for name, value in expected.items():
        torch.testing.assert_close(given[name], value, rtol=1e-5, atol=1e-5)
    again = tk.load_pretrained(tmp_path / "ours")
    assert again.config == ours.config
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), ours.parameters(), strict=True))


@pytest.mark.slow
@torch.no_grad()
def test_a_random_distilgpt2(tmp_path):
    torch.manual_seed(0)
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=6)).eval()
    theirs.save_pretrained(tmp_path)
    ours = tk.load_pretrained(tmp_path)
    assert ours.num_parameters() == 81_912_576
    tokens = torch.tensor([[464, 2068, 7586, 21831]])
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=0, atol=1e-4)
    written = tokens
    for _ in range(20):
        written = torch.cat((written, ours(written)[:, -1:].argmax(-1)), 1)
    expected = theirs.generate(tokens, max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert torch.equal(written, expected)


def test_models_that_transformers_does_not_have_are_not_exported(tmp_path):
    shape = {"vocab_size": 9, "context": 4, "width": 8, "layers": 1, "heads": 2}
    with pytest.raises(ValueError, match="norm='post' has no counterpart; it must be 'pre'"):
        tk.export_pretrained(GPT(GPTConfig(**shape, norm="post")), tmp_path)
    with pytest.raises(ValueError, match="embedding_norm=False has no counterpart"):
        tk.export_pretrained(Encoder(EncoderConfig(**shape, norm="post", final_norm=False)), tmp_path)
    with pytest.raises(TypeError, match=r"must be a python_ref\.GPT, Encoder or ViT; got Linear"):
        tk.export_pretrained(torch.nn.Linear(2, 2), tmp_path)
    assert not list(tmp_path.iterdir())


def test_heads_that_are_not_there():
    model = Encoder(EncoderConfig(vocab_size=9, context=4, width=8, layers=1, heads=2, pooler=False))
    with pytest.raises(ValueError, match="the model has no pooler"):
        model.pooled(torch.zeros(1, 2, 8))
    with pytest.raises(ValueError, match="no head for masked tokens"):
        model.token_logits(torch.zeros(1, 2, 8))
    with pytest.raises(ValueError, match="pooling must be 'mean' or 'cls'; got 'max'"):
        model.sentences(torch.zeros(1, 2, dtype=torch.long), pooling="max")


def rewrite(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")


def configure(folder, **fields):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))


FINAL_NORM = "transformer.ln_f.weight"
BREAKAGES = {
    "no config": (lambda f: (f / "config.json").unlink(), FileNotFoundError, "config.json: no such file"),
    "config is no JSON": (lambda f: (f / "config.json").write_text("{"), ValueError, "not JSON"),
    "config is a list": (
        lambda f: (f / "config.json").write_text("[]"),
        ValueError,
        "must contain an object; got list",
    ),
    "architecture": (lambda f: configure(f, model_type="mamba"), ValueError, "must be one of gpt2, .*; got 'mamba'"),
    "size is missing": (
        lambda f: (f / "config.json").write_text('{"model_type": "gpt2"}'),
        ValueError,
        "'vocab_size' is missing",
    ),
    "activation": (lambda f: configure(f, activation_function="silu"), ValueError, "must be one of gelu, .*'silu'"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), FileNotFoundError, "model.safetensors: no such file"),
    "pickle": (
        lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"),
        ValueError,
        "pytorch_model.bin is a pickle, which is never loaded",
    ),
    "truncated": (
        lambda f: os.truncate(f / "model.safetensors", (f / "model.safetensors").stat().st_size - 8),
        ValueError,
        "truncated or not safetensors",
    ),
    "missing": (
        lambda f: rewrite(f, lambda w: (w.pop("transformer.h.1.ln_2.bias"), w.pop("transformer.ln_f.weight"))),
        ValueError,
        "transformer.h.1.ln_2.bias is missing; transformer.ln_f.weight is missing",
    ),
    "unknown": (
        lambda f: rewrite(f, lambda w: w.update(a=torch.ones(1), b=torch.ones(1))),
        ValueError,
        "a is unknown; b is unknown",
    ),
    "another shape": (lambda f: configure(f, n_positions=32), ValueError, r"wpe.weight has shape \(64, 32\); expected"),
    "a billion layers": (lambda f: configure(f, n_layer=10**9), ValueError, "1000000000 layers are configured; there"),
    "layers are a word": (lambda f: configure(f, n_layer="two"), ValueError, "values that no model has"),
    "no heads": (lambda f: configure(f, n_head=0), ValueError, "head"),
    "nested": (lambda f: (f / "config.json").write_text("[" * 100_000), ValueError, "config.json: not JSON"),
    "index is a list": (
        lambda f: (f / "model.safetensors.index.json").write_text("[]"),
        ValueError,
        "index.json: no weight_map from tensors to files",
    ),
    "index without a map": (
        lambda f: (f / "model.safetensors.index.json").write_text("{}"),
        ValueError,
        "index.json: no weight_map from tensors to files",
    ),
    "integers": (
        lambda f: rewrite(f, lambda w: w.update({FINAL_NORM: w[FINAL_NORM].to(torch.int8)})),
        ValueError,
        "transformer.ln_f.weight is torch.int8, which is not dequantised",
    ),
    "NaN": (
        lambda f: rewrite(f, lambda w: w[FINAL_NORM].fill_(float("nan"))),
        ValueError,
        "transformer.ln_f.weight has values that are not finite",
    ),
    "no model": (lambda f: configure(f, n_head=5), ValueError, "divisible by the number of heads"),
}


@pytest.mark.parametrize("breakage", BREAKAGES)
def test_broken_folders(breakage, tmp_path):
    save("gpt2", tmp_path)
    apply, kind, message = BREAKAGES[breakage]
    apply(tmp_path)
    with pytest.raises(kind, match=message):
        tk.load_pretrained(tmp_path)


@pytest.mark.parametrize(("family", "embedding"), [("gpt2", "transformer.wte"), ("llama_tied", "model.embed_tokens")])
def test_a_tied_head_may_be_stored_too(family, embedding, tmp_path):
    """Files written by PyTorch's own serialisation contain the tied matrix under both names."""
    save(family, tmp_path)
    expected = tk.load_pretrained(tmp_path).state_dict()
    rewrite(tmp_path, lambda weights: weights.update({"lm_head.weight": weights[f"{embedding}.weight"].clone()}))
    loaded = tk.load_pretrained(tmp_path).state_dict()
    assert loaded.keys() == expected.keys() and all(torch.equal(loaded[name], expected[name]) for name in expected)


NOT_OURS = {
    "bert": {"position_embedding_type": "relative_key", "is_decoder": True, "tie_word_embeddings": False},
    "roberta": {"pad_token_id": 5, "position_embedding_type": "relative_key", "is_decoder": True},
    "distilbert": {"sinusoidal_pos_embds": True, "tie_word_embeddings": False},
    "gpt2": {"scale_attn_weights": False, "scale_attn_by_inverse_layer_idx": True, "add_cross_attention": True},
    "llama": {"hidden_act": "gelu", "mlp_bias": True, "head_dim": 5},
    "vit": {"qkv_bias": False},
}


@pytest.mark.parametrize(("family", "field"), [(family, field) for family in NOT_OURS for field in NOT_OURS[family]])
def test_what_our_definitions_lack_is_refused(family, field):
    theirs = getattr(transformers, FAMILIES[family][1])(**FAMILIES[family][2]).to_dict()
    theirs[field] = NOT_OURS[family][field]
    with pytest.raises(ValueError, match=f"config.json: {field} must be .*; got {theirs[field]!r}"):
        ARCHITECTURES[family].configure(theirs, set())


def test_a_folder_that_is_not_there(tmp_path):
    for load in (tk.load_pretrained, load_tokenizer):
        with pytest.raises(FileNotFoundError, match="nowhere: no such folder or file"):
            load(tmp_path / "nowhere")


def test_sharded_weights(tmp_path):
    theirs = save("gpt2", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    names = sorted(weights)
    parts = {"one.safetensors": names[:5], "two.safetensors": names[5:]}
    for file, content in parts.items():
        save_file({name: weights[name] for name in content}, tmp_path / file)
    index = {"weight_map": {name: file for file, content in parts.items() for name in content}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "model.safetensors").unlink()
    assert tk.load_pretrained(tmp_path).num_parameters() == theirs.num_parameters()
    (tmp_path / "two.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"two\.safetensors: no such file"):
        tk.load_pretrained(tmp_path)


# Tokenizers

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "happy", "dog", "##s"]


def test_word_pieces(tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS))
    tokenizer = load_tokenizer(tmp_path, vocab_size=9)
    assert tokenizer.encode("A happy dogs cat").ids == [2, 5, 6, 7, 8, 1, 3]
    (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    assert load_tokenizer(tmp_path).encode("A dog").ids == [2, 1, 7, 3]
    with pytest.raises(ValueError, match="has 9 tokens, the model only 8; it belongs to another model"):
        load_tokenizer(tmp_path, vocab_size=8)


def test_byte_pairs(tmp_path):
    vocabulary = {token: index for index, token in enumerate(["a", "b", "Ġ", "ab", "Ġab"])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\nĠ ab\n", encoding="utf-8")
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("ab aba").ids == [3, 4, 0]
    assert tokenizer.decode([3, 4, 0]) == "ab aba"


def test_the_byte_pairs_of_gpt2():
    checkout = Path(__file__).parents[1]
    folder = Path(os.environ.get("TRANSFORMER_KERNELS_DATA") or checkout.parent / "shared" / "data") / "gpt2_bpe"
    if not folder.is_dir():
        pytest.skip("no real data: set TRANSFORMER_KERNELS_DATA to a folder with gpt2_bpe")
    tokenizer = load_tokenizer(folder, vocab_size=50_257)
    assert tokenizer.encode("The quick brown fox").ids == [464, 2068, 7586, 21831]
    assert tokenizer.decode([464, 2068, 7586, 21831]) == "The quick brown fox"


def test_broken_tokenizers(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no tokenizer.json, vocab.txt, or vocab.json with merges.txt"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="the tokenizer cannot be loaded"):
        load_tokenizer(tmp_path)


# GGUF


def string(text):
    return struct.pack("<Q", len(text.encode())) + text.encode()


def entry(name, value):
    if isinstance(value, str):
        return string(name) + struct.pack("<I", 8) + string(value)
    if isinstance(value, list):
        return string(name) + struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(string, value))
    return string(name) + (struct.pack("<If", 6, value) if isinstance(value, float) else struct.pack("<II", 4, value))


def write_gguf(path, metadata, tensors):
    """A file of version 3; tensors are (shape, format number, bytes)."""
    header = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(metadata))
    header += b"".join(entry(name, value) for name, value in metadata.items())
    content = b""
    for name, (shape, form, stored) in tensors.items():
        header += string(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        header += struct.pack("<IQ", form, len(content))
        content += stored + bytes(-len(stored) % 32)
    path.write_bytes(header + bytes(-len(header) % 32) + content)


def half(*numbers):
    return np.array(numbers, np.float16).tobytes()


NIBBLES = bytes((low | high << 4) for low, high in zip(range(16), reversed(range(16)), strict=True))
LEVELS = np.array([*range(16), *reversed(range(16))], np.float32)
STORED = {
    "F32": (0, np.arange(32, dtype=np.float32).tobytes(), np.arange(32.0)),
    "F16": (1, np.arange(32, dtype=np.float16).tobytes(), np.arange(32.0)),
    "Q4_0": (2, half(0.5) + NIBBLES, (LEVELS - 8) * 0.5),
    "Q4_1": (3, half(0.5, -1.0) + NIBBLES, LEVELS * 0.5 - 1.0),
    "Q8_0": (8, half(0.25) + np.arange(-16, 16, dtype=np.int8).tobytes(), np.arange(-16, 16) * 0.25),
}


@pytest.mark.parametrize("form", STORED)
def test_stored_forms(form, tmp_path):
    number, content, expected = STORED[form]
    for architecture in ("llama" + "a" * more for more in range(32)):  # the header ends at every offset from a multiple
        write_gguf(tmp_path / "a.gguf", {"general.architecture": architecture}, {"x": ((2, 16), number, content)})
        file = GGUF(tmp_path / "a.gguf")
        assert file.metadata == {"general.architecture": architecture}
        assert torch.equal(file.tensor("x"), torch.tensor(expected, dtype=torch.float32).view(2, 16))


GGUF_LAYERS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate"}
GGUF_LAYERS |= {"mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "self_attn.o_proj": "attn_output"}
GGUF_LAYERS |= {f"self_attn.{name}_proj": f"attn_{name}" for name in "qkv"}
GGUF_WHOLE = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
GGUF_WHOLE |= {"lm_head.weight": "output.weight"}


def llama_as_gguf(path, theirs, **optional):
    tensors = {}
    for name, value in theirs.state_dict().items():
        part = next((part for part in GGUF_LAYERS if part in name), None)
        stored = GGUF_WHOLE.get(name) or f"blk.{name.split('.')[2]}.{GGUF_LAYERS[part]}.weight"
        if part in ("self_attn.q_proj", "self_attn.k_proj"):  # the two rows of a rotated pair are adjacent
            value = value.unflatten(0, (-1, 2, 4)).transpose(1, 2).flatten(0, 2)
        tensors[stored] = (tuple(value.shape), 0, value.contiguous().numpy().tobytes())
    sizes = {"block_count": 2, "context_length": 64, "embedding_length": 32, "feed_forward_length": 48}
    sizes |= {"attention.head_count": 4, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-6}
    sizes |= optional
    metadata = {"general.architecture": "llama", "tokenizer.ggml.tokens": [str(index) for index in range(97)]}
    write_gguf(path, metadata | {f"llama.{name}": value for name, value in sizes.items()}, tensors)


@torch.no_grad()
def test_a_llama_in_a_gguf_file(tmp_path):
    tokens, _ = tokens_and_mask()
    for base, optional in ((1e4, {}), (5e5, {"rope.freq_base": 5e5})):
        theirs = save("llama", tmp_path, rope_parameters={"rope_type": "default", "rope_theta": base})
        llama_as_gguf(tmp_path / "llama.gguf", theirs, **optional)
        ours = tk.load_pretrained(tmp_path / "llama.gguf")
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-5, atol=1e-5)


def test_broken_gguf_files(tmp_path):
    path = tmp_path / "a.gguf"
    path.write_bytes(b"not a model at all, but long enough to be one")
    with pytest.raises(ValueError, match="not a GGUF file of version 2 or 3"):
        tk.load_pretrained(path)
    write_gguf(path, {"general.architecture": "mamba"}, {})
    with pytest.raises(ValueError, match="must be 'llama'; got 'mamba'"):
        tk.load_pretrained(path)
    write_gguf(path, {"general.architecture": "llama"}, {})
    with pytest.raises(ValueError, match=r"'llama\.block_count' is missing in the metadata"):
        tk.load_pretrained(path)
    write_gguf(path, {}, {"x": ((2, 16), 12, b"")})
    with pytest.raises(ValueError, match="x has format 12; supported are F32, F16, Q4_0"):
        GGUF(path).tensor("x")
    for alignment in (0, "32"):
        write_gguf(path, {"general.alignment": alignment}, {})
        with pytest.raises(ValueError, match=f"alignment must be a positive integer; got {alignment!r}"):
            GGUF(path)
    llama_as_gguf(path, save("llama", tmp_path))
    whole = path.read_bytes()
    sizes = {
        "block_count": (2**31 - 1, "2147483647 layers are configured"),
        "attention.head_count": (0, "0 heads cannot share 32 rows"),
    }
    for name, (value, message) in sizes.items():
        at = whole.index(f"llama.{name}".encode()) + len(f"llama.{name}") + 4
        path.write_bytes(whole[:at] + value.to_bytes(4, "little") + whole[at + 4 :])
        with pytest.raises(ValueError, match=message):
            tk.load_pretrained(path)
    path.write_bytes(whole[:24] + (2**62).to_bytes(8, "little") + whole[32:])  # the length of the first string
    with pytest.raises(ValueError, match="truncated within its header"):
        tk.load_pretrained(path)
    path.write_bytes(whole)
    os.truncate(path, path.stat().st_size - 64)
    with pytest.raises(ValueError, match="truncated within"):
        tk.load_pretrained(path)
    os.truncate(path, 100)
    with pytest.raises(ValueError, match="truncated within its header"):
        tk.load_pretrained(path)


# Real weights

SENTENCES = ["That is a happy person", "That is a happy dog", "Today is a sunny day", "It rains.", "What?", "One two"]


@torch.no_grad()
def test_minilm():
    folder = minilm()
    model, theirs = tk.load_pretrained(folder), transformers.BertModel.from_pretrained(folder).eval()
    assert model.num_parameters() == 22_713_216
    tokenizer = load_tokenizer(folder, model.config.vocab_size)
    tokenizer.enable_padding()
    batch = tokenizer.encode_batch(SENTENCES)
    tokens, mask = torch.tensor([row.ids for row in batch]), torch.tensor([row.attention_mask for row in batch]).bool()
    expected = theirs(tokens, attention_mask=mask.long())
    hidden = model(tokens, mask)
    assert ((hidden - expected.last_hidden_state).abs() * mask.unsqueeze(-1)).max() < 1e-5
    assert (model.pooled(hidden) - expected.pooler_output).abs().max() < 1e-5
    vectors = model.sentences(tokens, mask)
    cosines = vectors @ vectors[0]
    torch.testing.assert_close(cosines[1:3], torch.tensor([0.6946, 0.2569]), rtol=0, atol=2e-4)


@pytest.mark.slow
@torch.no_grad()
def test_smollm2():
    model = tk.load_pretrained(smollm2())
    prompt = model.tokenizer.encode("The meaning of life is").ids
    assert prompt == [504, 2455, 282, 1029, 314]
    likely = model(torch.tensor([prompt]))[0, -1].softmax(-1).topk(3)
    assert [model.tokenizer.decode([token]) for token in likely.indices] == [" not", " a", " often"]
    torch.testing.assert_close(likely.values, torch.tensor([0.0996, 0.0912, 0.0785]), rtol=0, atol=2e-3)
    written = model.generate("The meaning of life is", max_new_tokens=18)
    assert written == (
        "The meaning of life is not just a random choice, but a choice made by someone who has chosen to live."
    )


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_an_old_scaling_of_rotary_positions_is_refused(key, tmp_path):
    """Also under its name before transformers 5: `rope_scaling` with `rope_theta`."""
    save("llama", tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config.pop("rope_parameters", None)
    path.write_text(json.dumps(config | {"rope_theta": 1e4, "rope_scaling": {key: "linear", "factor": 2.0}}))
    with pytest.raises(ValueError, match="rope_type must be 'default' or 'llama3'; got 'linear'"):
        tk.load_pretrained(tmp_path)
