"""The encoder-decoder: its masks and caches, and equality with torch.nn where that has the same layers."""

import dataclasses

import pytest
import torch
from torch import nn

import python_ref
from python_ref.translator import TRANSLATOR, Translator, TranslatorConfig

SMALL = {
    "source_vocab_size": 17,
    "vocab_size": 13,
    "context": 12,
    "width": 24,
    "layers": 2,
    "heads": 6,
    "ffn_width": 40,
    "dropout": 0.0,
}
KINDS = {
    "pre": {"positions": "sinusoidal"},
    "post": {"norm": "post", "final_norm": False, "activation": "relu", "encoder_layers": 1},
    "rms": {"norm": "rms", "positions": "rotary", "activation": "swiglu", "kv_heads": 2, "attention_bias": False},
    "learned": {"tied": False, "head_bias": True, "value_dim": 7, "qk_norm": True, "encoder_layers": 3},
    "window": {"window": 3, "positions": "rotary"},
}
SOURCE = torch.arange(24).view(3, 8) % 17
TARGET = torch.arange(21).view(3, 7) % 13
REAL = torch.arange(8) < torch.tensor([[8], [5], [3]])


def make(**fields):
    torch.manual_seed(0)
    model = Translator(TranslatorConfig(**{**SMALL, **fields}))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.eval()


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def model(request):
    return make(**request.param)


def test_source_padding_never_changes_a_logit(model):
    logits = model(SOURCE, TARGET, REAL)
    for row, count in enumerate((8, 5, 3)):
        alone = model(SOURCE[row : row + 1, :count], TARGET[row : row + 1])
        torch.testing.assert_close(logits[row], alone[0], rtol=1e-5, atol=1e-5)
    other = torch.where(REAL, SOURCE, (SOURCE + 5) % 17)
    assert torch.equal(model(other, TARGET, REAL), logits)


def test_source_padding_on_the_left_is_padding_too(model):
    rows = [torch.cat((row[~real], row[real])) for row, real in zip(SOURCE, REAL, strict=True)]
    moved = model(torch.stack(rows), TARGET, REAL.flip(1))
    torch.testing.assert_close(moved, model(SOURCE, TARGET, REAL), rtol=1e-5, atol=1e-5)


def test_future_targets_never_change_a_logit(model):
    logits = model(SOURCE, TARGET, REAL)
    for length in range(1, 7):
        changed = torch.cat((TARGET[:, :length], (TARGET[:, length:] + 5) % 13), 1)
        assert torch.equal(model(SOURCE, changed, REAL)[:, :length], logits[:, :length])


def test_every_source_token_and_earlier_target_counts():
    model = make(norm="post")
    logits = model(SOURCE, TARGET)
    for position in range(8):
        changed = SOURCE.clone()
        changed[:, position] += 1
        assert not torch.allclose(model(changed % 17, TARGET)[:, 0], logits[:, 0], atol=1e-3)
    changed = torch.cat(((TARGET[:, :1] + 5) % 13, TARGET[:, 1:]), 1)
    assert not torch.allclose(model(SOURCE, changed)[:, -1], logits[:, -1], atol=1e-3)


@pytest.mark.parametrize("chunks", [[1] * 7, [3, 1, 3]], ids=["one by one", "in chunks"])
def test_cached_logits_are_those_of_the_whole_target(model, chunks):
    memory, cache = model.encode(SOURCE, REAL), model.new_cache(3, 7)
    logits = torch.cat([model.decode(part, memory, cache=cache) for part in TARGET.split(chunks, 1)], 1)
    torch.testing.assert_close(logits, model(SOURCE, TARGET, REAL), rtol=1e-5, atol=1e-5)
    assert not logits.requires_grad


def test_the_source_is_projected_once_for_all_steps():
    model = make()
    memory, cache = model.encode(SOURCE, REAL), model.new_cache(3, 7)
    calls = []
    model.encoder.register_forward_pre_hook(lambda *_: calls.append("encoder"))
    for block in model.blocks:
        block.cross_attention.keys_values = lambda _: calls.append("keys")
    for part in TARGET.split(1, 1):
        model.decode(part, memory, cache=cache, last_only=True)
    assert not calls


