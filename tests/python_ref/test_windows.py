"""Windows of texts, against a dense computation in which a mask hides the other keys."""

import pytest
import torch

import python_ref
from python_ref import ops
from python_ref.windows import global_window_attention, global_window_bias
from transformer_kernels import bind


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize(
    ("length", "window", "first"), [(20, 4, 1), (7, 3, 2), (5, 8, 0), (3, 2, 3), (2, 2, 4), (17, 1, 1)]
)
def test_global_tokens_and_a_window_are_a_masked_dense_attention(backend, length, window, first):
    torch.manual_seed(0)
    q, v = (torch.randn(2, 4, length, width, dtype=torch.float64, requires_grad=True) for width in (4, 4))
    k = torch.randn(2, 4, length, 4, dtype=torch.float64, requires_grad=True)
    real = torch.arange(length) < torch.tensor([[length], [max(1, length - 3)]])
    bias = global_window_bias(length, window, first).double()[None, None]
    wanted = ops.attention(q, k, v, key_padding_mask=real, attn_bias=bias)
    sizes = {"window": window, "global_tokens": first}
    got = global_window_attention(bind(backend), q, k, v, **sizes, key_padding_mask=real)
    torch.testing.assert_close(got, wanted)
    grads = [torch.autograd.grad(out.sin().sum(), (q, k, v)) for out in (got, wanted)]
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other)


class Recorded:
    """Operations that note how many scores each call of attention computes."""

    def __init__(self):
        self.scores, self.dropouts = 0, set()

    def attention(self, q, k, v, *, dropout_p=0.0, **options):
        self.scores += q.shape[0] * q.shape[2] * k.shape[2]
        self.dropouts.add(dropout_p)
        return ops.attention(q, k, v, **options)


def test_the_scores_that_are_computed_grow_with_the_length_and_not_with_its_square():
    counted = []
    for length in (257, 513, 1025):
        recorded = Recorded()
        x = torch.randn(1, 1, length, 2)
        global_window_attention(recorded, x, x, x, window=16, global_tokens=1, dropout_p=0.25)
        counted.append(recorded.scores)
        assert recorded.dropouts == {0.25}
    assert counted == [length + (length - 1) * (1 + 3 * 16) for length in (257, 513, 1025)]


def test_a_classifier_with_global_tokens_sees_far_through_them_alone():
    torch.manual_seed(0)
    options = {"vocab_size": 30, "width": 16, "heads": 2, "layers": 1, "context": 64, "dropout": 0.0, "window": 4}
    model = python_ref.build("imdb_bert", **options, global_tokens=1, init_std=0.5).eval()
    tokens = torch.randint(30, (2, 40))
    other = tokens.clone()
    other[:, 30] = (other[:, 30] + 1) % 30
    with torch.no_grad():
        moved = (model.hidden_states(tokens) - model.hidden_states(other)).abs().amax((0, 2))
        _, maps = model(tokens, return_attention=True)
    assert (moved > 0).nonzero().flatten().tolist() == [0, *range(27, 34)]
    seen = (maps[0][0, 0] > 0).double()
    assert torch.equal(seen, (global_window_bias(40, 4, 1) == 0).double())
    with pytest.raises(ValueError, match="neither causal nor packed"):
        model(tokens[:1], cu_seqlens=torch.tensor([0, 40], dtype=torch.int32))
    with pytest.raises(ValueError, match="global_tokens go with a window"):
        python_ref.build("imdb_bert", global_tokens=1)


def test_a_whole_window_is_plain_attention():
    torch.manual_seed(0)
    options = {"vocab_size": 30, "width": 16, "heads": 2, "layers": 2, "context": 64}
    plain = python_ref.build("imdb_bert", **options).eval()
    wide = python_ref.build("imdb_bert", **options, window=64, global_tokens=2).eval()
    wide.load_state_dict(plain.state_dict())
    tokens = torch.randint(30, (2, 40))
    torch.testing.assert_close(wide(tokens), plain(tokens))
