import json
import os
import shutil
import subprocess
import sys

import pytest

from transformer_kernels.training import DataFileError
from transformer_kernels.training.data.tokenizers import (
    VOCAB_BPE_SHA256,
    VOCAB_BPE_URL,
    ByteTokenizer,
    CharacterTokenizer,
    Gpt2Tokenizer,
    LearnedTokenizer,
    from_description,
)

SAMPLES = [
    "Hello, world!",
    "  two  spaces\n\n\tand tabs   ",
    "It's 2024; naïve café — 日本語 🙂",
    "<|endoftext|> is text here",
    "",
]


@pytest.fixture
def gpt2(data_folder):
    return Gpt2Tokenizer(str(data_folder / "gpt2_bpe"))


def test_characters_come_back():
    tokenizer = CharacterTokenizer("hello")
    assert tokenizer.vocabulary_size == 4
    assert tokenizer.decode(tokenizer.encode("hole")) == "hole"
    with pytest.raises(ValueError, match=r"outside the model's vocabulary: \['x', 'z'\]; known: 'ehlo'"):
        tokenizer.encode("hezx")


def test_bytes_come_back():
    tokenizer = ByteTokenizer()
    assert tokenizer.decode([tokenizer.cls, *tokenizer.encode("naïve 🙂"), tokenizer.sep]) == "naïve 🙂"
    assert (tokenizer.pad, tokenizer.cls, tokenizer.sep, tokenizer.vocabulary_size) == (256, 257, 258, 259)


def test_gpt2_gives_the_known_ids(gpt2):
    assert gpt2.encode("Hello, world!") == [15496, 11, 995, 0]
    assert (gpt2.pad, gpt2.cls, gpt2.sep, gpt2.vocabulary_size) == (50257, 50258, 50259, 50260)
    assert 50256 not in gpt2.encode("<|endoftext|>")
    assert [gpt2.decode(gpt2.encode(text)) for text in SAMPLES] == SAMPLES


def test_gpt2_gives_the_known_number_of_shakespeare_tokens(gpt2, data_folder):
    text = (data_folder / "tinyshakespeare" / "input.txt").read_text()
    cut = int(0.9 * len(text))
    assert [len(gpt2.encode(part)) for part in (text[:cut], text[cut:])] == [301_966, 36_059]


def test_gpt2_agrees_with_tiktoken(gpt2, data_folder, tmp_path):
    names = {
        "vocab.bpe": "6d1cbeee0f20b3d9449abfede4726ed8212e3aee",
        "encoder.json": "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6",
    }
    for name, key in names.items():
        shutil.copy(data_folder / "gpt2_bpe" / name, tmp_path / key)
    code = (
        "import sys, json, tiktoken; e = tiktoken.get_encoding('gpt2');"
        "print([e.encode_ordinary(t) for t in json.load(sys.stdin)])"
    )
    environment = {**os.environ, "TIKTOKEN_CACHE_DIR": str(tmp_path)}
    text = json.dumps(SAMPLES)
    theirs = subprocess.run([sys.executable, "-c", code], input=text, env=environment, capture_output=True, text=True)
    assert theirs.stdout.strip() == str(gpt2.encode_many(SAMPLES, threads=2)), theirs.stderr


def test_a_wrong_vocabulary_file_tells_both_hashes(tmp_path):
    (tmp_path / "vocab.bpe").write_text("#version: 0.2\n")
    with pytest.raises(DataFileError, match=rf"vocab\.bpe: expected SHA-256 {VOCAB_BPE_SHA256}, got \w{{64}}"):
        Gpt2Tokenizer(str(tmp_path))


def test_a_missing_vocabulary_file_tells_where_it_is_from(tmp_path):
    with pytest.raises(DataFileError, match="no vocab.bpe in .*: download it from " + VOCAB_BPE_URL):
        Gpt2Tokenizer(str(tmp_path))


def test_offline_without_files_tells_the_remedy(monkeypatch):
    monkeypatch.setattr("transformer_kernels.training.data.tokenizers.VOCAB_BPE_URL", "http://127.0.0.1:9/vocab.bpe")
    with pytest.raises(DataFileError, match="--vocab-dir, or use --tokenizer bytes"):
        Gpt2Tokenizer()


def test_learned_words_are_the_most_frequent_ones_in_lower_case():
    texts = ["Don't! It isn't GOOD, 8/10...", "don\u2019t... Good good\n!? Don't,"]
    tokenizer = LearnedTokenizer.learn_words(texts, 5)
    assert tokenizer.encode("GOOD...don't, Good") == [1, 3, 4, 2, 1]  # equally frequent ones in code point order
    assert tokenizer.encode("don\u2019t It ! 10") == [0, 0, 0, 0]  # once each, or not among the 5
    assert tokenizer.encode(" \n") == []
    assert (tokenizer.mask, tokenizer.pad, tokenizer.vocabulary_size) == (5, 6, 9)
    assert tokenizer.decode([tokenizer.cls, 1, 4, tokenizer.sep]) == "good don't"
    assert from_description(tokenizer.describe()).encode_many(texts) == tokenizer.encode_many(texts)
    with pytest.raises(ValueError, match=r"vocabulary must hold \[UNK\] and a word; got 1"):
        LearnedTokenizer.learn_words(texts, 1)


@pytest.mark.parametrize("tokenizer", [CharacterTokenizer("abc"), ByteTokenizer()], ids=["characters", "bytes"])
def test_a_description_makes_the_tokenizer_again(tokenizer):
    twin = from_description(tokenizer.describe())
    assert twin.describe() == tokenizer.describe()
    assert twin.encode("abc") == tokenizer.encode("abc")


@pytest.mark.parametrize("description", [{}, {"kind": "pickle"}, {"kind": "characters", "characters": 7}])
def test_a_strange_description_is_refused(description):
    with pytest.raises(ValueError, match="unknown tokenizer"):
        from_description(description)
