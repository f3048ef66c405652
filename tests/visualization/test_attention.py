"""Attention maps: those of the model, under the names that people read, as a picture and as a page that is clicked."""

import base64
import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from python_ref import GPT, BERTClassifier, BERTConfig, GPTConfig
from tests.support.browser import opened
from transformer_kernels.training.data.tokenizers import ByteTokenizer, CharacterTokenizer
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
        expected = ["f", "ox", "f", "ox", "s", "<0xC3>", "<0xA9>", "↵"]
        assert tokenizer.encode("fox foxsé\n").tokens == ["f", "ox", "Ġf", "ox", "s", "Ã", "©", "Ċ"]
    else:
        (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "fox", "##s", "a"]))
        tokenizer = tokenizers.BertWordPieceTokenizer(str(tmp_path / "vocab.txt"))._tokenizer
        expected = ["Fox", "a", "Fox", "##s"]
        assert tokenizer.encode("Fox a Foxs").tokens == ["[CLS]", "fox", "a", "fox", "##s", "[SEP]"]
    model = GPT(GPTConfig(vocab_size=16, **SIZES))
    assert read(loaded(model, tokenizer), "fox foxsé\n" if kind == "byte pairs" else "Fox a Foxs").names == expected


def test_bytes_of_a_character_are_shown(bert):
    reading = read(bert, "aé b")
    assert reading.names == ["[CLS]", "a", "<0xC3>", "<0xA9>", "␣", "b", "[SEP]"]
    assert reading.spans == [(0, 0), (0, 1), (1, 2), (1, 2), (2, 3), (3, 4), (0, 0)]


def test_what_cannot_be_looked_at(gpt):
    with pytest.raises(ValueError, match="the text must have at least one token; got ''"):
        attention_maps(gpt, "")
    with pytest.raises(ValueError, match="the text must have at most 256 tokens; got 300; shorten it"):
        attention_maps(gpt, "a" * 300)
    with pytest.raises(ValueError, match="a Linear does not take one input text"):
        attention_maps(loaded(torch.nn.Linear(2, 2), gpt.tokenizer), "a")


def test_the_picture_has_a_map_for_each_layer_and_head(tmp_path, monkeypatch):
    kept = []
    monkeypatch.setattr(attention, "write_figure", lambda figure, path: kept.append(figure))
    maps = torch.rand(3, 2, 4, 5)
    attention.draw_maps(maps, list("abcd"), list("vwxyz"), tmp_path / "maps.png")
    axes = kept[0].axes[0]
    assert axes.texts[0].get_fontsize() >= 8 and kept[0].get_size_inches()[0] <= 10
    drawn = torch.tensor(axes.images[0].get_array().filled(-1.0)).view(3, 5, 2, 6)  # with a gap after each map
    assert torch.equal(drawn[:, :4, :, :5].transpose(1, 2), maps)
    assert (drawn[:, 4] == -1).all() and (drawn[..., 5] == -1).all()
    assert [label.get_text() for label in axes.get_xticklabels()] == list("vwxyz") * 2
    assert [label.get_text() for label in axes.get_yticklabels()] == list("abcd") * 3
    assert [text.get_text() for text in axes.texts] == ["head 0", "head 1", "layer 0", "layer 1", "layer 2"]


def test_one_map_has_its_weights_in_the_cells(tmp_path, monkeypatch):
    kept = []
    monkeypatch.setattr(attention, "write_figure", lambda figure, path: kept.append(figure))
    maps = torch.tensor([[[[1.0, 0.0], [0.25, 0.75]]]])
    attention.draw_maps(
        maps, ["$a", "b"], ["$a", "b"], tmp_path / "map.png", title="model", names=["layer 3", "head 1"]
    )
    axes = kept[0].axes[0]
    assert [text.get_text() for text in axes.texts] == ["1.00", "0.25", "0.75"]
    assert axes.get_title() == "model\nlayer 3, head 1"
    assert axes.images[0].get_array()[0, 1] == -1 < axes.images[0].norm.vmin == 0.25  # grey: below the scale
    attention.draw_maps(torch.rand(12, 12, 40, 40), ["x"] * 40, ["x"] * 40, tmp_path / "maps.png")
    assert not kept[1].axes[0].get_xticks().size and kept[1].get_size_inches()[0] <= 10


def cell(browser, query, key, cells):
    """Point at a cell of the map."""
    side = browser.value("state.cell")
    browser.mouse("#map", shift=((key + 0.5 - cells / 2) * side, (query + 0.5 - cells / 2) * side))
    return browser.value("element('tip').innerText")


