"""Tables of word vectors: GloVe's text files, the tables of models, nearest words, and the command."""

from types import SimpleNamespace

import pytest
import torch

import python_ref
from transformer_kernels import cli
from transformer_kernels.training.data.tokenizers import ByteTokenizer, CharacterTokenizer
from transformer_kernels.training.data.vectors import (
    Term,
    WordVectors,
    cosine,
    nearest,
    parse_expression,
    read_vectors,
    table_of_model,
)

GLOVE = "the 1 0 0\n, 0 2 0\nking 3.0 4.0 0.0\nat name@domain.com 0 0 -1e-2\nking 9 9 9\n"


@pytest.fixture
def file(tmp_path):
    def write(content):
        path = tmp_path / "vectors.txt"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


@pytest.mark.parametrize("content", [GLOVE, "4 3\n" + GLOVE, GLOVE.replace("\n", " \r\n")])
def test_vectors_of_a_text_file(file, content):
    table = read_vectors(file(content))
    assert table.words == ["the", ",", "king", "at name@domain.com"]
    expected = torch.tensor([[1.0, 0, 0], [0, 1, 0], [0.6, 0.8, 0], [0, 0, -1]])
    torch.testing.assert_close(table.vectors, expected)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "no word vectors; expected a word and its numbers on each line"),
        ("2 3\n", "no word vectors"),
        ("the\n", "line 1: expected a word and its finite numbers; got 'the"),
        ("the 1 2 3\nking 1 2\n", "line 2: expected a word and 3 finite numbers; got 'king 1 2"),
        ("the 1 2 3\nking 1 2 3 4\n", "line 2: expected a word and 3 finite numbers; got 'king 1 2 3 4"),
        ("the 1 2 3\n 1 2 3\n", "line 2: expected a word and 3 finite numbers; got ' 1 2 3"),
        ("the 1 2 3\n\nking 1 2 3\n", "line 2: expected a word and 3 finite numbers"),
        ("the 1 2 3\nking 1 two 3\n", "line 2: expected a word and 3 finite numbers; got 'king 1 two 3"),
        ("the 1 2 nan\n", "line 1: expected a word and 3 finite numbers"),
        ("the 1 2 1e99\n", "line 1: expected a word and 3 finite numbers"),
        (b"the 1 2\n\xff\xfe 1 2\n", "not UTF-8 text: invalid start byte; a binary file of word2vec must end in .bin"),
    ],
)
def test_bad_files_are_refused(file, content, message):
    with pytest.raises(ValueError, match=message) as caught:
        read_vectors(file(content))
    assert "vectors.txt: " in str(caught.value)


def test_a_file_that_is_not_there(capsys):
    assert cli.main(["nearest", "--vectors", "nowhere.txt", "king"]) == 1
    assert "nowhere.txt: no such file; expected word vectors as text" in capsys.readouterr().err


def test_expressions():
    assert parse_expression("king - man + woman") == [Term(1, "king"), Term(-1, "man"), Term(1, "woman")]
    assert parse_expression("well-known") == [Term(1, "well-known")]
    for bad in ("", "king -", "- king", "king queen", "king - + queen", "king man woman"):
        with pytest.raises(ValueError, match="expected a word, or an expression such as king - man"):
            parse_expression(bad)


def test_nearest_is_the_cosine_without_the_words_asked_for():
    torch.manual_seed(0)
    words = [f"w{index}" for index in range(20)]
    vectors = torch.nn.functional.normalize(torch.randn(20, 6), dim=1)
    table = WordVectors(words, vectors)
    wanted = vectors[3] - vectors[7] + vectors[1]
    cosines = torch.cosine_similarity(vectors, wanted[None], dim=1)
    expected = sorted((n for n in range(20) if n not in (1, 3, 7)), key=lambda n: -cosines[n].item())
    found = nearest(table, parse_expression("w3 - w7 + w1"), 5)
    assert [word for word, _ in found] == [words[n] for n in expected[:5]]
    assert [cosine for _, cosine in found] == pytest.approx([cosines[n].item() for n in expected[:5]], abs=1e-6)
    assert len(nearest(table, [Term(1, "w0")], 100)) == 19
    with pytest.raises(ValueError, match="--top must be at least 1; got 0"):
        nearest(table, [Term(1, "w0")], 0)


