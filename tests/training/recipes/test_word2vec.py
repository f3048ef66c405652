"""Word vectors: planted meanings are found again, and an item draws its neighbour and noise as word2vec does."""

import random

import pytest
import torch

from transformer_kernels import cli
from transformer_kernels.training import Processes, Trainer, load_trained
from transformer_kernels.training.data.tokenizers import WordTokenizer
from transformer_kernels.training.data.vectors import nearest, parse_expression, table_of_model
from transformer_kernels.training.recipes.word2vec import Word2Vec, Word2VecConfig

RANKS = {"king": ["crown", "throne", "palace"], "man": ["field", "market", "street"]}
RANKS |= {"queen": RANKS["king"], "woman": RANKS["man"]}
GENDERS = {"king": ["he", "his", "him"], "queen": ["she", "hers", "her"]}
GENDERS |= {"man": GENDERS["king"], "woman": GENDERS["queen"]}
FRUIT = ["apple", "pear", "plum"]


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """Sentences in which a word is beside a word of its rank and a word of its gender, and fruit beside "eat"."""
    draw, lines = random.Random(0), []
    for _ in range(4000):
        word = draw.choice([*RANKS])
        lines.append(f"{draw.choice(RANKS[word])} {word} {draw.choice(GENDERS[word])}")
        lines.append(f"eat {draw.choice(FRUIT)} sweet")
    path = tmp_path_factory.mktemp("planted") / "text.txt"
    path.write_text("\n".join(lines))
    return path


@pytest.fixture
def config(planted, tmp_path):
    def make(**changes):
        usual = {"text": str(planted), "out": str(tmp_path / "run"), "progress": False, "threads": 1, "steps": 3}
        return Word2VecConfig(**{**usual, "width": 16, "window": 1, "batch_size": 256, "lr": 1e-2, **changes})

    return make


def test_planted_neighbours_and_an_analogy_are_found(config, capsys):
    trained = config(steps=700, subsample=0.0)
    Trainer(Word2Vec(trained)).fit()
    table = table_of_model(load_trained(trained.out))
    assert {word for word, _ in nearest(table, parse_expression("apple"), 2)} == {"pear", "plum"}
    assert {word for word, _ in nearest(table, parse_expression("he"), 2)} == {"his", "him"}
    for expression, answer in (("king - man + woman", "queen"), ("woman - queen + king", "man")):
        assert nearest(table, parse_expression(expression), 1)[0][0] == answer
    assert cli.main(["nearest", "--checkpoint", trained.out, "king", "-", "man", "+", "woman", "--top", "1"]) == 0
    assert capsys.readouterr().out.split()[1:] == ["queen"]
    assert cli.main(["evaluate", "--checkpoint", trained.out]) == 0
    assert "targets" in capsys.readouterr().out


def test_an_item_is_a_word_with_a_neighbour_in_its_window_and_noise(config):
    recipe = Word2Vec(config(window=3, noise=4, subsample=0.0))
    items = torch.arange(recipe.train_length)
    batch = recipe.batch(items, torch.device("cpu"))
    (centres, candidates), length = batch.inputs, recipe.train_length
    assert torch.equal(centres, recipe.words) and candidates.shape == batch.targets.shape == (length, 5)
    assert torch.equal(batch.targets, torch.tensor([1, 0, 0, 0, 0]).expand(length, 5))
    assert (batch.tokens, batch.size) == (5 * length, 5 * length)
    recipe.words = items  # neighbours are then positions
    neighbours = recipe.batch(items, torch.device("cpu")).inputs[1][:, 0]
    distances = (neighbours - items).abs()
    assert distances.min() == 1 and distances.max() == 3
    shares = distances.bincount()[1:] / length
    assert torch.allclose(shares, torch.tensor([11 / 18, 5 / 18, 2 / 18]), atol=0.01)
    assert (neighbours > items).float().mean().item() == pytest.approx(0.5, abs=0.01)
    shares = candidates[:, 1:].flatten().bincount(minlength=len(recipe.noise)) / (4 * length)
    assert torch.allclose(shares.double(), recipe.noise, atol=0.01)


def test_draws_depend_on_the_items_alone_and_differ_between_epochs(config):
    recipe, device = Word2Vec(config()), torch.device("cpu")
    sampler = recipe.sampler(Processes())
    for epoch in range(2):
        assert (sampler.peek() // recipe.train_length == epoch).all()
        sampler.restore({"epoch": 1, "batch": 0})
    items = torch.arange(64)
    first, again, later = (recipe.batch(each, device) for each in (items, items, items + recipe.train_length))
    assert all(torch.equal(one, other) for one, other in zip(first.inputs, again.inputs, strict=True))
    assert torch.equal(first.inputs[0], later.inputs[0]) and not torch.equal(first.inputs[1], later.inputs[1])
    other = Word2Vec(config(seed=1)).batch(items, device)
    assert not torch.equal(first.inputs[1], other.inputs[1])


def test_frequent_words_are_subsampled(config):
    whole, part = (Word2Vec(config(subsample=threshold)) for threshold in (0.0, 1e-2))
    counts = [recipe.words.bincount() for recipe in (whole, part)]
    eat = whole.tokenizer.encode("eat")[0]
    frequency = counts[0][eat].item() / whole.train_length
    assert counts[1][eat].item() / counts[0][eat].item() == pytest.approx((1e-2 / frequency) ** 0.5, rel=0.05)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"window": 0}, "window must be at least 1; got 0"),
        ({"subsample": 1.0}, r"subsample must be in \[0, 1\); got 1.0"),
        ({"model": {"width": 8}}, "model: word2vec has no model fields, only --width; got width"),
    ],
)
def test_options_out_of_range(config, changes, message):
    with pytest.raises(ValueError, match=message):
        config(**changes)


def test_a_text_that_is_too_short(config, tmp_path):
    (tmp_path / "short.txt").write_text("one two one two")
    with pytest.raises(ValueError, match=r"has 0 words after subsampling that occur at least 5 times \(--min-count\)"):
        Word2Vec(config(text=str(tmp_path / "short.txt")))


def test_words_of_a_text():
    tokenizer = WordTokenizer.learn("The cat's tail. THE dog, the cat\u2019s 2 tails: the dog_house été été", 2)
    assert tokenizer.words == ["the", "dog", "été"]
    assert tokenizer.encode("The Dog; an Été.") == [0, 1, 2] and tokenizer.decode([0, 1]) == "the dog"