def test_the_page_shows_the_map_that_is_clicked(gpt, tmp_path):
    maps, _ = attention_maps(gpt, TEXT)
    names = ["</script>", "<b>", *map(str, range(7))]
    page = tmp_path / "maps.html"
    write_page(maps, names, names, page, title="Attention of <gpt>", text="a & b", causal=True)
    written = page.read_text("utf-8")
    assert "://" not in written and "src=" not in written and "href=" not in written
    data = json.loads(re.search(r"\{\"title\".*\}", written)[0])
    assert (data["layers"], data["heads"], data["causal"]) == (2, 2, True) and data["queries"] == data["keys"] == names
    weights = torch.from_numpy(np.frombuffer(base64.b64decode(data["weights"]), "<u2").astype("f4")).view(maps.shape)
    assert ((weights == 65535) == (maps == 0).all(1, keepdim=True)).all()
    torch.testing.assert_close(weights.masked_fill(weights == 65535, 0) / 65534, maps, rtol=0, atol=8e-6)
    with opened(page, tmp_path / "profile") as browser:
        assert browser.value("[document.title, element('text').innerText]") == ["Attention of <gpt>", "a & b"]
        for layer, head in ((0, 1), (1, 0), (1, 1), (0, 0)):
            browser.mouse(f"#grid button:nth-of-type({layer * 3 + head + 1})")
            assert browser.value("element('chosen').innerText") == f"layer {layer}, head {head}"
            assert browser.value("document.querySelector('#grid [aria-pressed=true]').title") == (
                f"layer {layer}, head {head}"
            )
            for query, key in ((0, 0), (2, 0), (8, 5)):
                name, percent = cell(browser, query, key, 9).removesuffix(" %").split(": ")
                assert name == f"{names[query]} → {names[key]}"
                assert abs(float(percent) / 100 - maps[layer, head, query, key]) < 0.0026
            assert cell(browser, 2, 5, 9) == "0 → 3: a later token: impossible"
        browser.mouse("#grid button:nth-of-type(3)")
        assert browser.value("element('chosen').innerText") == "layer 0, mean over heads"
        assert abs(float(cell(browser, 6, 2, 9).split(": ")[1][:-2]) / 100 - maps[0, :, 6, 2].mean()) < 0.0026
        near = browser.value("[...document.querySelectorAll('.names .near')].map(each => each.innerText)")
        assert near == [names[2], names[6]]  # the key, then the query


PIXEL = "[...element('map').getContext('2d').getImageData({1}, {0}, 1, 1).data]"


def test_the_page_by_keys_scales_and_themes(tmp_path):
    """Uniform weights differ in colour by their own scale only; masked cells have a separate colour."""
    maps = torch.full((2, 2, 9, 9), 1 / 8)
    maps[..., 0, 1], maps[..., 0, 2], maps[..., 3] = 1 / 8 + 0.02, 1 / 8 - 0.02, 0.0
    maps[0, 0, 5, 5] = 0.0  # a zero that another head of the layer sees
    names = [str(number) for number in range(9)]
    write_page(maps, names, names, tmp_path / "maps.html")
    with opened(tmp_path / "maps.html", tmp_path / "profile") as browser:

        def key(name):
            for kind in ("keyDown", "keyUp"):
                browser.call("Input.dispatchKeyEvent", type=kind, key=name)

        chosen = lambda: browser.value("element('chosen').innerText")  # noqa: E731
        pixel = lambda query, column: browser.value(PIXEL.format(query, column))  # noqa: E731
        assert cell(browser, 4, 3, 9) == "4 → 3: masked" and cell(browser, 5, 5, 9) == "5 → 5: 0.00 %"
        grey, zero = pixel(4, 3), pixel(5, 5)
        assert len({*grey[:3]}) == 1 and grey != zero and grey[3] == 255
        key("ArrowDown")
        key("ArrowRight")
        assert chosen() == "layer 1, head 1"
        key("ArrowLeft")
        key("ArrowLeft")
        assert chosen() == "layer 1, mean over heads"
        own = [pixel(0, 1), pixel(0, 2)]
        key("s")
        fixed = [pixel(0, 1), pixel(0, 2)]
        difference = [sum(abs(a - b) for a, b in zip(*pair, strict=True)) for pair in (own, fixed)]
        assert difference[0] > 300 and difference[1] < 60
        assert browser.value("[element('low').innerText, element('high').innerText]") == ["0.00 %", "100.0 %"]
        back = "getComputedStyle(document.body).backgroundColor"
        before, light = browser.value(back), pixel(0, 1)
        key("t")
        assert browser.value(back) != before and pixel(0, 1) != light
        key("m")
        assert browser.value("[element('matrix').hidden, element('arcs').hidden]") == [True, False]
        side = browser.value("element('arcs').offsetWidth")
        browser.mouse("#arcs", shift=(60 - side / 2, (2 - 4) * 20))  # the third query
        assert browser.value("state.pinned") == 2


