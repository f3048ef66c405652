"""Tokenizers of folders and GGUF files, against transformers on the same files."""

import json
import os
import sys
from pathlib import Path

import pytest

import transformer_kernels as tk
from tests.support.gguf_files import BYTES, llama_metadata, random_llama, tokenizer_metadata, write_gguf
from transformer_kernels.pretrained.tokenizers import end_tokens, load_tokenizer

tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed (extra `train`)")
transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra `test`)")

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "happy", "dog", "##s"]


def test_word_pieces(tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS))
    tokenizer = load_tokenizer(tmp_path, vocab_size=9)
    assert tokenizer.encode("A happy dogs cat [MASK]").ids == [2, 5, 6, 7, 8, 1, 4, 3]
    (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    assert load_tokenizer(tmp_path).encode("A dog").ids == [2, 1, 7, 3]
    with pytest.raises(ValueError, match="has 9 tokens, the model only 8; it belongs to another model"):
        load_tokenizer(tmp_path, vocab_size=8)


ACCENTS = [*WORDS[:5], "mochte", "m\u00f6chte", "M\u00f6chte", "\u4e2d", "##\u6587", "\u6587", "n"]
WORD_PIECE_OPTIONS = (
    {},
    {"do_lower_case": False},
    {"do_lower_case": True, "strip_accents": False},
    {"do_lower_case": False, "strip_accents": True},
    {"tokenize_chinese_chars": False},
    {"unk_token": "n"},
    {"cls_token": "[SEP]", "sep_token": "[CLS]"},
)


@pytest.mark.parametrize("options", WORD_PIECE_OPTIONS, ids=str)
@pytest.mark.parametrize("with_model", [False, True])
def test_options_of_word_pieces(options, with_model, tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join(ACCENTS) + "\n", encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(options))
    if with_model:
        transformers.BertConfig(vocab_size=len(ACCENTS)).save_pretrained(tmp_path)
    theirs = transformers.BertTokenizer.from_pretrained(tmp_path)
    for text in ("M\u00f6chte mochte", "\u4e2d\u6587 x [MASK]"):
        assert load_tokenizer(tmp_path).encode(text).ids == theirs(text)["input_ids"]


def test_an_option_that_tokenizer_json_does_not_have(tmp_path):
    """transformers follows tokenizer_config.json."""
    (tmp_path / "vocab.txt").write_text("\n".join(ACCENTS) + "\n", encoding="utf-8")
    transformers.BertTokenizer.from_pretrained(tmp_path).save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path).encode("M\u00f6chte").tokens == ["[CLS]", "mochte", "[SEP]"]
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"strip_accents": False}))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert load_tokenizer(tmp_path).encode("M\u00f6chte").ids == theirs("M\u00f6chte")["input_ids"]
    assert load_tokenizer(tmp_path).encode("M\u00f6chte").tokens == ["[CLS]", "m\u00f6chte", "[SEP]"]


def byte_pairs(folder, *more, merges=("h e",)):
    (folder / "vocab.json").write_text(json.dumps({token: n for n, token in enumerate([*BYTES, "he", *more])}))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]), encoding="utf-8")


