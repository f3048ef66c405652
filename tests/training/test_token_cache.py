import multiprocessing

import pytest

from transformer_kernels.training.reviews import Reviews
from transformer_kernels.training.token_cache import tokenise, tokenise_uncached
from transformer_kernels.training.tokenizers import ByteTokenizer, CharacterTokenizer

REVIEWS = Reviews(["good film", "", "bad"], [1, 0, 0])


class CountingTokenizer(ByteTokenizer):
    calls = 0

    def encode_many(self, texts, threads=1):
        self.calls += 1
        return super().encode_many(texts, threads)


def ids(tokens):
    return [bytes(tokens.review(index).tolist()).decode() for index in range(len(tokens))]


def test_the_same_texts_are_tokenised_once(cache):
    tokenizer = CountingTokenizer()
    assert ids(tokenise(REVIEWS, tokenizer)) == ids(tokenise(REVIEWS, tokenizer)) == REVIEWS.texts
    assert tokenizer.calls == 1
    assert len(list((cache / "tokens").glob("*.safetensors"))) == 1


def test_other_texts_or_another_tokenizer_have_an_entry_of_their_own(cache):
    tokenizer = CountingTokenizer()
    tokenise(REVIEWS, tokenizer)
    tokenise(Reviews(["good", " film", "bad"], [1, 0, 0]), tokenizer)
    assert tokenizer.calls == 2
    other = CountingTokenizer()
    other.describe = CharacterTokenizer("x").describe
    tokenise(REVIEWS, other)
    assert other.calls == 1


@pytest.mark.parametrize("damage", ["truncated", "flipped", "foreign"])
def test_a_damaged_entry_is_made_again(cache, damage):
    tokenizer = CountingTokenizer()
    tokenise(REVIEWS, tokenizer)
    (path,) = (cache / "tokens").glob("*.safetensors")
    data = path.read_bytes()
    flipped = data[:-1] + bytes([data[-1] ^ 1])
    path.write_bytes({"truncated": data[:-3], "flipped": flipped, "foreign": b"not safetensors"}[damage])
    assert ids(tokenise(REVIEWS, tokenizer)) == REVIEWS.texts
    assert tokenizer.calls == 2
    assert path.read_bytes() == data


def test_two_processes_at_once_end_well(cache):
    reviews = Reviews(["film"] * 3000, [0] * 3000)
    both = [multiprocessing.get_context("fork").Process(target=tokenise, args=(reviews, ByteTokenizer())) for _ in "ab"]
    for process in both:
        process.start()
    for process in both:
        process.join(timeout=60)
    assert [process.exitcode for process in both] == [0, 0]
    assert [path.suffix for path in sorted((cache / "tokens").iterdir())] == [".safetensors", ".lock"]
    tokenizer = CountingTokenizer()
    assert len(tokenise(reviews, tokenizer).ids) == 4 * 3000
    assert tokenizer.calls == 0


def test_a_few_texts_leave_no_trace(cache):
    assert ids(tokenise_uncached(["good"], ByteTokenizer())) == ["good"]
    assert not cache.exists()