def test_taken_rows_go_on_from_what_they_have_read():
    model = make(**KINDS["rms"])
    memory, cache, rows = model.encode(SOURCE, REAL), model.new_cache(3, 7), torch.tensor([2, 0, 0])
    model.decode(TARGET[:, :4], memory, cache=cache)
    cache.take(rows)
    logits = model.decode(TARGET[:, 4:], memory.take(rows), cache=cache)
    expected = model(SOURCE[rows], torch.cat((TARGET[rows, :4], TARGET[:, 4:]), 1), REAL[rows])[:, 4:]
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_blocks_are_those_of_torch(norm):
    model = make(norm=norm, activation="relu", layers=1)
    block, options = model.blocks[0], {"batch_first": True, "dropout": 0.0, "norm_first": norm == "pre"}
    theirs = nn.TransformerDecoderLayer(24, 6, 40, **options).eval()
    pairs = {
        "self_attn.in_proj_": block.attention.qkv,
        "self_attn.out_proj.": block.attention.out,
        "multihead_attn.in_proj_": block.cross_attention.qkv,
        "multihead_attn.out_proj.": block.cross_attention.out,
        "linear1.": block.feed_forward.up,
        "linear2.": block.feed_forward.down,
        "norm1.": block.attention_norm,
        "norm2.": block.cross_norm,
        "norm3.": block.feed_forward_norm,
    }
    theirs.load_state_dict(
        {name + kind: getattr(ours, kind) for name, ours in pairs.items() for kind in ("weight", "bias")}
    )
    read = model.encoder.hidden_states(SOURCE, REAL)
    stream = model.embedding(TARGET)
    mask = nn.Transformer.generate_square_subsequent_mask(7)
    expected = theirs(stream, read, tgt_mask=mask, tgt_is_causal=True, memory_key_padding_mask=~REAL)
    torch.testing.assert_close(
        model.hidden_states(TARGET, memory=model.encode(SOURCE, REAL)), model.final_norm(expected), rtol=1e-5, atol=1e-5
    )


def test_attention_maps_say_who_looked_where(model):
    logits, maps = model(SOURCE, TARGET, REAL, return_attention=True)
    torch.testing.assert_close(logits, model(SOURCE, TARGET, REAL))
    layers = model.config.encoder_layers or 2
    assert [len(each) for each in maps] == [layers, 2, 2]
    shapes = {"encoder": (3, 6, 8, 8), "decoder": (3, 6, 7, 7), "cross": (3, 6, 7, 8)}
    for name, shape in shapes.items():
        for each in getattr(maps, name):
            assert each.shape == shape
            real = REAL if name == "encoder" else torch.ones(3, 7, dtype=torch.bool)
            torch.testing.assert_close(each.sum(-1).transpose(1, 2)[real], torch.ones(int(real.sum()), 6))
    assert all(not each.triu(1).any() for each in maps.decoder)
    assert all(not each.masked_select(~REAL[:, None, None]).any() for each in (*maps.encoder, *maps.cross))


def test_preset_has_its_parameters_and_fields():
    model = python_ref.build("translator")
    assert isinstance(model, Translator)
    assert model.num_parameters() == 1_182_208
    small = python_ref.build("translator", **SMALL)
    assert small(SOURCE, TARGET).shape == (3, 7, 13)
    assert small.encoder.config.vocab_size == 17


@pytest.mark.parametrize("length", [6, 12])
def test_flops_are_those_of_the_matrix_products(length):
    from torch.utils.flop_counter import FlopCounterMode

    model, half = make(), length // 2
    with FlopCounterMode(display=False) as counter:
        model(SOURCE[:2, :half], TARGET[:2, :half])
    unseen = 4 * 2 * 24 * (half - 1) / 2  # of causal attention, in two layers
    counted = counter.get_total_flops() / (2 * half)
    assert model.flops_per_token(length, training=False) == pytest.approx((counted - unseen) / 2)


def test_sinusoidal_embeddings_of_both_stacks_start_beside_their_positions():
    model = Translator(dataclasses.replace(TRANSLATOR, dropout=0.0))
    for embedding in (model.embedding, model.encoder.embedding):
        assert embedding.tokens.weight.std().item() == pytest.approx(128**-0.5, rel=0.02)


@pytest.mark.parametrize(
    ("inputs", "error", "message"),
    [
        ((SOURCE, TARGET[:2]), ValueError, r"a row for each of 3 sources; got \(2, 7\)"),
        ((SOURCE, TARGET, REAL.long()), TypeError, "padding_mask must be bool"),
        ((SOURCE, TARGET, REAL[:, :4]), ValueError, r"padding_mask must have the shape of tokens \(3, 8\)"),
        ((SOURCE.repeat(1, 2), TARGET), ValueError, "a sequence of 16 tokens is longer than the model's 12 positions"),
        ((SOURCE + 17, TARGET), IndexError, r"tokens must be in \[0, 17\)"),
        ((SOURCE, TARGET + 13), IndexError, r"tokens must be in \[0, 13\)"),
    ],
    ids=["batches", "integer mask", "mask shape", "long", "source id", "target id"],
)
def test_wrong_inputs_are_refused(inputs, error, message):
    with pytest.raises(error, match=message):
        make()(*inputs)


@pytest.mark.parametrize("fields", [{"source_vocab_size": 0}, {"encoder_layers": 0}])
def test_wrong_sizes_are_refused(fields):
    with pytest.raises(ValueError, match="must be at least 1; got 0"):
        make(**fields)