def test_byte_pairs(tmp_path):
    vocabulary = {token: index for index, token in enumerate(["a", "b", "Ġ", "ab", "Ġab"])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\nĠ ab\n", encoding="utf-8")
    for names in ({}, {"vocab.json": "encoder.json", "merges.txt": "vocab.bpe"}):
        for before, after in names.items():
            (tmp_path / before).rename(tmp_path / after)
        tokenizer = load_tokenizer(tmp_path, vocab_size=5)
        assert tokenizer.encode("ab aba").ids == [3, 4, 0]
        assert tokenizer.decode([3, 4, 0]) == "ab aba"


def test_special_tokens_of_byte_pairs(tmp_path):
    byte_pairs(tmp_path, "<|endoftext|>")
    assert load_tokenizer(tmp_path, 258).encode("he<|endoftext|>he").tokens == ["he", "<|endoftext|>", "he"]
    (tmp_path / "added_tokens.json").write_text('{"<|pad|>": 258}')
    found = load_tokenizer(tmp_path, 259).encode("he<|pad|>").tokens
    assert found == transformers.GPT2Tokenizer.from_pretrained(tmp_path).tokenize("he<|pad|>") == ["he", "<|pad|>"]
    with pytest.raises(ValueError, match="has 259 tokens, the model only 258"):
        load_tokenizer(tmp_path, 258)


def test_a_roberta_begins_and_ends_its_texts(tmp_path):
    byte_pairs(tmp_path, "<s>", "<pad>", "</s>", "<unk>", "<mask>")
    transformers.RobertaConfig(vocab_size=262).save_pretrained(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)("he<mask>")["input_ids"]
    assert load_tokenizer(tmp_path, 262).encode("he<mask>").ids == theirs
    assert load_tokenizer(tmp_path).encode("he<mask>").tokens == ["<s>", "he", "<mask>", "</s>"]


@pytest.mark.parametrize(
    "add", [{}, {"add_bos_token": True}, {"add_bos_token": False}, {"add_eos_token": True}], ids=str
)
def test_bos_and_eos_in_the_settings_of_a_whole_tokenizer(add, tmp_path):
    byte_pairs(tmp_path, "<s>", "</s>")
    whole = transformers.GPT2Tokenizer.from_pretrained(tmp_path).backend_tokenizer
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=whole, bos_token="<s>", eos_token="</s>")
    made.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | add))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)("he he")["input_ids"]
    assert load_tokenizer(tmp_path).encode("he he").ids == theirs


def test_the_byte_pairs_of_gpt2():
    checkout = Path(__file__).parents[2]
    folder = Path(os.environ.get("TRANSFORMER_KERNELS_DATA") or checkout.parent / "shared" / "data") / "gpt2_bpe"
    if not folder.is_dir():
        pytest.skip("no real data: set TRANSFORMER_KERNELS_DATA to a folder with gpt2_bpe")
    tokenizer = load_tokenizer(folder, vocab_size=50_257)
    assert tokenizer.encode("The quick brown fox<|endoftext|>").ids == [464, 2068, 7586, 21831, 50256]
    assert tokenizer.decode([464, 2068, 7586, 21831]) == "The quick brown fox"


DEEP = "[" * 100_000
BROKEN = {
    "nothing": ({"tokenizer_config.json": "{}"}, FileNotFoundError, "no tokenizer.json, vocab.txt, or vocab.json"),
    "an empty object": ({"tokenizer.json": "{}"}, ValueError, "the tokenizer cannot be loaded"),
    "a list": ({"tokenizer.json": "[]"}, ValueError, "the tokenizer cannot be loaded"),
    "nested": ({"tokenizer.json": DEEP}, ValueError, "the tokenizer cannot be loaded"),
    "nested settings": (
        {"vocab.txt": "a", "tokenizer_config.json": DEEP},
        ValueError,
        "tokenizer_config.json: not JSON",
    ),
    "settings are a list": ({"vocab.txt": "a", "tokenizer_config.json": "[]"}, ValueError, "must contain an object"),
    "code": (
        {"vocab.txt": "a", "tokenizer_config.json": '{"auto_map": {"AutoTokenizer": ["x.X", null]}}'},
        ValueError,
        "auto_map names code, which is never run",
    ),
    "a merge of three": ({"vocab.json": '{"a": 0}', "merges.txt": "#v\na a a\n"}, ValueError, "cannot be loaded"),
    "a vocabulary of texts": ({"vocab.json": '{"a": "b"}', "merges.txt": "#v\n"}, ValueError, "cannot be loaded"),
    "a nested vocabulary": ({"vocab.json": DEEP, "merges.txt": "#v\n"}, ValueError, "vocab.json: not JSON"),
    "not UTF-8": ({"vocab.txt": b"\xff\xfe\xff"}, ValueError, "cannot be loaded"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_tokenizers(case, tmp_path):
    files, kind, message = BROKEN[case]
    for name, content in files.items():
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(kind, match=rf"{tmp_path}.*{message}"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "vocab.txt", "tokenizer_config.json"])
def test_a_fifo_is_not_read(name, tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS))
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(ValueError, match=f"{name}: must be a regular file"):
        load_tokenizer(tmp_path)


