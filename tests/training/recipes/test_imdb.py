import json
from pathlib import Path

import pytest
import torch

from transformer_kernels.training import Imdb, Processes, Trainer, load_trained
from transformer_kernels.training.data.reviews import tokenise_uncached
from transformer_kernels.training.recipes.imdb import baseline_accuracy, classification_report, load_part, predict
from transformer_kernels.training.report import describe_result


def test_it_learns_to_tell_good_from_bad(imdb_config):
    config = imdb_config(steps=80, lr=1e-2, eval_every=80)
    result = Trainer(Imdb(config)).fit()
    assert result.validation["accuracy"] > 0.9
    trained = load_trained(config.out)
    reviews = tokenise_uncached(
        ["a great film number 7, wonderful and moving", "a dull film number 7, terrible and boring"], trained.tokenizer
    )
    probabilities = predict(trained.model, reviews, trained.tokenizer, trained.config, trained.device)
    assert probabilities.argmax(-1).tolist() == [1, 0]
    assert probabilities.sum(-1).tolist() == pytest.approx([1.0, 1.0])
    assert "accuracy 1" in Imdb.evaluate(trained)


def test_a_batch_of_16_real_reviews_is_learned_by_heart(imdb_config, data_folder, tmp_path):
    lines = read_lines(data_folder / "imdb" / "small_train.jsonl.xz", 16)
    (tmp_path / "few.jsonl").write_text("".join(lines), encoding="utf-8")
    changes = {"tokenizer": "gpt2", "vocab_dir": str(data_folder / "gpt2_bpe"), "batch_size": 16, "validation": 0.0}
    model = {"layers": 2, "width": 64, "heads": 4}
    config = imdb_config(data=str(tmp_path / "few.jsonl"), model=model, steps=25, lr=3e-3, **changes)
    recipe = Imdb(config)
    trainer = Trainer(recipe)
    trainer.fit()
    batch = recipe.batch(torch.arange(16), trainer.device)
    trainer.model.eval()
    assert torch.equal(trainer.model(*batch.inputs).argmax(-1), batch.targets)
    assert recipe.tokenizer.vocabulary_size == 50_260


def test_a_classifier_of_lower_case_words(imdb_config):
    config = imdb_config(tokenizer="words", vocabulary=300, steps=40, lr=1e-2)
    pairs = Imdb(imdb_config(tokenizer="learned", vocabulary=300))  # whose cached ids are others
    recipe = Imdb(config)
    assert recipe.reviews.review(0).tolist() == recipe.tokenizer.encode("A GREAT film number 0, wonderful and moving")
    assert len(recipe.reviews.ids) < len(pairs.reviews.ids)
    Trainer(recipe).fit()
    trained = load_trained(config.out)
    reviews = ["A GREAT film number 7, Wonderful and MOVING", "A dull film number 7, TERRIBLE and boring"]
    found, lower = (Imdb.classify(trained, texts).probabilities for texts in (reviews, [*map(str.lower, reviews)]))
    assert torch.equal(found, lower) and found.argmax(-1).tolist() == [1, 0]


def read_lines(path, count):
    import lzma

    with lzma.open(path, "rt", encoding="utf-8") as file:
        return [next(file) for _ in range(count)]


@pytest.mark.parametrize("batching", ["shuffled", "packed"])
def test_training_masks_tokens_and_smooths_labels(imdb_config, batching):
    recipe = Imdb(imdb_config(batching=batching, token_dropout=0.25, label_smoothing=0.1))
    recipe.sampler(Processes())
    batch, seen = recipe.batch(torch.arange(32), torch.device("cpu")), {}

    class Model:
        def loss(self, labels, tokens, **options):
            seen.update(options, tokens=tokens)

    recipe.loss(Model(), batch.inputs, batch.targets)
    changed = seen["tokens"] != batch.inputs[0]
    assert seen["tokens"][changed].eq(recipe.tokenizer.mask).all()
    assert 0.2 < changed.float().mean() < 0.3 and seen["label_smoothing"] == 0.1
    assert ("cu_seqlens" in seen) == (batching == "packed") != ("padding_mask" in seen)


def test_padding_wider_changes_nothing(imdb_config):
    recipe, wide = Imdb(imdb_config()), Imdb(imdb_config(padding="max"))
    model = recipe.build_model().eval()
    cpu, indices = torch.device("cpu"), torch.arange(8)
    short, long = recipe.batch(indices, cpu), wide.batch(indices, cpu)
    assert short.inputs[0].shape[1] < long.inputs[0].shape[1] == 64
    assert short.tokens == long.tokens
    torch.testing.assert_close(model(*short.inputs), model(*long.inputs))


@pytest.fixture
def uneven_reviews(reviews_file):
    """The tiny reviews, from 47 to 87 bytes long."""
    rows = reviews_file.read_text().splitlines()
    longer = [row.replace("film", "film " + "and " * (number % 10)) for number, row in enumerate(rows)]
    reviews_file.write_text("\n".join(longer))


