"""The translator as a recipe and as a command."""

import io
import itertools
import os
import random

import pytest
import torch

from transformer_kernels import cli
from transformer_kernels.training import CheckpointError, DataFileError, Trainer, load_trained
from transformer_kernels.training.decoding import GREEDY, BeamSearch, MinimumBayesRisk
from transformer_kernels.training.recipes import Trained
from transformer_kernels.training.recipes.translate import (
    BEGIN,
    PAD,
    Pair,
    Translate,
    TranslateConfig,
    read_pairs,
    scores,
    split_pairs,
)

WORDS = {"one": "एक", "two": "दो", "three": "तीन", "four": "चार", "five": "पाँच", "six": "छह"}
PAIRS = [
    Pair(" ".join(words), " ".join(WORDS[word] for word in words))
    for count in (1, 2)
    for words in itertools.product(WORDS, repeat=count)
]
CPU = torch.device("cpu")


@pytest.fixture
def pairs_file(tmp_path):
    path = tmp_path / "pairs.txt"
    path.write_text("".join(f"{pair.source}\t{pair.target}\tsomebody\n" for pair in PAIRS), encoding="utf-8")
    return path


@pytest.fixture
def make_config(tmp_path, pairs_file):
    def make(**changes):
        usual = {
            "data": str(pairs_file),
            "out": str(tmp_path / "run"),
            "model": {"layers": 1, "width": 64, "heads": 2, "ffn_width": 64, "dropout": 0.0},
            "source_vocabulary": 60,
            "target_vocabulary": 60,
            "max_length": 24,
            "batch_size": 8,
            "warmup_steps": 5,
            "steps": 4,
            "validation": 0.2,
            "progress": False,
        }
        return TranslateConfig(**{**usual, **changes})

    return make


def test_a_batch_is_what_teacher_forcing_needs(make_config):
    recipe = Translate(make_config(validation=0.0))
    batch = recipe.batch(torch.arange(5), CPU)
    source, written, mask = batch.inputs
    rows = recipe.training[:5]
    assert [row[real].tolist() for row, real in zip(source, mask, strict=True)] == [pair.source for pair in rows]
    assert [row[row != -100].tolist() for row in batch.targets] == [pair.target for pair in rows]
    assert written[:, 0].eq(BEGIN).all()
    shifted = batch.targets[:, :-1]
    assert torch.equal(written[:, 1:][shifted != -100], shifted[shifted != -100])
    assert written[:, 1:][shifted == -100].eq(PAD).all()
    assert batch.tokens == int(mask.sum() + (batch.targets != -100).sum())
    assert batch.size == source.numel() + written.numel()


def test_batches_hold_pairs_of_similar_length(make_config):
    recipe = Translate(make_config(validation=0.0, test=0.0, batch_size=4))
    sampler = recipe.sampler(Trainer(recipe).processes)
    spreads = []
    for _ in range(sampler.batches_per_epoch):
        lengths = [len(recipe.training[index].source) for index in sampler.peek().tolist()]
        spreads.append(max(lengths) - min(lengths))
        sampler.advance()
    assert sum(spread > 0 for spread in spreads) <= 1 < len(spreads)  # one word and two words do not mix


