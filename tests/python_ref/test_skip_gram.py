"""Skip-gram: its loss and gradients against the paper's sums, written as loops, and its two distributions."""

import math

import pytest
import torch

import transformer_kernels as tk
from python_ref import ops
from python_ref.skip_gram import SkipGram, keep_probabilities, noise_probabilities

CENTRES, CANDIDATES = torch.tensor([0, 3, 3]), torch.tensor([[1, 4, 4], [2, 3, 0], [1, 2, 0]])
TARGETS = torch.tensor([[1, 0, 0], [1, 0, 0], [0, 1, 0]])


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


@pytest.fixture
def model():
    torch.manual_seed(0)
    model = SkipGram(5, 4).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    return model


def test_loss_and_gradients_are_equation_4_as_a_loop(model):
    v, u = model.words.tolist(), model.contexts.tolist()
    dv, du = torch.zeros(5, 4, dtype=torch.float64), torch.zeros(5, 4, dtype=torch.float64)
    expected = 0.0
    for row, centre in enumerate(CENTRES.tolist()):
        for word, target in zip(CANDIDATES[row].tolist(), TARGETS[row].tolist(), strict=True):
            p = sigmoid(sum(a * b for a, b in zip(v[centre], u[word], strict=True)))
            expected -= math.log(p if target else 1 - p) / CANDIDATES.numel()
            dv[centre] += (p - target) * model.contexts[word].detach() / CANDIDATES.numel()
            du[word] += (p - target) * model.words[centre].detach() / CANDIDATES.numel()
    loss = model.loss(CENTRES, CANDIDATES, TARGETS)
    loss.backward()
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    torch.testing.assert_close(model.words.grad, dv)
    torch.testing.assert_close(model.contexts.grad, du)


def test_loss_is_the_cross_entropy_of_the_logits(model):
    logits = model(CENTRES, CANDIDATES)
    expected = ops.cross_entropy(logits.flatten(0, 1), TARGETS.flatten())
    torch.testing.assert_close(model.loss(CENTRES, CANDIDATES, TARGETS), expected)


@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_backends_agree(model, backend):
    fused = SkipGram(5, 4, tk.bind(backend))
    fused.load_state_dict(model.state_dict())
    model = model.float()
    for each in (model, fused):
        each.loss(CENTRES, CANDIDATES, TARGETS).backward()
    torch.testing.assert_close(fused(CENTRES, CANDIDATES), model(CENTRES, CANDIDATES))
    for one, other in zip(fused.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_a_new_model_scores_zero_and_sizes_are_positive():
    model = SkipGram(7, 10)
    assert model.loss(CENTRES, CANDIDATES, TARGETS).item() == pytest.approx(math.log(2))
    assert model.words.abs().max() <= 0.05 and model.words.std() > 0.02
    assert (model.flops_per_token(), model.flops_per_token(training=False)) == (60.0, 20.0)
    for sizes in ((0, 4), (4, 0)):
        with pytest.raises(ValueError, match="must be at least 1; got 0"):
            SkipGram(*sizes)


def test_frequent_words_are_subsampled_and_noise_is_flattened():
    counts = torch.tensor([8000, 1990, 10])
    expected = [math.sqrt(1e-2 / 0.8), math.sqrt(1e-2 / 0.199), 1.0]
    assert keep_probabilities(counts, 1e-2).tolist() == pytest.approx(expected)
    assert keep_probabilities(counts, 0.0).tolist() == [1.0, 1.0, 1.0]
    powers = [count**0.75 for count in (8000, 1990, 10)]
    assert noise_probabilities(counts).tolist() == pytest.approx([power / sum(powers) for power in powers])
