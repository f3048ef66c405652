import pytest
import torch

from transformer_kernels.training import Sampling, generate
from transformer_kernels.training.generation import sampling_distribution, text_until

LOGITS = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
CPU = torch.device("cpu")


class Successor(torch.nn.Module):
    """Finds the token after the last one the most likely, and remembers how much it saw."""

    def forward(self, tokens):
        self.seen = tokens.shape[1]
        return torch.nn.functional.one_hot((tokens + 1) % 5, 5).float()


def distribution(**sampling):
    return [round(value, 4) for value in sampling_distribution(LOGITS, Sampling(**sampling)).tolist()]


def test_distributions():
    assert distribution() == [0.5, 0.3, 0.15, 0.05]
    assert distribution(temperature=0.0) == [1, 0, 0, 0]
    assert distribution(top_k=2) == [0.625, 0.375, 0, 0]
    assert distribution(top_k=99) == [0.5, 0.3, 0.15, 0.05]
    assert distribution(top_p=0.8) == [0.625, 0.375, 0, 0]
    assert distribution(top_p=0.81) == [0.5263, 0.3158, 0.1579, 0]
    assert distribution(top_p=0.01) == [1, 0, 0, 0]
    squares = torch.tensor([0.25, 0.09, 0.0225, 0.0025])
    assert distribution(temperature=0.5) == pytest.approx((squares / squares.sum()).tolist(), abs=1e-4)


def test_greedy_counts_on_and_sees_no_more_than_its_context():
    model = Successor()
    choices = list(generate(model, [0], 7, Sampling(temperature=0.0), context=3, device=CPU))
    assert [choice.token for choice in choices] == [1, 2, 3, 4, 0, 1, 2]
    assert model.seen == 3
    assert choices[0].probabilities.argmax() == 1
    assert choices[0].probabilities.sum().item() == pytest.approx(1.0)


def test_a_seed_repeats_its_draws_and_leaves_torch_alone():
    def tokens(seed):
        return [choice.token for choice in generate(Successor(), [0], 30, Sampling(seed=seed), context=3, device=CPU)]

    before = torch.get_rng_state()
    assert tokens(1) == tokens(1) != tokens(2)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    "pieces, stop, expected",
    [
        (["ab", "cd", "ef"], "", ["ab", "cd", "ef"]),
        (["ab", "cd", "ef"], "cd", ["ab"]),
        (["a", "b", "c", "d"], "bcx", ["a", "bcd"]),
        (["a", "e", "n", "d", "z"], "end", ["a"]),
        (["eee", "end"], "end", ["ee", "e"]),
    ],
)
def test_text_streams_up_to_the_stop(pieces, stop, expected):
    assert list(text_until(pieces, stop)) == expected


@pytest.mark.parametrize("values", [{"temperature": -1}, {"temperature": float("nan")}, {"top_k": -1}, {"top_p": 0}])
def test_bad_sampling_is_told(values):
    with pytest.raises(ValueError, match=f"{next(iter(values))} must"):
        Sampling(**values)


def test_an_empty_prompt_is_told():
    with pytest.raises(ValueError, match="the prompt must have at least one token"):
        next(generate(Successor(), [], 1, Sampling(), context=3, device=CPU))