def test_the_words_of_an_expression_and_one_cosine(file, capsys):
    table = WordVectors(["a", "b", "c"], torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]]))
    assert [word for word, _ in nearest(table, [Term(1, "a")], 3, keep=True)] == ["a", "b", "c"]
    assert cosine(table, [Term(1, "a")], "b") == pytest.approx(0.6)
    assert cosine(table, [Term(1, "b"), Term(-1, "a")], "c") == pytest.approx(0.8 / 0.8**0.5)
    path = str(file("a 1 0\nb 0.6 0.8\n"))
    assert cli.main(["nearest", "--vectors", path, "a", "--to", "b"]) == 0
    assert cli.main(["nearest", "--vectors", path, "a", "--keep"]) == 0
    assert capsys.readouterr().out.split() == ["0.6000", "b", "1.0000", "a", "0.6000", "b"]
    assert cli.main(["nearest", "--vectors", path, "a", "--to", "z"]) == 1
    assert "'z' is not one of the 2 words" in capsys.readouterr().err


def binary(words, values, header=None, end=b"\n"):
    rows = [word.encode() + b" " + row.numpy().tobytes() + end for word, row in zip(words, values, strict=True)]
    return (header or f"{len(words)} {values.shape[1]}\n".encode()) + b"".join(rows)


@pytest.mark.parametrize("end", [b"\n", b""])
def test_vectors_of_a_binary_file(tmp_path, end):
    values = torch.tensor(
        [[3.0, 4.0, 0.0], [0.0, 0.0, 2.0], [9.0, 9.0, 9.0], [2.0**-130, 0.0, 0.0]]
    )  # has blanks' bytes
    path = tmp_path / "vectors.bin"
    path.write_bytes(binary(["king", "größe", "king", "a"], values, end=end))
    table = read_vectors(path)
    assert table.words == ["king", "größe", "a"]
    torch.testing.assert_close(table.vectors[:2], torch.tensor([[0.6, 0.8, 0.0], [0.0, 0.0, 1.0]]))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "expected the numbers of words and values in the first line"),
        (b"king 1 2\n", "expected the numbers of words and values in the first line"),
        (b"0 3\n", "its first line has 0 words of 3 values; the file does not"),
        (b"9999999 9999999\nking ", "its first line has 9,999,999 words of 9,999,999 values"),
        (binary(["a" * 20, "b"], torch.ones(2, 3), b"3 3\n"), "it ends at word 3 of 3"),
        (binary(["a", "b"], torch.ones(2, 3))[:-5], "it ends at word 2 of 2"),
        (binary(["a"], torch.tensor([[1.0, float("nan")]])), "a value is not a finite number"),
    ],
)
def test_bad_binary_files_are_refused(tmp_path, content, message):
    path = tmp_path / "vectors.bin"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_vectors(path)


def test_an_unknown_word_names_similar_ones():
    table = WordVectors(["king", "kings", "man"], torch.eye(3))
    assert table.index_of("King") == 0
    with pytest.raises(ValueError, match="'kingg' is not one of the 3 words of the table; similar words: king, kings"):
        table.index_of("kingg")