def test_a_sentence_is_in_one_part_with_all_its_translations():
    pairs = [Pair(str(n // 2), str(n)) for n in range(100)]
    parts = split_pairs(pairs, 0.1, 0.2)
    assert [len({pair.source for pair in part}) for part in parts] == [5, 9, 36]
    assert sorted(pair for part in parts for pair in part) == sorted(pairs)
    assert not {pair.source for pair in parts[0]} & {pair.source for pair in parts[2]}
    assert split_pairs(pairs[::-1], 0.1, 0.2)[0][::-1] == parts[0]


def test_the_vocabularies_are_those_of_the_training_part(make_config, tmp_path):
    config = make_config()
    tokenizer, again = Translate(config).tokenizer, Translate(config).tokenizer
    assert tokenizer.describe() == again.describe()
    text = "one four two"
    assert tokenizer.source.decode(tokenizer.source.encode(text)[:-1]) == text
    assert tokenizer.source.encode("ONE four Two") == tokenizer.source.encode(text)
    assert tokenizer.source.unseen("one ж two ü") == "üж"
    path = tmp_path / "pairs.txt"
    held_out = split_pairs(read_pairs(path), config.test, config.validation)[:2]
    marked = [(Pair(pair.source, pair.target + " ळ") if pair in held_out[0] + held_out[1] else pair) for pair in PAIRS]
    path.write_text("".join(f"{source}\t{target}\n" for source, target in marked), encoding="utf-8")
    assert Translate(config).tokenizer.describe() == tokenizer.describe()


def test_sampled_byte_pairs_join_to_the_text_and_are_those_of_tokenizers_without_dropout(make_config):
    recipe, generator = Translate(make_config()), random.Random(0)
    tokenizers = recipe.tokenizer.source, recipe.tokenizer.target
    for tokenizer, text in itertools.product(tokenizers, ("one  two ж!", "दो छह")):
        ids = tokenizer.encode(text)
        assert tokenizer.encode_sampled(text, 0.0, generator) == ids
        characters = tokenizer.encode_sampled(text, 1.0, generator)
        assert tokenizer.decode(characters) == tokenizer.decode(ids)
        assert len(characters) == len(text.replace("  ", " ").replace(" ", "")) + 1 + len(text.split()) + ("!" in text)
    text = recipe.training_pairs[0].source
    drawn = [len(recipe.tokenizer.source.encode_sampled(text, 0.5, generator)) for _ in range(50)]
    assert len(set(drawn)) > 2


def test_byte_pairs_are_sampled_anew_in_each_epoch_and_alike_in_a_repeated_one(make_config):
    recipe = Translate(make_config(validation=0.0, bpe_dropout=0.5, max_length=10))
    assert [part.shape for part in recipe.batch(torch.arange(200), CPU).inputs] == 3 * [(200, 10)]
    sampler, again = (recipe.sampler(Trainer(recipe).processes) for _ in range(2))
    epochs = []
    for _ in range(2):
        numbers = []
        for _ in range(sampler.batches_per_epoch):
            numbers += sampler.peek().tolist()
            sampler.advance()
        length = len(recipe.training)
        epochs.append({number % length: recipe.batch(torch.tensor([number]), CPU).inputs[0] for number in numbers})
    both = epochs[0].keys() & epochs[1].keys()
    assert sum(not torch.equal(epochs[0][index], epochs[1][index]) for index in both) > len(both) / 2
    again.restore({"epoch": 1, "batch": 0})
    numbers = again.peek()
    repeated = recipe.batch(numbers, CPU).inputs[0]
    for row, number in zip(repeated, numbers.tolist(), strict=True):
        assert row[row != PAD].tolist() == epochs[1][number % len(recipe.training)][0].tolist()


def test_label_smoothing_is_in_training_and_not_in_evaluation(make_config):
    recipe, sharp = (Translate(make_config(label_smoothing=amount)) for amount in (0.3, 0.0))
    model, batch = recipe.build_model().eval(), recipe.batch(torch.arange(6), CPU)
    logits = model(*batch.inputs).flatten(0, 1)
    for each, amount in ((recipe, 0.3), (sharp, 0.0)):
        expected = torch.nn.functional.cross_entropy(logits, batch.targets.flatten(), label_smoothing=amount)
        torch.testing.assert_close(each.loss(model, batch.inputs, batch.targets), expected)


def test_scores_are_those_of_sacrebleu_with_all_references(make_config, monkeypatch):
    import sacrebleu

    config = make_config()
    Trainer(Translate(config)).fit()
    trained = load_trained(config.out)
    pairs = [Pair("one two", "एक दो"), Pair("three", "तीन"), Pair("one two", "एक और दो")]
    translations = {"one two": "एक और", "three": "तीन चार"}
    fake = [type("Translated", (), {"translation": translations[text]}) for text in translations]
    monkeypatch.setattr(Translate, "translate", lambda *_: fake)
    printed = scores(trained, pairs, "own")
    chrf = sacrebleu.corpus_chrf(list(translations.values()), [["एक दो", "तीन"], ["एक और दो", "तीन"]]).score
    assert f"chrF {chrf:.2f} on 2 own sentences" in printed
    assert printed.count("nrefs:var") == 2


@pytest.mark.parametrize(
    ("options", "search"),
    [
        ({}, GREEDY),
        ({"beam": 3, "length_penalty": 1.0}, BeamSearch(width=3, length_penalty=1.0)),
        ({"mbr": 5}, MinimumBayesRisk(samples=5)),
    ],
    ids=["greedy", "beam", "mbr"],
)
def test_scores_decode_as_the_options_select(make_config, monkeypatch, options, search):
    used = []
    fake = type("Translated", (), {"translation": "एक"})
    monkeypatch.setattr(Translate, "translate", lambda trained, texts, given: used.append(given) or [fake])
    scores(Trained(None, None, make_config(**options), CPU, 0, Translate), [Pair("one", "एक")], "own")
    assert used == [search]


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (None, DataFileError, "cannot be read as sentence pairs"),
        (b"\xff\xfe\tx\n", DataFileError, "cannot be read as sentence pairs"),
        (b"one\n", DataFileError, "line 1 must be a sentence, a tab and a translation; got 'one'"),
        (b"one\teins\n\t\ntwo\t \n", DataFileError, "line 3 must be a sentence, a tab and a translation"),
        (b"\n\n", ValueError, "0 sentence pairs; at least 1 is needed"),
    ],
    ids=["missing", "bytes", "one column", "empty column", "empty"],
)
def test_a_file_without_pairs_is_refused(tmp_path, content, error, message):
    path = tmp_path / "other.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(error, match=message):
        read_pairs(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": ""}, "--data is required: a tab-separated file of sentence pairs"),
        ({"test": 1.0}, r"test must be in \[0, 1\); got 1.0"),
        ({"label_smoothing": -0.1}, r"label_smoothing must be in \[0, 1\)"),
        ({"source_vocabulary": 4}, "source_vocabulary must be more than 4"),
        ({"max_length": 1}, "max_length must leave room"),
        ({"beam": 0}, "beam must be at least 1"),
        ({"mbr": -1}, "mbr must be at least 1; got -1"),
        ({"beam": 2, "mbr": 5}, "beam and mbr exclude each other; got 2 and 5"),
        ({"max_length": 2}, "max_length must be at least 3 for"),
        ({"model": {"vocab_size": 7}}, "vocab_size cannot be set here"),
    ],
)
def test_options_that_cannot_be_are_refused(make_config, changes, message):
    with pytest.raises(ValueError, match=message):
        Translate(make_config(**changes)).build_model()


