"""Weights of handwritten models under their usual names give the results of our definitions."""

import contextlib
import random
import re

import pytest
import torch

import transformer_kernels as tk
from transformer_kernels.pretrained import load_tutorial

SMALL = {"width": 16, "layers": 2, "heads": 2, "context": 12}


def make(preset, **fields):
    torch.manual_seed(0)
    model = tk.build(preset, "torch", **SMALL, vocab_size=23, **fields).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def renamed(model, names, parts=lambda q, k, v, kind: {}):
    """The state dict with each of our patterns under another name, and q, k and v separate."""
    given = {}
    for name, tensor in model.state_dict().items():
        if packed := re.fullmatch(r"blocks\.(\d+)\.attention\.qkv\.(weight|bias)", name):
            split = parts(*tensor.chunk(3), packed[2])
            given |= {key.format(packed[1]): value.clone() for key, value in split.items()}
            continue
        for ours, theirs in names.items():
            name = re.sub(ours, theirs, name)
        given[name] = tensor
    return given


BOOK = {
    r"^embedding\.tokens\.weight": "embedding.weight",
    r"^blocks\.(\d+)\.attention\.out": r"blks.block\1.attention.W_o",
    r"^blocks\.(\d+)\.attention_norm": r"blks.block\1.addnorm1.ln",
    r"^blocks\.(\d+)\.feed_forward_norm": r"blks.block\1.addnorm2.ln",
    r"^blocks\.(\d+)\.feed_forward\.up": r"blks.block\1.ffn.dense1",
    r"^blocks\.(\d+)\.feed_forward\.down": r"blks.block\1.ffn.dense2",
    r"^head_": "dense.",
}
LECTURE = {
    r"^embedding\.tokens": "token_embedding_table",
    r"^embedding\.positions": "position_embedding_table.weight",
    r"^blocks\.(\d+)\.attention\.out": r"blocks.\1.sa.proj",
    r"^blocks\.(\d+)\.attention_norm": r"blocks.\1.ln1",
    r"^blocks\.(\d+)\.feed_forward_norm": r"blocks.\1.ln2",
    r"^blocks\.(\d+)\.feed_forward\.up": r"blocks.\1.ffwd.net.0",
    r"^blocks\.(\d+)\.feed_forward\.down": r"blocks.\1.ffwd.net.2",
    r"^final_norm": "ln_f",
    r"^head_": "lm_head.",
}
BERT = {
    r"^embedding\.tokens": "embedding.tok_embed",
    r"^embedding\.positions": "embedding.pos_embed.weight",
    r"^embedding\.segments": "embedding.seg_embed",
    r"^blocks\.(\d+)\.attention\.out": r"layers.\1.enc_self_attn.fc",
    r"^blocks\.(\d+)\.attention_norm": r"layers.\1.norm1",
    r"^blocks\.(\d+)\.feed_forward_norm": r"layers.\1.norm2",
    r"^blocks\.(\d+)\.feed_forward\.up": r"layers.\1.pos_ffn.fc1",
    r"^blocks\.(\d+)\.feed_forward\.down": r"layers.\1.pos_ffn.fc2",
}


def per_head(q, k, v, kind):
    parts = zip(("query", "key", "value"), (q, k, v), strict=True)
    return {
        f"blocks.{{0}}.sa.heads.{n}.{name}.{kind}": x for name, whole in parts for n, x in enumerate(whole.chunk(2))
    }


def in_words(prefix):
    return lambda q, k, v, kind: {f"{prefix}{name}.{kind}": x for name, x in (("q", q), ("k", k), ("v", v))}


def test_a_character_gpt_in_the_names_of_a_book(tmp_path):
    model = make("char_gpt")
    state = renamed(model, BOOK, in_words("blks.block{0}.attention.W_"))
    state["pos_encoding.P"] = torch.zeros(1, 12, 16)
    torch.save({"epoch": torch.tensor(3), "model_state_dict": state}, tmp_path / "gpt.pt")
    loaded = load_tutorial(tmp_path / "gpt.pt", "char_gpt", backend="torch", heads=2, context=12)
    tokens = torch.arange(12).unsqueeze(0)
    assert loaded.config == model.config.__class__(**{**vars(model.config), "ffn_width": 64})
    assert torch.equal(loaded(tokens), model(tokens)) and not loaded.training


def test_a_character_gpt_with_separate_heads(tmp_path):
    model = make("char_gpt", norm="pre", positions="learned", final_norm=True, attention_bias=True)
    state = renamed(model, LECTURE, per_head)
    state |= {f"module.blocks.{n}.sa.heads.0.tril": torch.ones(2, 2) for n in (0, 1)}
    torch.save(state, tmp_path / "gpt.pt")
    loaded = load_tutorial(tmp_path / "gpt.pt", "char_gpt", backend="torch", heads=2, norm="pre")
    tokens = torch.arange(12).unsqueeze(0)
    assert torch.equal(loaded(tokens), model(tokens))


def test_a_bert(tmp_path):
    model = make("imdb_bert", classes=3)
    state = renamed(model, BERT, in_words("layers.{0}.enc_self_attn.W_"))
    state["embedding.pos_embed.weight"] = state["embedding.pos_embed.weight"].unsqueeze(0)
    torch.save(state, tmp_path / "bert.pt")
    loaded = load_tutorial(tmp_path / "bert.pt", "imdb_bert", backend="torch", heads=2)
    tokens, mask = torch.arange(12).view(2, 6), torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
    assert torch.equal(loaded(tokens, mask), model(tokens, mask))