ENDS = {"[1, 2]": {1, 2}, "3": {3}, "null": set()}
NO_ENDS = ("true", "1.5", '"</s>"', "-1", "[true]", "[[1]]", DEEP, "NaN")


@pytest.mark.parametrize("given", [*ENDS, *NO_ENDS], ids=lambda text: text[:20])
def test_end_tokens(given, tmp_path):
    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": {given}}}')
    if given in ENDS:
        assert end_tokens(tmp_path) == ENDS[given]
    else:
        with pytest.raises(ValueError, match=r"generation_config\.json: "):
            end_tokens(tmp_path)


def test_missing_packages_are_named_with_their_extra(tmp_path, monkeypatch):
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS))
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"needs the package transformers: pip install 'transformer_kernels\[hugg"):
        load_tokenizer(tmp_path)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match=r"needs the package tokenizers: pip install 'transformer_kernels\[hugg"):
        load_tokenizer(tmp_path)
    write_gguf(tmp_path / "a.gguf", llama_metadata(), {})
    monkeypatch.delitem(sys.modules, "transformer_kernels.pretrained.gguf", raising=False)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ImportError, match=r"need the package gguf: pip install 'transformer_kernels\[gguf\]'"):
        tk.load_pretrained(tmp_path / "a.gguf")


# GGUF

DIGITS = ("12", "123", "1234", "12345")
DIGIT_MERGES = ("1 2", "12 3", "123 4", "1234 5")


@pytest.fixture
def gguf_file(tmp_path):
    pytest.importorskip("gguf", reason="gguf is not installed (extra `test`)")
    return lambda **options: write_gguf(tmp_path / "a.gguf", tokenizer_metadata(**options), {})


SPLIT = {
    "gpt-2": ["12345", "Ġ", "12345"],
    "smollm": ["1", "2", "3", "4", "5", "Ġ", "1", "2", "3", "4", "5"],
    "llama-bpe": ["123", "4", "5", "Ġ", "123", "4", "5"],
}


@pytest.mark.parametrize("pre", SPLIT)
def test_the_pre_tokenizer_decides_the_tokens(pre, gguf_file):
    path = gguf_file(pre=pre, extra=DIGITS, merges=DIGIT_MERGES, add_bos_token=False)
    assert load_tokenizer(path).encode("12345 12345").tokens == SPLIT[pre]


TEXTS = ("Hello, it's 12345 o'clock", "  two  spaces\n\n\tand tabs ", "Ünïcödé 中文 12\u00b2", "HE'LL 'S <s>x</s>")


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe"])
@pytest.mark.parametrize("bos", [False, True])
def test_gguf_tokens_are_those_of_transformers(text, pre, bos, gguf_file):
    path = gguf_file(pre=pre, extra=DIGITS, merges=DIGIT_MERGES, add_bos_token=bos)
    theirs = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    ours = load_tokenizer(path)
    assert ours.encode(text).ids == theirs(text)["input_ids"]
    assert ours.decode(ours.encode(text).ids, skip_special_tokens=False) == theirs.decode(theirs(text)["input_ids"])


def test_a_word_that_no_merge_reaches_is_one_token_for_llama_3(gguf_file):
    """Its tokenizer ignores merges where the whole word is a token."""
    assert load_tokenizer(gguf_file(pre="llama-bpe", extra=("he",), add_bos_token=False)).encode("he").tokens == ["he"]
    assert load_tokenizer(gguf_file(pre="gpt-2", extra=("he",))).encode("he").tokens == ["h", "e"]


