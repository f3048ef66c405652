"""Additive attention and its recurrent networks: the paper's equations, padding, and reading before writing."""

import pytest
import torch

import transformer_kernels as tk
from python_ref.bahdanau import AdditiveAttention, GRUCell, Seq2Seq

SOURCE, TARGET = torch.arange(15).view(3, 5) % 7, torch.arange(12).view(3, 4) % 7
REAL = torch.arange(5) < torch.tensor([[5], [3], [1]])


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Seq2Seq(7, width=8).double()


def test_attention_is_equations_5_and_6():
    torch.manual_seed(0)
    attention = AdditiveAttention(4, 6, 5)
    state, memory = torch.randn(2, 4), torch.randn(2, 3, 6)
    context, weights = attention(state, memory, attention.key(memory))
    for row in range(2):
        scores = [
            attention.score.weight[0] @ (attention.query.weight @ state[row] + attention.key.weight @ h).tanh()
            for h in memory[row]
        ]
        expected = torch.stack(scores).softmax(0)
        torch.testing.assert_close(weights[row], expected)
        torch.testing.assert_close(context[row], expected @ memory[row])


def test_gru_is_the_paper_s_and_keeps_its_state_where_its_gate_is_shut():
    torch.manual_seed(0)
    cell, x, state = GRUCell(3, 4), torch.randn(2, 3), torch.randn(2, 4)
    (weight, bias), proposal = (cell.gates.weight, cell.gates.bias), cell.candidate
    update, reset = (
        (torch.cat((x, state), 1) @ part.T + b).sigmoid()
        for part, b in zip(weight.chunk(2), bias.chunk(2), strict=True)
    )
    inside = torch.cat((x, reset * state), 1) @ proposal.weight.T + proposal.bias
    torch.testing.assert_close(cell(x, state), (1 - update) * state + update * inside.tanh())
    cell.gates.bias.data[:4] = -100.0
    torch.testing.assert_close(cell(x, state), state)


def test_padding_of_the_source_changes_nothing(model):
    logits, maps = model(SOURCE, TARGET, REAL, return_attention=True)
    for row, count in enumerate((5, 3, 1)):
        alone, looked = model(SOURCE[row : row + 1, :count], TARGET[row : row + 1], return_attention=True)
        torch.testing.assert_close(logits[row], alone[0])
        torch.testing.assert_close(maps[row, :, :count], looked[0])
        assert not maps[row, :, count:].any()


def test_future_targets_change_nothing(model):
    changed = torch.cat((TARGET[:, :2], TARGET[:, 2:] + 1 - 7 * (TARGET[:, 2:] == 6).long()), 1)
    logits, others = model(SOURCE, TARGET), model(SOURCE, changed)
    assert torch.equal(logits[:, :2], others[:, :2])
    assert not torch.equal(logits[:, 2], others[:, 2])


def test_written_tokens_are_the_likeliest_after_those_before(model):
    written = model.generate(SOURCE, begin=6, length=4, padding_mask=REAL)
    given = torch.cat((torch.full((3, 1), 6), written[:, :-1]), 1)
    assert torch.equal(model(SOURCE, given, REAL).argmax(-1), written)


def test_another_backend_gives_the_same(model):
    other = Seq2Seq(7, width=8, ops=tk.bind("torch")).double()
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(other(SOURCE, TARGET, REAL), model(SOURCE, TARGET, REAL))


def test_an_integer_mask_is_refused(model):
    with pytest.raises(TypeError, match="padding_mask must be bool"):
        model(SOURCE, TARGET, REAL.long())
