"""The BERT classifier against torch.nn's encoder, and the properties of padding and segments."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from python_ref import BERTClassifier, BERTConfig
from python_ref.bert import POOLINGS, mean_of_sequences

SMALL = {"vocab_size": 13, "context": 8, "width": 12, "layers": 2, "heads": 3, "dropout": 0.0}
TOKENS = torch.tensor([[1, 2, 3, 4, 5, 0, 0], [6, 7, 8, 9, 10, 11, 12]])
REAL = torch.tensor([[True] * 5 + [False] * 2, [True] * 7])


def make(**fields):
    torch.manual_seed(0)
    model = BERTClassifier(BERTConfig(**{**SMALL, **fields})).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return model


def test_logits_are_those_of_torch_encoder():
    model = make(final_norm=False, embedding_norm=True)
    segments = TOKENS % 2
    embedding = model.embedding
    x = embedding.tokens.weight[TOKENS] + embedding.positions[:7] + embedding.segments.weight[segments]
    x = F.layer_norm(x, (12,), embedding.norm.weight, embedding.norm.bias)
    for block in model.blocks:
        layer = torch.nn.TransformerEncoderLayer(
            12, 3, 48, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        ).double()
        weights = {}
        for theirs, ours in (
            ("self_attn.in_proj_", block.attention.qkv),
            ("self_attn.out_proj.", block.attention.out),
            ("linear1.", block.feed_forward.up),
            ("linear2.", block.feed_forward.down),
            ("norm1.", block.attention_norm),
            ("norm2.", block.feed_forward_norm),
        ):
            weights[f"{theirs}weight"], weights[f"{theirs}bias"] = ours.weight, ours.bias
        layer.load_state_dict(weights)
        x = layer(x, src_key_padding_mask=~REAL)
    torch.testing.assert_close(model.hidden_states(TOKENS, REAL, segments)[REAL], x[REAL])
    torch.testing.assert_close(model(TOKENS, REAL, segments), model.classifier(x[:, 0]))


@pytest.mark.parametrize("pooling", POOLINGS)
def test_nan_behind_the_mask_reaches_no_logit(pooling):
    model = make(pooling=pooling)
    expected = model(TOKENS, REAL)
    with torch.no_grad():
        model.embedding.tokens.weight[0] = torch.nan
    torch.testing.assert_close(model(TOKENS, REAL), expected)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_gradients_do_not_reach_padding(pooling):
    model = make(pooling=pooling)
    model(TOKENS[:1], REAL[:1]).sum().backward()
    assert not model.embedding.tokens.weight.grad[0].any()
    assert not model.embedding.positions.grad[5:].any()


def test_no_segments_means_segment_0():
    model = make()
    torch.testing.assert_close(model(TOKENS, REAL), model(TOKENS, REAL, torch.zeros_like(TOKENS)))
    assert not torch.allclose(model(TOKENS, REAL), model(TOKENS, REAL, torch.ones_like(TOKENS)))


def test_classes_and_segments_are_configured():
    model = make(classes=5, segments=0)
    assert model(TOKENS, REAL).shape == (2, 5)
    assert model.embedding.segments is None
    with pytest.raises(ValueError, match="segments were given to a model that has no segment embeddings"):
        model(TOKENS, REAL, TOKENS % 2)


def test_mean_pooling_classifies_the_mean_of_the_real_tokens():
    model = make(pooling="mean")
    hidden = model.hidden_states(TOKENS, REAL)
    means = torch.stack([each[real].mean(0) for each, real in zip(hidden, REAL, strict=True)])
    torch.testing.assert_close(model(TOKENS, REAL), model.classifier(means))
    torch.testing.assert_close(model(TOKENS), model.classifier(model.hidden_states(TOKENS).mean(1)))


def test_the_mean_of_no_token_is_zero():
    model = make(pooling="mean")
    torch.testing.assert_close(model(TOKENS, REAL & False), model.classifier.bias.expand(2, 2))


LENGTHS = [5, 7, 1]
PACKED = torch.cat([TOKENS[0, :5], TOKENS[1], torch.tensor([9, 0, 0, 0])]).unsqueeze(0)
STARTS = torch.tensor([0, *LENGTHS]).cumsum(0).int()


@pytest.mark.parametrize("pooling", POOLINGS)
def test_packed_sequences_are_classified_as_if_each_were_alone(pooling):
    model = make(pooling=pooling)
    alone = [model(PACKED[:, start:end]) for start, end in itertools.pairwise(STARTS.tolist())]
    torch.testing.assert_close(model(PACKED, cu_seqlens=STARTS), torch.cat(alone))


def test_positions_count_from_0_in_each_packed_sequence():
    model = make()
    positions = torch.cat([torch.arange(length) for length in [*LENGTHS, 0]] + [torch.zeros(3, dtype=torch.int64)])
    given = model(PACKED, cu_seqlens=STARTS, position_ids=positions.unsqueeze(0))
    assert torch.equal(model(PACKED, cu_seqlens=STARTS), given)
    assert not torch.allclose(model(PACKED, cu_seqlens=STARTS, position_ids=positions.flip(0).unsqueeze(0)), given)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_what_stands_behind_the_last_packed_sequence_does_not_matter(pooling):
    model = make(pooling=pooling)
    expected = model(PACKED, cu_seqlens=STARTS)
    expected.sum().backward()
    assert not model.embedding.tokens.weight.grad[0].any()
    alone = model(PACKED[:, : STARTS[-1]], cu_seqlens=STARTS)
    torch.testing.assert_close(alone, expected, rtol=1e-12, atol=1e-12)  # fewer rows, another order of sums
    with torch.no_grad():
        model.embedding.tokens.weight[0] = 5.0
    assert torch.equal(model(PACKED, cu_seqlens=STARTS), expected)


def test_the_loss_of_packed_sequences_is_that_of_padded_ones():
    model, labels = make(), torch.tensor([0, 1])
    tokens = torch.cat([TOKENS[0, :5], TOKENS[1]]).unsqueeze(0)
    torch.testing.assert_close(model.loss(labels, tokens, cu_seqlens=STARTS[:3]), model.loss(labels, TOKENS, REAL))


def test_the_mean_of_packed_sequences_is_summed_in_float32():
    hidden = (1.0 + torch.rand(1, 4096, 2, generator=torch.Generator().manual_seed(0))).bfloat16()
    expected = hidden.double().view(2, 2048, 2).mean(1)
    means = mean_of_sequences(hidden, torch.tensor([0, 2048, 4096], dtype=torch.int32))
    torch.testing.assert_close(means.double(), expected, rtol=2**-8, atol=0.0)


def test_bad_packing_is_refused():
    model = make()
    with pytest.raises(ValueError, match=r"with cu_seqlens, tokens must have shape \(1, tokens\); got \(2, 7\)"):
        model(TOKENS, cu_seqlens=STARTS)
    with pytest.raises(ValueError, match="cu_seqlens and padding_mask exclude each other"):
        model(PACKED, PACKED > 0, cu_seqlens=STARTS)
    with pytest.raises(ValueError, match=r"position_ids must have the shape of tokens \(1, 16\); got \(16,\)"):
        model(PACKED, cu_seqlens=STARTS, position_ids=torch.zeros(16, dtype=torch.int64))
    with pytest.raises(IndexError, match=r"position_ids must be in \[0, 8\); got ids from 8 to 8"):
        model(PACKED, cu_seqlens=STARTS, position_ids=torch.full((1, 16), 8))


def test_an_unknown_pooling_is_reported():
    with pytest.raises(ValueError, match=r"BERTConfig: pooling must be one of \('first', 'mean'\); got 'last'"):
        make(pooling="last")


def test_classifier_drops_out():
    model = make(dropout=1.0)
    assert model.hidden_states(TOKENS, REAL)[:, 0].all()  # the bias of the final LayerNorm
    assert torch.equal(model(TOKENS, REAL), model.classifier.bias.expand(2, 2))


def test_bad_masks_and_segments_are_refused():
    model = make()
    with pytest.raises(TypeError, match=r"padding_mask must be bool, True at real tokens; got torch\.int64"):
        model(TOKENS, REAL.long())
    with pytest.raises(ValueError, match=r"padding_mask must have the shape of tokens \(2, 7\); got \(2, 6\)"):
        model(TOKENS, REAL[:, 1:])
    with pytest.raises(ValueError, match=r"segments must have the shape of tokens \(2, 7\); got \(2, 6\)"):
        model(TOKENS, REAL, TOKENS[:, 1:] % 2)
    with pytest.raises(IndexError, match=r"segments must be in \[0, 2\); got ids from 0 to 2"):
        model(TOKENS, REAL, TOKENS % 3)