def test_the_buttons_of_the_page(tmp_path):
    maps = torch.full((1, 1, 3, 3), 1 / 3)
    write_page(maps, list("abc"), list("abc"), tmp_path / "maps.html")
    with opened(tmp_path / "maps.html", tmp_path / "profile") as browser:
        shown = "[state.view, state.scale, state.cell, isDark(), element('matrix').hidden]"
        before = browser.value(shown)
        assert before[:2] == ["matrix", "own"] and before[4] is False
        for button in ("arcs-view", "fixed-scale", "larger", "larger", "smaller", "theme"):
            browser.mouse(f"#{button}")
        after = browser.value(shown)
        assert after == ["arcs", "fixed", before[2] + 2, not before[3], True]
        pressed = browser.value("[...document.querySelectorAll('#controls [aria-pressed=true]')].map(each => each.id)")
        assert pressed == ["arcs-view", "fixed-scale"]
        for button in ("matrix-view", "own-scale", "theme"):
            browser.mouse(f"#{button}")
        assert browser.value(shown) == ["matrix", "own", before[2] + 2, before[3], False]


def test_the_page_of_200_tokens_has_no_lag_and_keeps_its_headers(tmp_path):
    maps = torch.rand(2, 12, 200, 200).softmax(-1)
    names = [f"token {number}" for number in range(200)]
    write_page(maps, names, names, tmp_path / "maps.html")
    with opened(tmp_path / "maps.html", tmp_path / "profile") as browser:
        seconds = "(() => {{ const start = performance.now(); {}; return (performance.now() - start) / 1000; }})()"
        assert browser.value(seconds.format("for (let head = 0; head < 10; head++) choose(1, head)")) < 2.0
        assert browser.value(seconds.format("drawArcs(maps[0][0])")) < 2.0
        browser.value("element('frame').scrollTo(600, 700)")
        tops = "['keys', 'frame'].map(id => Math.round(element(id).getBoundingClientRect().top))"
        lefts = "['queries', 'frame'].map(id => Math.round(element(id).getBoundingClientRect().left))"
        for keys, frame in (browser.value(tops), browser.value(lefts)):
            assert abs(keys - frame) <= 1
        browser.mouse("#frame", click=False)
        tip = "(() => { const box = element('tip').getBoundingClientRect(); return [box.x, box.y]; })()"
        middle = tip.replace("'tip'", "'frame'").replace(
            "box.x, box.y", "box.x + box.width / 2, box.y + box.height / 2"
        )
        distances = [abs(a - b) for a, b in zip(browser.value(tip), browser.value(middle), strict=True)]
        assert max(distances) < 250 and browser.value("!element('tip').hidden")


@pytest.fixture
def page(tmp_path):
    """A page of 2 layers of 3 heads and 5 tokens, the first and last special, with predictions."""
    maps = torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(0)).softmax(-1)
    likely = [[(f"after {query}", 0.5)] for query in range(5)]
    names = ["[CLS]", "a", "b", 'c"', "[SEP]"]
    write_page(maps, names, names, tmp_path / "maps.html", special=([0, 4], [0, 4]), predictions=likely)
    return tmp_path / "maps.html", maps


@pytest.mark.parametrize("heads", [4, 12])
@pytest.mark.parametrize(("width", "phone"), [(1280, False), (390, True)])
def test_the_page_fits_the_screen(tmp_path, width, phone, heads):
    maps = torch.rand(6, heads, 14, 14).softmax(-1)
    names = [f"token {number}" for number in range(14)]
    write_page(maps, names, names, tmp_path / "maps.html")
    with opened(tmp_path / "maps.html", tmp_path / "profile") as browser:
        browser.resize(width, 844, phone=phone)
        browser.value(
            "state.cell = Math.max(10, Math.min(30, Math.floor((innerWidth - 130) / 14))); layOut(); showAll()"
        )
        for view in ("matrix", "arcs"):
            browser.value(f"view('{view}')()")
            assert browser.value("document.documentElement.scrollWidth") <= width
            frame = browser.value("element('frame').getBoundingClientRect().width")
            assert frame > 0.6 * min(width, 500)
        browser.mouse("#matrix-view")
        browser.value("element('frame').scrollIntoView()")
        browser.mouse("#map")
        assert "→" in browser.value("element('tip').innerText")