def test_other_data_and_damaged_vocabularies_are_refused(make_config, pairs_file, tmp_path):
    config = make_config()
    Trainer(Translate(config)).fit()
    last = tmp_path / "run" / "last"
    pairs_file.write_text(
        pairs_file.read_text(encoding="utf-8") + "seven\tसात\nseven eight\tसात आठ\n", encoding="utf-8"
    )
    with pytest.raises(CheckpointError, match="written with") as caught:
        Trainer(Translate(make_config(out=str(tmp_path / "other")))).restore(last)
    assert len(str(caught.value)) < 700
    with pytest.raises(ValueError, match="not a description of byte pairs"):
        Translate.load_tokenizer({"kind": "pairs", "source": {"model": 1}, "target": {}}, config)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("translate")
    (folder / "pairs.txt").write_text("".join(f"{a}\t{b}\n" for a, b in PAIRS), encoding="utf-8")
    sizes = ["layers=1", "width=64", "heads=2", "ffn_width=64", "dropout=0.0"]
    options = [
        "--steps",
        "160",
        "--lr",
        "0.005",
        "--batch-size",
        "16",
        "--label-smoothing",
        "0",
        "--max-length",
        "24",
        "--no-progress",
    ]
    options += ["--source-vocabulary", "60", "--target-vocabulary", "60", "--validation", "0.05"]
    given = ["--data", folder / "pairs.txt", "--out", folder / "run", *options]
    assert run("train", "translate", *given, *(part for size in sizes for part in ("--model", size))) == 0
    return folder


def run(*arguments):
    return cli.main([str(argument) for argument in arguments])


def test_it_learns_to_translate(run_folder):
    trained = load_trained(run_folder / "run", command="translate")
    pairs = split_pairs(read_pairs(run_folder / "pairs.txt"), 0.1, 0.05)[2]
    for search in ((), (BeamSearch(width=3),), (MinimumBayesRisk(samples=4),)):
        found = Translate.translate(trained, [pair.source for pair in pairs], *search)
        exact = sum(each.translation == pair.target for each, pair in zip(found, pairs, strict=True))
        assert exact >= 0.9 * len(pairs)


def test_an_alignment_has_a_map_for_each_layer_and_head(run_folder):
    trained = load_trained(run_folder / "run", command="translate")
    (found,) = Translate.translate(trained, ["one two"])
    weights, target, source = Translate.alignment(trained, found)
    assert (target, source) == (["एक", "दो", "<end>"], ["one", "two", "<end>"])
    assert weights.shape == (1, 2, 3, 3)
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 2, 3))