@pytest.mark.usefixtures("uneven_reviews")
def test_bucketing_pads_less_and_says_so(imdb_config, tmp_path):
    results = {}
    for batching in ("shuffled", "bucketed"):
        config = imdb_config(batching=batching, batch_size=4, steps=10, out=str(tmp_path / batching))
        trainer = Trainer(Imdb(config))
        results[batching] = trainer.fit()
        log = [json.loads(line) for line in Path(config.out, "log.jsonl").read_text().splitlines()]
        steps = [line["padding_fraction"] for line in log if line["event"] == "train"]
        assert min(steps) <= results[batching].padding_fraction <= max(steps)
        assert f"padding          {results[batching].padding_fraction:.1%}" in describe_result(
            trainer, results[batching]
        )
    assert 0 < results["bucketed"].padding_fraction < 0.5 * results["shuffled"].padding_fraction


def test_the_padding_fraction_is_counted(imdb_config):
    config = imdb_config(padding="max", steps=5, log_every=2)
    trainer, masks = Trainer(Imdb(config)), []
    batch = trainer.recipe.batch

    def watched(indices, device):
        masks.append(batch(indices, device).inputs[1])
        return batch(indices, device)

    trainer.recipe.batch = watched
    result = trainer.fit()
    assert result.padding_fraction == pytest.approx(1 - torch.cat(masks).float().mean().item())
    log = [json.loads(line) for line in Path(config.out, "log.jsonl").read_text().splitlines()]
    found = [line["padding_fraction"] for line in log if line["event"] == "train"]
    expected = [1 - torch.cat(masks[first : first + 2]).float().mean().item() for first in (0, 2, 4)]
    assert found == pytest.approx(expected)


def test_a_packed_batch_holds_what_a_padded_one_does(imdb_config):
    packed, padded = Imdb(imdb_config(batching="packed", max_length=20)), Imdb(imdb_config(max_length=20))
    cpu, indices = torch.device("cpu"), torch.tensor([5, 0, 17])
    packed.sampler(Processes())
    (ids, cu_seqlens, position_ids), labels, tokens, _ = packed.batch(indices, cpu)
    (rows, mask), expected_labels, expected_tokens, _ = padded.batch(indices, cpu)
    assert torch.equal(labels, expected_labels)
    assert tokens == expected_tokens == cu_seqlens[-1]
    assert torch.equal(ids[0, :tokens], rows[mask])
    assert torch.equal(position_ids[0, :tokens], torch.arange(rows.shape[1]).expand_as(rows)[mask])
    assert (ids[0, tokens:] == packed.tokenizer.pad).all()
    assert not position_ids[0, tokens:].any()
    assert cu_seqlens.dtype == torch.int32
    assert torch.equal(cu_seqlens.diff(), mask.sum(1))


@pytest.mark.usefixtures("uneven_reviews")
@pytest.mark.parametrize("count", [1, 2])
def test_packed_batches_all_have_one_shape(imdb_config, count):
    shapes = set()
    for rank in range(count):
        recipe = Imdb(imdb_config(batching="packed", batch_size=5, max_length=100))
        sampler = recipe.sampler(Processes(rank, count))
        for _ in range(3 * sampler.batches_per_epoch):
            batch = recipe.batch(sampler.peek(), torch.device("cpu"))
            shapes.add((*(tensor.shape for tensor in batch.inputs), batch.targets.shape))
            sampler.advance()
    ((ids, cu_seqlens, _, labels),) = shapes
    assert ids[1] % 64 == 0
    assert (cu_seqlens[0], labels[0]) == (6, 5)


def test_a_step_on_a_packed_batch_is_the_step_on_the_padded_one(imdb_config):
    """The same model, reviews and labels, so the same gradients; dropout, whose counters differ, is off."""
    model = {"layers": 1, "width": 16, "heads": 2, "dropout": 0.0, "pooling": "mean"}
    losses, gradients = [], []
    for batching in ("shuffled", "packed"):
        trainer = Trainer(Imdb(imdb_config(batching=batching, model=model, backend="torch")))
        recipe = trainer.recipe
        batch = recipe.batch(torch.arange(8), torch.device("cpu"))
        loss = recipe.loss(trainer.model, batch.inputs, batch.targets)
        loss.backward()
        losses.append(loss.item())
        gradients.append([parameter.grad for parameter in trainer.model.parameters()])
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_training_and_validation_do_not_meet(imdb_config):
    recipe = Imdb(imdb_config(validation=0.25))
    assert len(recipe.training) == 36
    assert sorted(recipe.training.tolist() + recipe.held_out.tolist()) == list(range(48))


def test_the_report_is_scikit_learns():
    probabilities = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4], [0.3, 0.7]])
    accuracy, report = classification_report([0, 1, 1, 1], probabilities)
    assert accuracy == 0.75
    assert "precision" in report
    assert [line.split() for line in report.splitlines()[2:4]] == [
        ["negative", "0.5000", "1.0000", "0.6667", "1"],
        ["positive", "1.0000", "0.6667", "0.8000", "3"],
    ]
    assert "negative          1          0" in report
    assert "positive          1          2" in report


def test_the_baseline_learns(imdb_config):
    reviews = load_part(imdb_config(), "train")
    assert baseline_accuracy(reviews, reviews) == 1.0
