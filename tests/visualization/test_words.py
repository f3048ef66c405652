"""A word in context: its tokens are found, and its two vectors are the model's."""

from types import SimpleNamespace

import pytest
import torch

from python_ref import GPT, GPTConfig
from tests.support.real_weights import minilm
from transformer_kernels.training.data.tokenizers import CharacterTokenizer
from transformer_kernels.visualization import words
from transformer_kernels.visualization.attention import attention_maps
from transformer_kernels.visualization.words import draw_words, principal_components, word_in_context

SENTENCES = ("The studious student graduated with honors.", "He sat on the bank of the river.")


@pytest.fixture(scope="module")
def loaded():
    torch.manual_seed(0)
    tokenizer = CharacterTokenizer("an ox, foxes; $Fox$")
    config = GPTConfig(vocab_size=tokenizer.vocabulary_size, context=32, width=16, layers=1, heads=2)
    return SimpleNamespace(model=GPT(config).eval(), tokenizer=tokenizer, device=torch.device("cpu"))


def test_the_vectors_of_a_word(loaded):
    found = word_in_context(loaded, "fox", "foxes; Fox, ox")  # the first is another word
    assert found.indices == [[7, 8, 9]] and "".join(found.names[7:10]) == "Fox"
    tokens = torch.tensor([loaded.tokenizer.encode("foxes; Fox, ox")])
    torch.testing.assert_close(found.contextual[0], loaded.model.hidden_states(tokens)[0, 7:10].mean(0))
    torch.testing.assert_close(found.static[0], loaded.model.embedding.tokens.weight[tokens[0, 7:10]].mean(0))


def test_every_occurrence_of_a_word(loaded):
    found = word_in_context(loaded, "ox", "ox, fox, ox")
    assert found.indices == [[0, 1], [9, 10]] and found.contextual.shape == found.static.shape == (2, 16)
    assert not torch.equal(*found.contextual) and torch.equal(*found.static)


@pytest.mark.parametrize("word", ["", "foxe", "an ox, fox", "(fox)"])
def test_words_that_are_not_there(loaded, word):
    with pytest.raises(ValueError, match=r"the word .* is not in 'foxes; fox'"):
        word_in_context(loaded, word, "foxes; fox")


def test_components_keep_the_two_directions_of_most_variance():
    torch.manual_seed(0)
    plane = torch.randn(40, 2, dtype=torch.float64) * torch.tensor([5.0, 2.0])
    turned = torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64)).Q[:2]
    points, shares = principal_components(plane @ turned + 7.0)
    torch.testing.assert_close(torch.cdist(points, points), torch.cdist(plane, plane), rtol=0, atol=1e-6)
    assert shares[0] > 0.7 and abs(shares.sum() - 1) < 1e-5


def test_the_picture_names_each_token(loaded, tmp_path, monkeypatch):
    kept = []
    monkeypatch.setattr(words, "write_figure", lambda figure, path: kept.append(figure))
    found = [word_in_context(loaded, "ox", sentence) for sentence in ("an ox", "ox, $fox$")]
    draw_words(found, "ox", tmp_path / "words.png")
    texts = kept[0].axes[0].texts
    texts = [text for text in texts if text.get_text()]  # not the arrows
    assert [text.get_text() for text in texts] == ["static", *"an␣ox", *"ox,␣", r"\$", *"fox", r"\$"]
    assert [text.get_text() for text in kept[0].legends[0].get_texts()] == ["1: an ox", r"2: ox, \$fox\$"]
    bold = [index for index, text in enumerate(texts) if text.get_fontweight() == "bold"]
    assert bold == [0, 4, 5, 6, 7]
    arrows = [text for text in kept[0].axes[0].texts if not text.get_text() and text.arrow_patch is not None]
    assert len({arrow.xyann for arrow in arrows[:2]}) == 1 and len({arrow.xy for arrow in arrows[:2]}) == 2


def test_names_do_not_overlap(loaded, tmp_path, monkeypatch):
    kept = []
    monkeypatch.setattr(words, "write_figure", lambda figure, path: kept.append(figure))
    found = [word_in_context(loaded, "ox", text) for text in ("an ox, foxes", "ox, $Fox$; an")]
    draw_words(found, "ox", tmp_path / "words.png")
    boxes = [text.get_window_extent() for text in kept[0].axes[0].texts if text.get_text()]
    assert len(boxes) == 26
    for number, box in enumerate(boxes):
        assert not [other for other in boxes[:number] if box.overlaps(other)]


@pytest.fixture(scope="module")
def real():
    pytest.importorskip("tokenizers")
    from transformer_kernels.training import pretrained_commands as commands

    return commands.load(str(minilm()), "auto", "cpu")


@torch.no_grad()
def test_maps_of_minilm_are_those_of_transformers(real):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.BertModel.from_pretrained(minilm(), attn_implementation="eager").eval()
    maps, names = attention_maps(real, SENTENCES[0])
    assert names == ["[CLS]", "The", "studio", "##us", "student", "graduated", "with", "honors", ".", "[SEP]"]
    tokens = torch.tensor([real.tokenizer.encode(SENTENCES[0]).ids])
    expected = torch.cat(theirs(tokens, output_attentions=True).attentions)
    assert maps.shape == (6, 12, 10, 10) and (maps - expected).abs().max() < 1e-5
    torch.testing.assert_close(maps.sum(-1), torch.ones(6, 12, 10))


def test_a_bank_of_a_river_is_not_a_bank_of_money(real):
    """The first figure is the one that was measured with these two sentences."""
    one, two = (word_in_context(real, "bank", text) for text in (SENTENCES[1], "She deposited her money in the bank."))
    cosines = [torch.cosine_similarity(getattr(one, kind), getattr(two, kind)) for kind in ("contextual", "static")]
    torch.testing.assert_close(torch.cat(cosines), torch.tensor([0.8360, 1.0]), rtol=0, atol=2e-4)