def test_every_unknown_name_is_reported_and_can_be_given(tmp_path):
    model = make("char_gpt")
    state = renamed(model, BOOK, in_words("blks.block{0}.attention.W_"))
    state["blks.block0.gate.weight"], state["blks.block1.strange"] = torch.ones(2), torch.ones(2)
    state["vocabulary_in"] = state.pop("embedding.weight")
    torch.save(state, tmp_path / "gpt.pt")
    with pytest.raises(ValueError, match=r"names=: blks\.block0\.gate\.weight, blks\.block1\.strange, vocabulary_in"):
        load_tutorial(tmp_path / "gpt.pt", "char_gpt", backend="torch", heads=2)
    del state["blks.block0.gate.weight"], state["blks.block1.strange"], state["dense.bias"]
    torch.save(state, tmp_path / "gpt.pt")
    names = {"vocabulary_in": "embedding.tokens.weight"}
    loaded = load_tutorial(tmp_path / "gpt.pt", "char_gpt", names=names, backend="torch", heads=2, context=12)
    assert torch.equal(loaded.head_weight, model.head_weight) and loaded.head_bias is None


def test_what_is_missing_or_of_another_shape_is_reported(tmp_path):
    state = renamed(make("char_gpt"), BOOK, in_words("blks.block{0}.attention.W_"))
    state["dense.bias"] = torch.zeros(4)
    del state["blks.block1.ffn.dense2.bias"]
    torch.save(state, tmp_path / "gpt.pt")
    with pytest.raises(ValueError, match=r"blocks\.1\.feed_forward\.down\.bias is missing; head_bias has shape \(4,\)"):
        load_tutorial(tmp_path / "gpt.pt", "char_gpt", backend="torch", heads=2)


def test_nothing_is_executed(tmp_path):
    torch.save(make("char_gpt"), tmp_path / "model.pt")
    with pytest.raises(ValueError, match="not a state dict that can be loaded without executing code"):
        load_tutorial(tmp_path / "model.pt", "char_gpt")
    (tmp_path / "broken.pt").write_bytes(b"PK not a model")
    with pytest.raises(ValueError, match="not a state dict"):
        load_tutorial(tmp_path / "broken.pt", "char_gpt")
    torch.save([torch.ones(2)], tmp_path / "list.pt")
    with pytest.raises(ValueError, match=r"must contain a state dict \(a dictionary of tensors\); got list"):
        load_tutorial(tmp_path / "list.pt", "char_gpt")
    with pytest.raises(FileNotFoundError, match=r"nothing\.pt: no such file"):
        load_tutorial(tmp_path / "nothing.pt", "char_gpt")
    with pytest.raises(ValueError, match="preset must be one of imdb_bert, char_gpt; got 'gpt2'"):
        load_tutorial(tmp_path / "list.pt", "gpt2")
    with pytest.raises(ValueError, match=r"model\.pt: a state dict saved by torch\.save; use load_tutorial"):
        tk.load_pretrained(tmp_path / "model.pt")


TOKENS = "embedding.weight"
STRANGE = {
    "one dimension": lambda state: state | {TOKENS: torch.zeros(5)},
    "no dimension": lambda state: state | {TOKENS: torch.tensor(1.0)},
    "not finite": lambda state: state | {TOKENS: state[TOKENS] * torch.nan},
    "complex": lambda state: state | {TOKENS: state[TOKENS].to(torch.complex64)},
    "sparse": lambda state: state | {TOKENS: state[TOKENS].to_sparse()},
    "without values": lambda state: state | {TOKENS: torch.zeros(4, 4, device="meta")},
    "more than the file has": lambda state: state | {TOKENS: torch.zeros(1).expand(10**7, 10**5)},
    "a layer of a large number": lambda state: state | {"blks.99999999.attention.W_q.weight": torch.zeros(4, 4)},
    "a layer of a longer number": lambda state: state | {f"blks.{'9' * 5000}.attention.W_q.weight": torch.zeros(4)},
    "parts that do not fit": lambda state: state | {"blks.block0.attention.W_q.weight": torch.zeros(8, 3)},
}


@pytest.mark.parametrize("kind", STRANGE)
def test_tensors_that_no_model_has(kind, tmp_path):
    state = renamed(make("char_gpt"), BOOK, in_words("blks.block{0}.attention.W_"))
    assert TOKENS in state and "blks.block0.attention.W_q.weight" in state
    torch.save(STRANGE[kind](state), tmp_path / "gpt.pt")
    with pytest.raises(ValueError, match=r"gpt\.pt: "):
        load_tutorial(tmp_path / "gpt.pt", "char_gpt", backend="torch", heads=2)


def test_damaged_bytes(tmp_path):
    torch.save(renamed(make("char_gpt"), BOOK, in_words("blks.block{0}.attention.W_")), tmp_path / "gpt.pt")
    content, draws = (tmp_path / "gpt.pt").read_bytes(), random.Random(0)
    for _ in range(150):
        damaged = bytearray(content)
        for _ in range(draws.choice((1, 3, 20))):
            damaged[draws.randrange(len(content))] = draws.randrange(256)
        (tmp_path / "gpt.pt").write_bytes(damaged)
        with contextlib.suppress(ValueError):
            load_tutorial(tmp_path / "gpt.pt", "char_gpt", backend="torch", heads=2)