def test_the_command_translates_sentences_and_lines(run_folder, capsys, monkeypatch):
    translate = ("translate", "--checkpoint", run_folder / "run")
    capsys.readouterr()
    outputs = []
    monkeypatch.setattr("sys.stdin", io.StringIO("two\n\none four\n"))
    for how in (["two", "one four"], [], ["--beam", "1", "two", "one four"]):
        assert run(*translate, *how) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1] == outputs[2]
    assert outputs[0].splitlines()[0] == "दो"
    sample = ["--sample", "--temperature", "2", "--seed", "3"]
    for how in (["--beam", "4", "--length-penalty", "1"], sample, ["--mbr", "3"]):
        assert run(*translate, *how, "two ж", "one") == 0
        printed = capsys.readouterr()
        assert len(printed.out.splitlines()) == 2
        assert printed.err == "characters not in the training vocabulary: ж\n"


def test_the_command_evaluates_by_mbr_and_with_a_beam(run_folder, capsys):
    evaluate = ("evaluate", "--checkpoint", run_folder / "run")
    for options in (["--mbr", "3"], ["--beam", "3", "--mbr", "0"]):
        assert run(*evaluate, *options) == 0
        assert "test sentences\nBLEU: nrefs:" in capsys.readouterr().out
    assert run(*evaluate, "--beam", "3") == 1
    assert "beam and mbr exclude each other; got 3 and 48" in capsys.readouterr().err


def test_the_command_draws_where_the_model_looked(run_folder, capsys, tmp_path):
    path = tmp_path / "alignment.png"
    assert run("translate", "--checkpoint", run_folder / "run", "--alignments", path, "one two") == 0
    printed = capsys.readouterr()
    assert printed.err.startswith(f"wrote {path}")
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([" "], "text 1 of 1 must not be empty; got ' '"),
        (["one " * 30], "has 31; shorten it"),
        (["--beam", "0", "one"], "beam must be at least 1; got 0"),
        (["--sample", "--temperature", "-1", "one"], "temperature must be finite and not negative"),
        (["--alignments", "a.png", "one", "two"], "--alignments draws one sentence; got 2"),
    ],
)
def test_the_command_refuses_what_it_cannot_do(run_folder, capsys, arguments, message):
    assert run("translate", "--checkpoint", run_folder / "run", *arguments) == 1
    assert message in capsys.readouterr().err


def test_the_command_refuses_a_model_that_does_not_translate(tmp_path, char_config, capsys):
    from transformer_kernels.training import CharGPT

    Trainer(CharGPT(char_config())).fit()
    assert run("translate", "--checkpoint", tmp_path / "run", "one") == 1
    assert "expected a model of translate, found one of char-gpt" in capsys.readouterr().err


def test_real_pairs_split_as_documented(data_folder):
    pairs = read_pairs(data_folder / "translation" / "hin.txt")
    test, training = split_pairs(pairs, 0.1)
    assert len(pairs) == 2915
    assert len({pair.source for pair in test}) == 268
    assert len(training) == 2623


@pytest.mark.slow
def test_two_hundred_real_pairs_are_learned_by_heart(data_folder, tmp_path):
    pairs = list({pair.source: pair for pair in read_pairs(data_folder / "translation" / "hin.txt")}.values())[400:600]
    path = tmp_path / "few.txt"
    path.write_text("".join(f"{pair.source}\t{pair.target}\n" for pair in pairs), encoding="utf-8")
    vocabulary = {"source_vocabulary": 400, "target_vocabulary": 400, "test": 0.0}
    config = TranslateConfig(
        data=str(path),
        out=str(tmp_path / "run"),
        steps=400,
        batch_size=32,
        model={"dropout": 0.0},
        progress=False,
        **vocabulary,
    )
    Trainer(Translate(config)).fit()
    trained = load_trained(config.out, command="translate")
    found = Translate.translate(trained, [pair.source for pair in pairs])
    exact = sum(each.translation == pair.target for each, pair in zip(found, pairs, strict=True))
    assert exact >= 190, f"{exact} of 200 are exact"


def test_a_byte_order_mark_and_separators_within_a_sentence(tmp_path):
    (tmp_path / "pairs.txt").write_bytes("\ufeffone\teins\r\ntwo\u2028three\tzwei\x85drei\n".encode())
    assert read_pairs(tmp_path / "pairs.txt") == [Pair("one", "eins"), Pair("two three", "zwei drei")]


def test_a_fifo_has_no_pairs(tmp_path):
    os.mkfifo(tmp_path / "pairs.txt")
    with pytest.raises(DataFileError, match="must be a regular file"):
        read_pairs(tmp_path / "pairs.txt")