def test_special_tokens_are_hidden_and_the_scale_follows(page, tmp_path):
    path, maps = page
    with opened(path, tmp_path / "profile") as browser:
        browser.mouse("#special")
        names = "[...element('queries').children].filter(each => !each.hidden).map(each => each.innerText)"
        assert browser.value(names) == ["a", "b", 'c"']
        assert browser.value("[element('map').width, element('map').height]") == [3, 3]
        name, percent = cell(browser, 1, 2, 3).removesuffix(" %").split(": ")
        assert name == 'b → c"' and abs(float(percent) / 100 - maps[0, 0, 2, 3]) < 0.0006
        low, high = browser.value("limits(current())")
        seen = maps[0, 0, 1:4, 1:4]
        assert abs(low - seen.min()) < 1e-4 and abs(high - seen.max()) < 1e-4
        browser.mouse("#special")
        assert browser.value("element('map').width") == 5


def test_one_sentence_reads_the_other(tmp_path):
    """The button goes through the four pairs of sentences, together with the hidden special tokens."""
    maps = torch.randn(1, 2, 5, 5, generator=torch.Generator().manual_seed(0)).softmax(-1)
    names, special = ["[CLS]", "a", "[SEP]", "b", "[SEP] "], [0, 2, 4]
    write_page(maps, names, names, tmp_path / "maps.html", special=(special, special), sentences=[0, 0, 0, 1, 1])
    with opened(tmp_path / "maps.html", tmp_path / "profile") as browser:
        drawn = "[element('between').innerText, shown.queries, shown.keys]"
        found = []
        for _ in range(5):
            found.append(browser.value(drawn))
            browser.mouse("#between")
        first, second = [0, 1, 2], [3, 4]
        assert found == [
            ["both sentences", first + second, first + second], ["1 → 1", first, first], ["1 → 2", first, second],
            ["2 → 1", second, first], ["2 → 2", second, second],
        ]  # fmt: skip
        browser.value("location.hash = '#heads=0.1&between=2&special=hidden'; onhashchange()")
        assert browser.value(drawn) == ["1 → 2", [1], [3]] and browser.value("element('map').width") == 1
        assert abs(browser.value("limits(current())[1]") - maps[0, 1, 1, 3].item()) < 1e-4
        assert browser.value("location.hash").endswith("&special=hidden&between=2")


def test_predictions_are_shown_at_the_query(page, tmp_path):
    with opened(page[0], tmp_path / "profile") as browser:
        assert "Point at a query" in browser.value("element('prediction').innerText")
        cell(browser, 2, 0, 5)
        assert browser.value("element('prediction').innerText") == "after “b”: after 2 50.0 %"


@pytest.mark.parametrize("options", [{}, {"kv_heads": 1, "positions": "rotary"}])
def test_the_operands_are_those_of_the_weights(options):
    torch.manual_seed(0)
    tokenizer = CharacterTokenizer(TEXT)
    gpt = loaded(GPT(GPTConfig(vocab_size=tokenizer.vocabulary_size, **SIZES, **options)), tokenizer)
    before = [module.ops for module in gpt.model.modules() if "ops" in vars(module)]
    operands = []
    maps, _ = attention_maps(gpt, TEXT, operands=operands)
    assert len(operands) == 2 and operands[0].q.shape == operands[0].k.shape == (2, 9, 8)
    later = torch.ones(9, 9, dtype=torch.bool).triu(1)
    for weights, (q, k, scale) in zip(maps, operands, strict=True):
        scores = (scale * q @ k.mT).masked_fill(later, float("-inf"))
        torch.testing.assert_close(scores.softmax(-1), weights, rtol=1e-5, atol=1e-6)
    assert [module.ops for module in gpt.model.modules() if "ops" in vars(module)] == before


