"""Pretrained folders and files: results of transformers, export, and errors of invalid files."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

import transformer_kernels as tk
from python_ref import GPT, GPTConfig
from python_ref.encoder import Encoder, EncoderConfig
from python_ref.vit import ViT
from tests.support.real_weights import minilm, smollm2
from transformer_kernels.pretrained.architectures import ARCHITECTURES
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


def shards(folder, weight_map):
    (folder / "model.safetensors").rename(folder / "one.safetensors")
    index = {} if weight_map is None else {"weight_map": weight_map} if isinstance(weight_map, dict) else weight_map
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


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
    "layers are a word": (
        lambda f: configure(f, n_layer="two"),
        ValueError,
        r"config.json: n_layer must be an integer in \[0, 2147483648\); got 'two'",
    ),
    "half a layer": (lambda f: configure(f, n_layer=1.5), ValueError, "n_layer must be an integer .*; got 1.5"),
    "layers are true": (lambda f: configure(f, n_layer=True), ValueError, "n_layer must be an integer .*; got True"),
    "absurd": (lambda f: configure(f, vocab_size=10**30), ValueError, "vocab_size must be an integer in .*; got 1000"),
    "large": (
        lambda f: configure(f, n_embd=2**31 - 4, n_positions=2**31 - 1),
        ValueError,
        r"gpt2: transformer.wte.weight has shape \(97, 32\); expected \(97, 2147483646\)|no model has",
    ),
    "NaN in the config": (
        lambda f: (f / "config.json").write_text('{"layer_norm_epsilon": NaN}'),
        ValueError,
        "config.json: not JSON: the number NaN",
    ),
    "an infinite epsilon": (
        lambda f: (f / "config.json").write_text((f / "config.json").read_text().replace("1e-05", "1e999")),
        ValueError,
        "config.json: layer_norm_epsilon must be a number .*; got inf",
    ),
    "tied is a word": (
        lambda f: configure(f, tie_word_embeddings="no"),
        ValueError,
        "tie_word_embeddings must be true or false; got 'no'",
    ),
    "quantised": (
        lambda f: configure(f, quantization_config={"quant_method": "fp8"}),
        ValueError,
        "config.json: quantization_config must be None",
    ),
    "an adapter": (
        lambda f: (f / "adapter_config.json").write_text("{}"),
        ValueError,
        "adapter_config.json: the folder has an adapter; merge it",
    ),
    "no head": (
        lambda f: configure(f, tie_word_embeddings=False),
        ValueError,
        "lm_head.weight is missing",
    ),
    "config is a FIFO": (
        lambda f: ((f / "config.json").unlink(), os.mkfifo(f / "config.json")),
        ValueError,
        "config.json: must be a regular file",
    ),
    "weights are a FIFO": (
        lambda f: ((f / "model.safetensors").unlink(), os.mkfifo(f / "model.safetensors")),
        ValueError,
        "model.safetensors: must be a regular file",
    ),
    "a scalar": (
        lambda f: rewrite(f, lambda w: w.update({"transformer.wpe.weight": torch.tensor(1.0)})),
        ValueError,
        r"transformer.wpe.weight has shape \(\); expected \(64, 32\)",
    ),
    "another tied head": (
        lambda f: rewrite(f, lambda w: w.update({"lm_head.weight": w["transformer.wte.weight"] + 1})),
        ValueError,
        "lm_head.weight has other values than transformer.wte.weight, with which it is tied",
    ),
    "index of other files": (
        lambda f: shards(f, {"a": "../model.safetensors"}),
        ValueError,
        r"index.json: weight_map must name files of the folder; got '../model",
    ),
    "index without a tensor": (
        lambda f: shards(f, {FINAL_NORM: "one.safetensors"}),
        ValueError,
        "one.safetensors: not the tensors that model.safetensors.index.json lists: .* and 22 more",
    ),
    "no heads": (lambda f: configure(f, n_head=0), ValueError, "head"),
    "nested": (lambda f: (f / "config.json").write_text("[" * 100_000), ValueError, "config.json: not JSON"),
    "index is a list": (lambda f: shards(f, []), ValueError, "index.json: must contain an object; got list"),
    "index without a map": (lambda f: shards(f, None), ValueError, "index.json: no weight_map from tensors to files"),
    "index of numbers": (lambda f: shards(f, {"a": 1}), ValueError, "index.json: no weight_map from tensors to files"),
    "integers": (
        lambda f: rewrite(f, lambda w: w.update({FINAL_NORM: w[FINAL_NORM].to(torch.int8)})),
        ValueError,
        "transformer.ln_f.weight is I8, which is not dequantised",
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


COPIES = {
    "bert": {"cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight"},
    "roberta": {"lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight"},
    "distilbert": {"vocab_projector.weight": "distilbert.embeddings.word_embeddings.weight"},
}
COPIES["bert"]["cls.predictions.decoder.bias"] = "cls.predictions.bias"
COPIES["roberta"]["lm_head.decoder.bias"] = "lm_head.bias"


@pytest.mark.parametrize("family", COPIES)
def test_the_tied_head_of_an_encoder_may_be_stored_if_it_is_the_same(family, tmp_path):
    save(family, tmp_path)
    for name, other in COPIES[family].items():
        rewrite(tmp_path, lambda weights, n=name, o=other: weights.update({n: weights[o].clone()}))
        tk.load_pretrained(tmp_path)
        rewrite(tmp_path, lambda weights, n=name: weights[n].add_(1.0))
        with pytest.raises(ValueError, match=f"{name} has other values than {other}"):
            tk.load_pretrained(tmp_path)
        rewrite(tmp_path, lambda weights, n=name: weights.pop(n))


def test_weights_of_a_head_that_is_not_used_are_named(tmp_path):
    save("bert", tmp_path)
    rewrite(tmp_path, lambda weights: weights.update({"cls.seq_relationship.weight": torch.zeros(2, 32)}))
    with pytest.warns(UserWarning, match=r"not used: cls\.seq_relationship\.weight"):
        tk.load_pretrained(tmp_path)


def test_names_that_resemble_a_buffer_are_unknown(tmp_path):
    save("gpt2", tmp_path)
    rewrite(tmp_path, lambda weights: weights.update({"transformer.h.0.attn.bias": torch.ones(1, 1, 64, 64)}))
    tk.load_pretrained(tmp_path)
    rewrite(tmp_path, lambda weights: weights.update({"transformer.h.0.attn.bias_k": torch.ones(64)}))
    with pytest.raises(ValueError, match=r"transformer\.h\.0\.attn\.bias_k is unknown"):
        tk.load_pretrained(tmp_path)


@torch.no_grad()
def test_a_single_file_takes_precedence_over_an_index(tmp_path):
    """The index and shards of an earlier save, as transformers decides."""
    theirs = save("gpt2", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    save_file({name: weight * 0 for name, weight in weights.items()}, tmp_path / "one.safetensors")
    index = {"weight_map": dict.fromkeys(weights, "one.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.warns(UserWarning, match=r"model\.safetensors is read; model\.safetensors\.index\.json is ignored"):
        ours = tk.load_pretrained(tmp_path)
    assert torch.equal(transformers.GPT2LMHeadModel.from_pretrained(tmp_path).lm_head.weight, theirs.lm_head.weight)
    assert torch.equal(ours.embedding.tokens.weight, theirs.lm_head.weight)


NOT_OURS = {
    "bert": {"position_embedding_type": "relative_key", "is_decoder": True, "tie_word_embeddings": False},
    "roberta": {"pad_token_id": 5, "position_embedding_type": "relative_key", "is_decoder": True},
    "distilbert": {"sinusoidal_pos_embds": True, "tie_word_embeddings": False},
    "gpt2": {"scale_attn_weights": False, "scale_attn_by_inverse_layer_idx": True, "add_cross_attention": True},
    "llama": {"hidden_act": "gelu", "mlp_bias": True, "head_dim": 5, "partial_rotary_factor": 0.5},
    "vit": {"qkv_bias": False},
}


@pytest.mark.parametrize(("family", "field"), [(family, field) for family in NOT_OURS for field in NOT_OURS[family]])
def test_what_our_definitions_lack_is_refused(family, field):
    theirs = getattr(transformers, FAMILIES[family][1])(**FAMILIES[family][2]).to_dict()
    theirs[field] = NOT_OURS[family][field]
    with pytest.raises(ValueError, match=f"{field} must be .*; got {theirs[field]!r}"):
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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"factor": "8"}, "factor must be a positive number; got '8'"),
        ({"factor": 0}, "factor must be a positive number; got 0"),
        ({"low_freq_factor": 4.0, "high_freq_factor": 1.0}, "low_freq_factor must be below high_freq_factor"),
        ({"rope_theta": True}, "rope_theta must be a positive number; got True"),
        ({"type": "linear"}, "rope_type must be 'default' or 'llama3'; got 'linear'"),
    ],
)
def test_numbers_of_rotary_positions_that_no_model_has(change, message, tmp_path):
    save("llama", tmp_path)
    path = tmp_path / "config.json"
    rotary = {**LLAMA3, "original_max_position_embeddings": 8, **change}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rope_parameters": rotary}))
    with pytest.raises(ValueError, match=message):
        tk.load_pretrained(tmp_path)
