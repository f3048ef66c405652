import csv
import gzip
import json
import lzma
import os

import pytest
import torch

from transformer_kernels.training.data.reviews import Reviews, find_reviews, read_reviews, tokenise, tokenise_uncached
from transformer_kernels.training.data.tokenizers import ByteTokenizer, CharacterTokenizer
from transformer_kernels.training.recipes.imdb import load_part, pad_batch, truncate

ROWS = [("good, really\ngood<br /><br />film", 1), ("bad", 0), ("mögen", 1)]
EXPECTED = (["good, really\ngood\n\nfilm", "bad", "mögen"], [1, 0, 1])
PACKERS = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}


def written(folder, ending, packed):
    path = folder / f"train{ending}{packed}"
    if ending == ".jsonl":
        data = "\n".join(json.dumps({"text": text, "label": label, "id": 1}) for text, label in ROWS).encode()
    elif ending == ".csv":
        with open(folder / "plain", "w", newline="", encoding="utf-8") as file:
            names = {1: "positive", 0: "negative"}
            csv.writer(file).writerows([("review", "sentiment"), *((text, names[label]) for text, label in ROWS)])
        data = (folder / "plain").read_bytes()
    else:
        pyarrow = pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        table = pyarrow.table({"text": [text for text, _ in ROWS], "label": [label for _, label in ROWS]})
        parquet.write_table(table, folder / "plain")
        data = (folder / "plain").read_bytes()
    path.write_bytes(PACKERS[packed](data))
    return path


@pytest.mark.parametrize("packed", PACKERS)
@pytest.mark.parametrize("ending", [".csv", ".jsonl", ".parquet"])
def test_every_format_reads_the_same(tmp_path, ending, packed):
    path = written(tmp_path, ending, packed)
    assert read_reviews(path) == EXPECTED
    assert find_reviews(str(tmp_path), "train") == path


def test_the_folder_of_the_data_set_is_read(tmp_path):
    for label, text in (("neg", "bad"), ("pos", "good"), ("unsup", "whatever")):
        (tmp_path / "train" / label).mkdir(parents=True)
        (tmp_path / "train" / label / "0_1.txt").write_text(text)
    assert read_reviews(find_reviews(str(tmp_path), "train")) == (["bad", "good"], [0, 1])


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.jsonl", b'{"text": "x", "label": 2}', r"row 1: expected a text and a label of 0, 1, neg.*; got 2"),
        ("a.jsonl", b'{"text": "x", "label": 1}\n{"text"', "line 2: not JSON"),
        ("a.jsonl", b"[1]", "line 1: expected an object; got a list"),
        ("a.csv", b"a,b\n1,2\n", r"expected columns text and label .*; got \['a', 'b'\]"),
        ("a.csv", b"", "contains no reviews; at least one is needed"),
        ("a.txt", b"x", r"a data file must end in \.csv, \.jsonl, \.parquet"),
        ("a.jsonl.xz", lzma.compress(b'{"text": "x", "label": 1}' * 99)[:-9], "corrupt or incomplete .xz file"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "x", "label": 1}' * 99)[:-9], "corrupt or incomplete .gz file"),
        ("a.jsonl", b'{"text": "caf\xe9", "label": 1}', "a.jsonl: corrupt or incomplete .jsonl file: 'utf-8' codec"),
        ("a.jsonl", b'{"text": "\\ud800", "label": 1}', "a.jsonl, row 1: expected a text and a label"),
        ("a.jsonl", b"[" * 100_000, "a.jsonl, line 1: not JSON: maximum recursion depth"),
        ("a.parquet", b"PAR1" + b"\0" * 99 + b"PAR1", "a.parquet: corrupt or incomplete .parquet file: "),
    ],
    ids=[
        *("label", "json", "object", "columns", "empty", "ending", "xz", "gz"),
        *("latin", "surrogate", "nested", "parquet"),
    ],
)
def test_bad_files_are_reported(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_reviews(tmp_path / name)


def test_missing_data_tells_where_it_is_from(tmp_path):
    with pytest.raises(ValueError, match=r"--data must be the aclImdb folder \(from https://"):
        find_reviews("", "train")
    with pytest.raises(ValueError, match="neither train/pos and train/neg nor a file train with"):
        find_reviews(str(tmp_path), "train")


def test_a_file_needs_a_test_file_beside_it(imdb_config):
    with pytest.raises(ValueError, match=r"is a file, .*: give a file of test reviews as --test-data"):
        load_part(imdb_config(test_data=""), "test")


def test_the_real_reviews_are_read(data_folder):
    reviews = read_reviews(data_folder / "imdb" / "small_test.jsonl.xz")
    assert (len(reviews.texts), sum(reviews.labels)) == (1000, 500)
    assert not any("<br />" in text for text in reviews.texts)


@pytest.mark.parametrize("truncation, expected", [("head", [0, 1, 2, 3, 4]), ("head+tail", [0, 1, 2, 8, 9])])
def test_long_reviews_are_cut(truncation, expected):
    assert truncate(torch.arange(10), 5, truncation).tolist() == expected
    assert truncate(torch.arange(5), 5, truncation).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("padding, length, width", [("longest", 80, 44), ("multiple", 80, 64), ("multiple", 50, 50)])
def test_widths_are_few_where_they_are_multiples(imdb_config, padding, length, width):
    ids, _ = pad_batch([torch.zeros(42)], ByteTokenizer(), imdb_config(max_length=length, padding=padding))
    assert ids.shape == (1, width)


@pytest.mark.parametrize("padding, width", [("longest", 6), ("multiple", 8), ("max", 8)])
def test_a_batch_has_cls_sep_and_padding(imdb_config, padding, width):
    tokenizer = ByteTokenizer()
    reviews = [torch.tensor([7]), torch.tensor([1, 2, 3, 4])]
    ids, mask = pad_batch(reviews, tokenizer, imdb_config(max_length=8, padding=padding))
    pad, cls, sep = 256, 257, 258
    expected = [[cls, 7, sep, pad, pad, pad], [cls, 1, 2, 3, 4, sep]]
    assert ids.tolist() == [row + [pad] * (width - 6) for row in expected]
    assert torch.equal(mask, ids != pad)


def test_an_empty_review_is_cls_and_sep(imdb_config):
    ids, _ = pad_batch([torch.tensor([], dtype=torch.int32)], ByteTokenizer(), imdb_config())
    assert ids.tolist() == [[257, 258]]


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


def test_a_few_texts_leave_no_trace(cache):
    assert ids(tokenise_uncached(["good"], ByteTokenizer())) == ["good"]
    assert not cache.exists()


@pytest.mark.parametrize("kind", ["latin", "fifo", "folder"])
def test_what_is_no_text_among_the_reviews_is_named(kind, tmp_path):
    for label in ("pos", "neg"):
        (tmp_path / label).mkdir()
        (tmp_path / label / "0.txt").write_text("a film")
    path = tmp_path / "pos" / "1.txt"
    make = {"latin": lambda: path.write_bytes(b"caf\xe9"), "fifo": lambda: os.mkfifo(path), "folder": path.mkdir}
    make[kind]()
    with pytest.raises(ValueError, match=r"pos/1\.txt: (not UTF-8 text|must be a regular file)"):
        read_reviews(tmp_path)