def test_special_and_user_defined_tokens_are_matched_whole(gguf_file):
    extra = ("<think>", "<\uff5cuser\uff5c>")
    kinds = [1] * 256 + [4, 3] + [3, 3]
    tokenizer = load_tokenizer(gguf_file(extra=extra, token_type=kinds), 260)
    assert tokenizer.encode("<think>a<\uff5cuser\uff5c></s>").tokens == ["<think>", "a", "<\uff5cuser\uff5c>", "</s>"]
    assert tokenizer.decode(tokenizer.encode("<think>a</s>").ids) == "<think>a"


@pytest.mark.parametrize(("bos", "eos"), [(True, False), (False, True), (True, True), (False, False)])
def test_bos_and_eos(bos, eos, gguf_file):
    found = load_tokenizer(gguf_file(add_bos_token=bos, add_eos_token=eos)).encode("ab").tokens
    assert found == ["<s>"] * bos + ["a", "b"] + ["</s>"] * eos


def test_generate_begins_with_bos(tmp_path):
    pytest.importorskip("gguf", reason="gguf is not installed (extra `test`)")
    words = [*BYTES[:95], "<s>", "</s>"]
    options = tokenizer_metadata(tokens=words, token_type=[1] * 95 + [3, 3], bos_token_id=95, eos_token_id=96)
    metadata = llama_metadata() | options | {"tokenizer.ggml.add_bos_token": True}
    model = tk.load_pretrained(write_gguf(tmp_path / "a.gguf", metadata, random_llama()))
    read = []
    model.register_forward_pre_hook(lambda _, args: read.append(args[0].clone()))
    assert model.generate("hello", max_new_tokens=1).startswith("hello")
    assert read[0].tolist() == [[95, *(words.index(letter) for letter in "hello")]]
    assert model.end_tokens == {96}


REFUSED = {
    "model": ("llama", "tokenizer.ggml.model must be 'gpt2'; got 'llama'"),
    "pre": ("deepseek-coder", "tokenizer.ggml.pre must be one of gpt-2, .*; got 'deepseek-coder'"),
    "add_space_prefix": (True, "tokenizer.ggml.add_space_prefix = True is not supported"),
    "precompiled_charsmap": ([1, 2], r"tokenizer.ggml.precompiled_charsmap = \[1, 2\] is not supported"),
    "an_option_of_next_year": (1, "tokenizer.ggml.an_option_of_next_year = 1 is not supported"),
    "add_bos_token": (1, "tokenizer.ggml.add_bos_token must be true or false; got 1"),
    "tokens": (["a", "a"], "tokenizer.ggml.tokens has a token twice"),
    "merges": (["a"], "the tokenizer cannot be loaded"),
    "token_type": ([1], "tokenizer.ggml.token_type must have one number for each token"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_gguf_options_that_are_not_understood_are_refused_by_name(name, gguf_file):
    given, message = REFUSED[name]
    with pytest.raises(ValueError, match=rf"a\.gguf: .*{message}"):
        load_tokenizer(gguf_file(**{name: given}))


def test_without_a_word_about_bos_a_llama_3_is_refused(gguf_file):
    with pytest.raises(ValueError, match=r"tokenizer\.ggml\.add_bos_token is missing"):
        load_tokenizer(gguf_file(pre="llama-bpe"))
    with pytest.raises(ValueError, match=r"bos_token_id = 900 is not a token"):
        load_tokenizer(gguf_file(add_bos_token=True, bos_token_id=900))


def test_options_without_effect_on_byte_pairs(gguf_file):
    options = {"add_space_prefix": False, "padding_token_id": 3, "unknown_token_id": 3, "scores": [0] * 258}
    assert load_tokenizer(gguf_file(**options)).encode("ab").tokens == ["a", "b"]
