"""Names and spans of the tokens of a text, by every tokenizer."""

from types import SimpleNamespace

import pytest
import torch

from python_ref import BERTClassifier, BERTConfig, build
from transformer_kernels.training.data.tokenizers import ByteTokenizer, LearnedTokenizer
from transformer_kernels.training.recipes.vit import read_image
from transformer_kernels.visualization.attention import attention_maps
from transformer_kernels.visualization.tokens import read, split_in_every_way
from transformer_kernels.visualization.words import word_in_context

TEXTS = ["The dull film, a dull film", "the great film", "a great, great end"] * 2


def encoder(tokenizer):
    torch.manual_seed(0)
    sizes = {"context": 64, "width": 16, "layers": 1, "heads": 2}
    model = BERTClassifier(BERTConfig(vocab_size=tokenizer.vocabulary_size, **sizes)).eval()
    return SimpleNamespace(model=model, tokenizer=tokenizer, device=torch.device("cpu"))


@pytest.fixture(params=["bytes", "byte pairs", "words"])
def loaded(request):
    if request.param == "bytes":
        return encoder(ByteTokenizer())
    pytest.importorskip("tokenizers", reason="tokenizers is not installed (extra `train`)")
    learn = LearnedTokenizer.learn_words if request.param == "words" else LearnedTokenizer.learn
    return encoder(learn(TEXTS, 300))


def test_spans_are_those_of_the_names(loaded):
    text = "the great, dull film"
    reading = read(loaded, text)
    assert reading.names[0] == "[CLS]" and reading.names[-1] == "[SEP]"
    inner = list(zip(reading.names, reading.spans, strict=True))[1:-1]
    assert all(text[start:end].strip() in ("", name) for name, (start, end) in inner)
    assert reading.tokens[0, 1:-1].tolist() == loaded.tokenizer.encode(text)


def test_a_mask_in_the_text_is_one_token(loaded):
    text = "a [MASK] film"
    reading = read(loaded, text)
    index = reading.names.index("[MASK]")
    assert reading.tokens[0, index] == loaded.tokenizer.mask and text[slice(*reading.spans[index])] == "[MASK]"
    before, after = loaded.tokenizer.encode("a "), loaded.tokenizer.encode(" film")
    assert reading.tokens[0, 1:-1].tolist() == [*before, loaded.tokenizer.mask, *after]
    found = word_in_context(loaded, "film", text)
    assert "".join(found.names[index] for index in found.indices[0]) == "film"


def test_a_word_outside_the_vocabulary_is_named():
    pytest.importorskip("tokenizers", reason="tokenizers is not installed (extra `train`)")
    loaded = encoder(LearnedTokenizer.learn_words(TEXTS, 300))
    assert read(loaded, "the zebra, a film").names == ["[CLS]", "the", "[UNK]", ",", "a", "film", "[SEP]"]
    assert word_in_context(loaded, "film", "the zebra, a film").indices == [[5]]
    with pytest.raises(ValueError, match=r"the model does not know the word 'zebra': it reads \[UNK\] in 'the zebra'"):
        word_in_context(loaded, "zebra", "the zebra")


def test_the_patches_of_an_image(tmp_path):
    pillow = pytest.importorskip("PIL.Image", reason="pillow is not installed (extra `train`)")
    path = tmp_path / "seven.png"
    pillow.fromarray(torch.arange(64, dtype=torch.uint8).view(8, 8).numpy()).save(path)
    model = build("vit_digits", width=16, layers=2, heads=2, patch=2).eval()
    loaded = SimpleNamespace(model=model, tokenizer=None, device=torch.device("cpu"), recipe=None)
    maps, names = attention_maps(loaded, str(path))
    assert names[:6] == ["[CLS]", "0,0", "0,1", "0,2", "0,3", "1,0"] and len(names) == 17
    expected = model(read_image(str(path))[None], return_attention=True)[1]
    torch.testing.assert_close(maps, torch.cat(expected).detach())
    del loaded.recipe  # a pretrained one has images of its own size
    with pytest.raises(ValueError, match="a ViT does not take one input text"):
        attention_maps(loaded, str(path))


def test_a_text_in_every_way():
    pytest.importorskip("tokenizers", reason="tokenizers is not installed (extra `train`)")
    corpus = "the sea, a seal and the seals\n" * 3
    splits = {split.name: split for split in split_in_every_way(["the seals"], corpus, 300)[0]}
    assert splits["characters"].names == ["t", "h", "e", "␣", "s", "e", "a", "l", "s"]
    assert splits["words"].names == ["the", "seals"] and splits["words"].vocabulary == 8
    assert splits["byte pairs"].names[0] == "the" and "".join(splits["byte pairs"].names) == "theseals"
    pieces = splits["WordPieces"].names
    assert "".join(piece.removeprefix("##") for piece in pieces) == "theseals" and "[CLS]" not in pieces
    _, unseen = split_in_every_way(["the", "zebra sealsea"], corpus, 300)
    assert unseen[0].vocabulary == splits["characters"].vocabulary + len(set("zbr"))
    assert unseen[1].names == ["[UNK]", "[UNK]"] and unseen[2].names[0] == "[UNK]"
    assert (
        unseen[2].names[1] == "seals"
        and unseen[2].names[2].startswith("##")
        and str(unseen[1]).endswith("2 tokens\n  [UNK]|[UNK]\n  0 0")
    )
    with pytest.raises(ValueError, match="--vocabulary must be at least 300; got 10"):
        split_in_every_way(["a"], corpus, 10)
