"""Attention maps: those of the model, under the names that people read, as a picture and as a page that is clicked."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from python_ref import GPT, BERTClassifier, BERTConfig, GPTConfig
from tests.support.browser import opened
from transformer_kernels.training.tokenizers import ByteTokenizer, CharacterTokenizer
from transformer_kernels.visualization import attention
from transformer_kernels.visualization.attention import attention_maps, write_page
from transformer_kernels.visualization.tokens import read

SIZES = {"context": 32, "width": 16, "layers": 2, "heads": 2}
TEXT = "a fox\nran"


def loaded(model, tokenizer):
    return SimpleNamespace(model=model.eval(), tokenizer=tokenizer, device=torch.device("cpu"))


@pytest.fixture(scope="module")
def gpt():
    torch.manual_seed(0)
    tokenizer = CharacterTokenizer(TEXT)
    return loaded(GPT(GPTConfig(vocab_size=tokenizer.vocabulary_size, **SIZES)), tokenizer)


@pytest.fixture(scope="module")
def bert():
    torch.manual_seed(0)
    tokenizer = ByteTokenizer()
    return loaded(BERTClassifier(BERTConfig(vocab_size=tokenizer.vocabulary_size, **SIZES)), tokenizer)


def test_a_gpt_never_looks_ahead(gpt):
    maps, names = attention_maps(gpt, TEXT)
    assert maps.shape == (2, 2, 9, 9) and not maps.triu(1).any()
    torch.testing.assert_close(maps.sum(-1), torch.ones(2, 2, 9))
    assert names == ["a", "␣", "f", "o", "x", "↵", "r", "a", "n"]


def test_a_classifier_reads_special_tokens_too(bert):
    maps, names = attention_maps(bert, "fox")
    assert names == ["[CLS]", "f", "o", "x", "[SEP]"]
    tokens = torch.tensor([[257, *b"fox", 258]])
    assert torch.equal(maps, torch.cat(bert.model(tokens, return_attention=True)[1]))
    gpt = loaded(GPT(GPTConfig(vocab_size=256, **SIZES)), bert.tokenizer)
    assert attention_maps(gpt, "fox")[1] == ["f", "o", "x"]


@pytest.mark.parametrize("kind", ["word pieces", "byte pairs"])
def test_tokens_have_the_names_that_stand_in_the_text(kind, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    if kind == "byte pairs":
        vocabulary = {token: index for index, token in enumerate(["f", "o", "x", "ox", "Ġ", "Ġf", "s", "Ã", "©", "Ċ"])}
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[("o", "x"), ("Ġ", "f")]))
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        expected = ["f", "ox", "f", "ox", "s", "é", "é", "↵"]
        assert tokenizer.encode("fox foxsé\n").tokens == ["f", "ox", "Ġf", "ox", "s", "Ã", "©", "Ċ"]
    else:
        (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "fox", "##s", "a"]))
        tokenizer = tokenizers.BertWordPieceTokenizer(str(tmp_path / "vocab.txt"))._tokenizer
        expected = ["Fox", "a", "Fox", "s"]
        assert tokenizer.encode("Fox a Foxs").tokens == ["[CLS]", "fox", "a", "fox", "##s", "[SEP]"]
    model = GPT(GPTConfig(vocab_size=16, **SIZES))
    assert read(loaded(model, tokenizer), "fox foxsé\n" if kind == "byte pairs" else "Fox a Foxs").names == expected


def test_what_cannot_be_looked_at(gpt):
    with pytest.raises(ValueError, match="the text must have at least one token; got ''"):
        attention_maps(gpt, "")
    with pytest.raises(ValueError, match="the text must have at most 128 tokens; got 200; shorten it"):
        attention_maps(gpt, "a" * 200)
    with pytest.raises(ValueError, match="a Linear does not take one input text"):
        attention_maps(loaded(torch.nn.Linear(2, 2), gpt.tokenizer), "a")


def test_the_picture_has_a_map_for_each_layer_and_head(tmp_path, monkeypatch):
    kept = []
    monkeypatch.setattr(attention, "write_figure", lambda figure, path: kept.append(figure))
    maps = torch.rand(3, 2, 4, 5)
    attention.draw_maps(maps, list("abcd"), list("vwxyz"), tmp_path / "maps.png")
    axes = kept[0].axes[0]
    drawn = torch.tensor(axes.images[0].get_array().filled(-1.0)).view(3, 5, 2, 6)  # with a gap after each map
    assert torch.equal(drawn[:, :4, :, :5].transpose(1, 2), maps)
    assert (drawn[:, 4] == -1).all() and (drawn[..., 5] == -1).all()
    assert [label.get_text() for label in axes.get_xticklabels()] == list("vwxyz") * 2
    assert [label.get_text() for label in axes.get_yticklabels()] == list("abcd") * 3
    assert [text.get_text() for text in axes.texts] == ["head 0", "head 1", "layer 0", "layer 1", "layer 2"]


def test_the_page_shows_the_map_that_is_clicked(gpt, tmp_path):
    maps, _ = attention_maps(gpt, TEXT)
    names = ["</script>", "<b>", *map(str, range(7))]
    write_page(maps, names, names, tmp_path / "maps.html")
    page = (tmp_path / "maps.html").read_text("utf-8")
    assert "://" not in page and "src=" not in page and "href=" not in page and len(page) < 6000 + maps.numel() * 2
    with opened(tmp_path / "maps.html", tmp_path / "profile") as browser:
        for layer, head in ((0, 0), (1, 0), (1, 1), (0, 1)):
            browser.mouse(f"#layer button:nth-of-type({layer + 1})")
            browser.mouse(f"#head button:nth-of-type({head + 1})")
            shown = browser.value("[...document.querySelectorAll('td')].map(cell => Number(cell.dataset.weight))")
            torch.testing.assert_close(torch.tensor(shown).view(9, 9), maps[layer, head], rtol=0, atol=0.0026)
            pressed = browser.value("[...document.querySelectorAll('[aria-pressed=true]')].map(each => each.innerText)")
            assert pressed == [str(layer), str(head)]
        assert browser.value("[...document.querySelectorAll('tbody th')].map(each => each.innerText)") == names
        assert browser.value("[...document.querySelectorAll('thead th')].map(each => each.innerText)") == ["", *names]
        browser.mouse("tbody tr:nth-of-type(3) td:nth-of-type(1)", click=False)
        told = browser.value("document.getElementById('told').innerText")
        name, percent = told.removesuffix(" %").split(": ")
        assert name == "0 → </script>" and abs(float(percent) / 100 - maps[0, 1, 2, 0]) < 0.0026