def test_tables_of_models():
    torch.manual_seed(0)
    tokenizer = CharacterTokenizer("ab \n")  # whose blanks are no words
    model = python_ref.build("char_gpt", vocab_size=4, width=8, layers=1, heads=2)
    table = table_of_model(SimpleNamespace(model=model, tokenizer=tokenizer))
    assert table.words == ["a", "b"]
    rows = model.embedding.tokens.weight.detach()[2:]
    torch.testing.assert_close(table.vectors, torch.nn.functional.normalize(rows, dim=1))
    model = python_ref.build("imdb_bert", vocab_size=ByteTokenizer().vocabulary_size, width=8, layers=1, heads=2)
    assert "k" in table_of_model(SimpleNamespace(model=model, tokenizer=ByteTokenizer())).words
    vision = SimpleNamespace(model=python_ref.build("vit_digits", width=8, layers=1, heads=2), tokenizer=None)
    with pytest.raises(ValueError, match="a ViT has no embedding table of words"):
        table_of_model(vision)


@pytest.fixture
def subwords(tmp_path):
    """A folder with a GPT-2 whose tokenizer has "fox" with and without a preceding blank."""
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    tokens = [*sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()), "fo", "fox", "Ġfox"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab=vocabulary, merges=[("f", "o"), ("fo", "x"), ("Ġ", "fox")])
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = transformers.GPT2Config(vocab_size=300, n_embd=8, n_layer=1, n_head=2, n_positions=16)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)  # more rows than tokens
    return tmp_path


def test_the_table_of_a_pretrained_folder(subwords, tmp_path, capsys):
    assert cli.main(["nearest", "--model", str(subwords), "fox", "--top", "300"]) == 0
    words = [line.split()[1] for line in capsys.readouterr().out.splitlines()]
    assert "fox" in words and "fo" in words and "␣fox" not in words  # the requested word
    assert cli.main(["nearest", "--model", str(subwords), "foxes"]) == 1
    assert "'foxes' is not one of the" in capsys.readouterr().err


def test_the_plot_names_the_words_and_draws_an_analogy(file, tmp_path, monkeypatch, capsys):
    from transformer_kernels.visualization import words

    kept = []
    monkeypatch.setattr(words, "write_figure", lambda figure, path: kept.append(figure))
    path = file("king 1 0\nman -1 0\nwoman -.9 .4\nqueen .9 .4\n$a 0 1\n")
    expression = ["king - man + woman", "--top", "2", "--plot", str(tmp_path / "near.png")]
    assert cli.main(["nearest", "--vectors", str(path), *expression]) == 0
    found = [line.split()[1] for line in capsys.readouterr().out.splitlines()[:2]]
    axes = kept[0].axes[0]
    texts = [text for text in axes.texts if text.get_text()]
    assert [text.get_text() for text in texts] == [
        "king",
        "man",
        "woman",
        *(word.replace("$", r"\$") for word in found),
    ]
    assert [text.get_fontweight() for text in texts] == ["bold"] * 3 + ["normal"] * 2
    points = [tuple(point) for point in axes.collections[0].get_offsets().tolist()]
    arrows = [text for text in axes.texts if not text.get_text()][:2]  # the others are lines from names to points
    assert [(arrow.xyann, arrow.xy) for arrow in arrows] == [(points[1], points[0]), (points[2], points[3])]
    assert axes.get_title() == "nearest words: king - man + woman"
    boxes = [text.get_window_extent() for text in texts]
    for start, end in ((1, 0), (2, 3)):  # no name is written over an arrow
        for share in torch.linspace(0, 1, 30).tolist():
            on_arrow = [a + share * (b - a) for a, b in zip(points[start], points[end], strict=True)]
            assert not [1 for box in boxes if box.contains(*axes.transData.transform(on_arrow))]
    assert not [1 for number, box in enumerate(boxes) for other in boxes[:number] if box.overlaps(other)]


def test_a_plot_needs_two_dimensions(file, tmp_path, capsys):
    assert cli.main(["nearest", "--vectors", str(file("a 1\nb 2\n")), "a", "--plot", str(tmp_path / "a.png")]) == 1
    assert "a plot needs two words and vectors of two elements" in capsys.readouterr().err
