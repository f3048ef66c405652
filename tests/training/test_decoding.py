"""Greedy, drawn and searched translations of small random models."""

import collections
import itertools
import random

import pytest
import torch

from python_ref.translator import Translator, TranslatorConfig
from transformer_kernels.pretrained.generation import Sampling
from transformer_kernels.training.decoding import GREEDY, BeamSearch, MinimumBayesRisk, translate_batch

BEGIN, END = 2, 3


def make(vocab_size=11, seed=0, ending=2.0):
    """A random model, to which the end seems likelier by `ending`."""
    torch.manual_seed(seed)
    sizes = {"context": 12, "width": 16, "layers": 2, "heads": 2, "ffn_width": 24, "tied": False, "head_bias": True}
    config = TranslatorConfig(source_vocab_size=9, vocab_size=vocab_size, dropout=0.0, init_std=0.3, **sizes)
    model = Translator(config).eval()
    model.head_bias.data.normal_(std=0.3)
    model.head_bias.data[END] += ending
    return model


SOURCE = torch.arange(30).view(6, 5) % 7 + 2
REAL = torch.arange(5) < torch.tensor([[5], [4], [3], [2], [5], [1]])


def translated(model, search, length=10, rows=slice(None)):
    return translate_batch(model, SOURCE[rows], REAL[rows], search, begin=BEGIN, end=END, length=length)


def log_probability(model, row, ids):
    """Of a target of these ids, each given the ones before, without a cache."""
    written = torch.tensor([[BEGIN, *ids[:-1]]])
    logits = model(SOURCE[row : row + 1], written, REAL[row : row + 1])[0].log_softmax(-1)
    return logits[range(len(ids)), ids].sum().item()


@pytest.mark.parametrize("seed", range(4))
def test_greedy_takes_the_likeliest_token_at_each_step(seed):
    model = make(seed=seed)
    for row, found in enumerate(translated(model, GREEDY)):
        expected = []
        while len(expected) < 10:
            logits = model(SOURCE[row : row + 1], torch.tensor([[BEGIN, *expected]]), REAL[row : row + 1])[0, -1]
            if (token := int(logits.argmax())) == END:
                break
            expected.append(token)
        assert found == expected


def test_the_models_of_these_tests_end_some_sentences_and_not_others():
    lengths = [len(ids) for seed in range(4) for ids in translated(make(seed=seed), GREEDY)]
    assert min(lengths) < 10 == max(lengths)


@pytest.mark.parametrize("penalty", [0.0, 1.0])
@pytest.mark.parametrize("seed", range(4))
def test_a_beam_of_one_is_greedy(seed, penalty):
    model = make(seed=seed)
    assert translated(model, BeamSearch(width=1, length_penalty=penalty)) == translated(model, GREEDY)


@pytest.mark.parametrize("penalty", [0.0, 0.6, 3.0])
@pytest.mark.parametrize("seed", range(3))
def test_a_beam_of_all_beginnings_finds_the_best_translation(seed, penalty):
    model, length = make(vocab_size=5, seed=seed, ending=0.0), 3
    search = BeamSearch(width=5**length, length_penalty=penalty)
    others = [token for token in range(5) if token != END]
    for row, found in enumerate(translated(model, search, length)):
        whole = [[*ids, END] for count in range(length) for ids in itertools.product(others, repeat=count)]
        best = max(whole, key=lambda ids: search.score(log_probability(model, row, ids), len(ids)))
        assert [*found, END] == best


def test_the_score_is_the_paper_s():
    assert BeamSearch(length_penalty=1.0).score(-3.0, 7) == -1.5
    assert BeamSearch(length_penalty=0.0).score(-3.0, 7) == -3.0


def test_a_larger_penalty_gives_longer_translations():
    model = make(vocab_size=5, ending=0.0)
    lengths = [sum(map(len, translated(model, BeamSearch(width=8, length_penalty=p)))) for p in (0.0, 1.0, 5.0)]
    assert lengths == sorted(lengths) and lengths[0] < lengths[-1]


@pytest.mark.parametrize("penalty", [0.0, 0.6])
@pytest.mark.parametrize("width", [3, 5**3])
def test_a_search_in_which_no_beam_ends_returns_the_likeliest_beam(width, penalty):
    model, length = make(vocab_size=5, ending=-torch.inf), 3
    found = translated(model, BeamSearch(width=width, length_penalty=penalty), length)
    assert all(len(ids) == length and END not in ids for ids in found)
    greedy = translated(model, GREEDY, length)
    others = [token for token in range(5) if token != END]
    for row, ids in enumerate(found):
        best = max(
            itertools.product(others, repeat=length), key=lambda each, row=row: log_probability(model, row, each)
        )
        likely = log_probability(model, row, ids)
        assert likely >= log_probability(model, row, greedy[row]) - 1e-5
        assert width == 3 or ids == list(best)


def test_a_beam_finds_likelier_translations_than_greed():
    gains = []
    for seed in range(4):
        model = make(seed=seed)
        pairs = zip(translated(model, GREEDY), translated(model, BeamSearch(width=6, length_penalty=0.0)), strict=True)
        for row, found in enumerate(pairs):
            if all(len(ids) < 10 for ids in found):
                greedy, beam = (log_probability(model, row, [*ids, END]) for ids in found)
                gains.append(beam - greedy)
    assert gains and sum(gains) > 0.1


@pytest.mark.parametrize("search", [GREEDY, BeamSearch(width=3)], ids=["greedy", "beam"])
def test_a_sentence_is_translated_the_same_alone(search):
    model = make()
    together = translated(model, search)
    assert [translated(model, search, rows=slice(row, row + 1))[0] for row in range(6)] == together


def test_draws_follow_the_seed_and_the_temperature():
    model = make()
    hot, cold = Sampling(temperature=1.0, seed=5), Sampling(temperature=1e-4, seed=5)
    assert translated(model, hot) == translated(model, hot) != translated(model, Sampling(temperature=1.0, seed=6))
    assert translated(model, cold) == translated(model, GREEDY)


def test_the_least_risk_is_the_highest_mean_chrf():
    import sacrebleu

    chrf, generator = sacrebleu.CHRF(), random.Random(0)
    different = 0
    for _ in range(50):
        drawn = [
            " ".join(generator.choices(("मैं", "हूँ", "घर", "घर में", "तुम"), k=generator.randint(0, 3))) for _ in range(9)
        ]
        means = [sum(chrf.sentence_score(each, [other]).score for other in drawn) for each in drawn]
        assert means[MinimumBayesRisk.choose(drawn)] == pytest.approx(max(means))
        different += drawn[MinimumBayesRisk.choose(drawn)] != collections.Counter(drawn).most_common(1)[0][0]
    assert 10 < different < 50


def test_the_samples_of_a_sentence_differ():
    model, samplings = make(), MinimumBayesRisk(samples=5, temperature=2.0).samplings()
    assert len({str(translated(model, each)) for each in samplings}) == len(samplings) == 5
    assert {each.temperature for each in samplings} == {2.0}


@pytest.mark.parametrize("fields", [{"width": 0}, {"length_penalty": -1.0}, {"length_penalty": float("inf")}])
def test_a_search_that_cannot_be_is_refused(fields):
    with pytest.raises(ValueError, match="must be"):
        BeamSearch(**fields)