def test_the_query_and_the_key_behind_a_weight(gpt, tmp_path):
    operands = []
    maps, names = attention_maps(gpt, TEXT, operands=operands)
    write_page(maps, names, names, tmp_path / "maps.html", causal=True, operands=operands)
    with opened(tmp_path / "maps.html", tmp_path / "profile") as browser:
        score = lambda: browser.value("element('score').innerText")  # noqa: E731
        assert "Point at a cell" in score() and browser.value("element('strips').hidden")
        for layer, head in ((0, 0), (1, 1)):
            browser.value(f"choose({layer}, {head})")
            cell(browser, 8, 5, 9)
            terms = operands[layer].scale * operands[layer].q[head, 8] * operands[layer].k[head, 5]
            number = re.search(r"q · k = (\S+);", score())[1]
            assert abs(float(number) - terms.sum()) < 0.0051 and score().startswith("n → ↵: ")
            largest = terms.abs().argmax()
            assert f"largest terms: {terms[largest]:.2f} (dimension {largest})" in score()
            assert browser.value("[...document.querySelectorAll('#strips canvas')].map(each => each.width)") == [8] * 3
        browser.value("choose(1, 0)")  # the same cell of another head
        other = operands[1].scale * operands[1].q[0, 8] @ operands[1].k[0, 5]
        assert score().startswith("n → ↵: ") and f"q · k = {other:.2f};" in score()
        browser.value("choose(1, 2)")
        assert browser.value("element('operands').hidden")  # a mean of heads has none


def test_several_heads_are_averaged(page, tmp_path):
    path, maps = page
    with opened(path, tmp_path / "profile") as browser:
        browser.mouse("#several")
        browser.mouse("#grid button:nth-of-type(6)")  # four a layer, the mean last: layer 1, head 1
        assert browser.value("element('chosen').innerText") == "layer 0, head 0 + layer 1, head 1 (mean)"
        shown = float(cell(browser, 1, 3, 5).split(": ")[1].removesuffix(" %")) / 100
        assert abs(shown - (maps[0, 0, 1, 3] + maps[1, 1, 1, 3]) / 2) < 0.0006
        browser.mouse("#arcs-view")
        assert browser.value("element('chosen').innerText") == "layer 0, head 0 + layer 1, head 1"
        browser.mouse("#grid button:nth-of-type(1)")  # removes the first
        assert browser.value("selected()") == [[1, 1]]


def test_the_address_contains_the_choice(page, tmp_path):
    with opened(page[0], tmp_path / "profile") as browser:
        for button in ("#several", "#grid button:nth-of-type(7)", "#fixed-scale", "#special"):
            browser.mouse(button)
        address = browser.value("location.hash")
        assert address == "#heads=0.0+1.2&view=matrix&scale=fixed&special=hidden"
        browser.value("state.more = []; state.scale = 'own'; show(false); showAll()")
        assert browser.value("location.hash") == "#heads=0.0&view=matrix&scale=own"
        browser.value(f"location.hash = {address!r}; onhashchange()")
        assert browser.value("[selected(), state.scale, state.special]") == [[[0, 0], [1, 2]], "fixed", True]
        browser.value("location.hash = '#heads=9.9+x'; onhashchange()")  # no such head: the choice stays
        assert browser.value("selected()") == [[0, 0], [1, 2]]


def test_export(page, tmp_path):
    path, maps = page
    with opened(path, tmp_path / "profile") as browser:
        header, *lines = browser.value("table()").splitlines()
        assert header == 'query,"[CLS]","a","b","c""","[SEP]"' and len(lines) == 5
        weights = [[float(value) for value in line.rsplit(",", 5)[1:]] for line in lines]
        torch.testing.assert_close(torch.tensor(weights), maps[0, 0], rtol=0, atol=1e-5)
        browser.value(
            "saved = []; HTMLAnchorElement.prototype.click = function () { saved.push([this.download, this.href]); }"
        )
        browser.mouse("#save-png")
        browser.mouse("#save-csv")
        (picture, address), (table, text) = browser.value("saved")
        assert (picture, table) == ("layer-0-head-0.png", "layer-0-head-0.csv")
        assert base64.b64decode(address.partition(",")[2]).startswith(b"\x89PNG") and text.startswith("data:text/csv")
        assert browser.value("[picture().width, picture().height]") == [120 + 5 * 30] * 2


def test_next_tokens_are_those_of_the_model(gpt, bert):
    likely = attention.next_tokens(gpt, TEXT)
    probabilities = gpt.model(read(gpt, TEXT).tokens)[0].softmax(-1)
    assert [row[0][1] for row in likely] == pytest.approx(probabilities.amax(-1).tolist(), abs=1e-6)
    assert all(len(row) == 3 for row in likely)
    assert attention.next_tokens(bert, "fox") == []
