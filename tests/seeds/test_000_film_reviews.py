"""Document 000, a BERT that rates film reviews: the numbers that it prints and that do not depend on chance."""

import pytest
import torch

import python_ref
from python_ref.bpe import learn_merges, split_word
from transformer_kernels import ops
from transformer_kernels.training.data.tokenizers import Gpt2Tokenizer

WORDS = {"old": 7, "older": 3, "finest": 9, "lowest": 4}  # counted words, the usual example of these merges


def test_softmax_of_1_2_3_6():
    """Softmax: (1, 2, 3, 6) gives .93 to the largest and .006 to the smallest."""
    for softmax in (python_ref.ops.softmax, ops.softmax):
        weights = softmax(torch.tensor([1.0, 2.0, 3.0, 6.0]))
        assert round(weights[3].item(), 2) == 0.93
        assert round(weights[0].item(), 3) == 0.006


def test_vocabulary(data_folder):
    """Tokens: GPT-2's 50,257, and three of its own, [PAD], [CLS] and [SEP], make 50,260."""
    tokenizer = Gpt2Tokenizer(str(data_folder / "gpt2_bpe"))
    assert tokenizer.vocabulary_size == 50_260
    assert (tokenizer.pad, tokenizer.cls, tokenizer.sep) == (50_257, 50_258, 50_259)
    assert python_ref.preset("imdb_bert").vocab_size == 50_260
    assert python_ref.preset("gpt2").vocab_size == 50_257


def test_byte_pair_merges():
    """Byte pairs: "e" and "s" are adjacent 13 times, then "es" and "t" 13 times."""
    merges = learn_merges(WORDS, 5)
    assert [(merge.piece, merge.times) for merge in merges[:2]] == [("es", 13), ("est", 13)]
    assert [merge.piece for merge in merges[2:]] == ["est</w>", "ol", "old"]
    assert [merge.times for merge in merges[2:]] == [13, 10, 10]
    assert split_word("oldest", merges) == ["old", "est</w>"]


@pytest.mark.parametrize(
    ("words", "wanted"),
    [({"aaaa": 1}, ["aa", "aaaa"]), ({"aaa": 2}, ["aa", "aaa"]), ({"ab": 1, "abc": 5}, ["ab", "abc"]), ({}, [])],
)
def test_merging_ends_where_each_word_is_one_piece(words, wanted):
    merges = learn_merges(words, 10, end="")
    assert [merge.piece for merge in merges] == wanted
    assert all(split_word(word, merges, end="") == [word] for word in words)
