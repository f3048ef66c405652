import dataclasses
import json
from pathlib import Path

import pytest
import torch

from transformer_kernels.training import Imdb, ImdbConfig, Trainer, load_trained
from transformer_kernels.training.imdb import baseline_accuracy, classification_report, load_part, predict
from transformer_kernels.training.report import describe_result, evaluate_imdb
from transformer_kernels.training.token_cache import tokenise_uncached


def test_it_learns_to_tell_good_from_bad(imdb_config):
    config = imdb_config(steps=150, lr=1e-2, eval_every=150)
    result = Trainer(Imdb(config)).fit()
    assert result.validation["accuracy"] > 0.9
    trained = load_trained(config.out)
    reviews = tokenise_uncached(
        ["a great film number 7, wonderful and moving", "a dull film number 7, terrible and boring"], trained.tokenizer
    )
    probabilities = predict(trained.model, reviews, trained.tokenizer, trained.config, trained.device)
    assert probabilities.argmax(-1).tolist() == [1, 0]
    assert probabilities.sum(-1).tolist() == pytest.approx([1.0, 1.0])
    assert "accuracy 1" in evaluate_imdb(trained, baseline=False, progress=False)


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


def read_lines(path, count):
    import lzma

    with lzma.open(path, "rt", encoding="utf-8") as file:
        return [next(file) for _ in range(count)]


def test_padding_wider_changes_nothing(imdb_config):
    recipe, wide = Imdb(imdb_config()), Imdb(imdb_config(padding="max"))
    model = recipe.build_model().eval()
    cpu, indices = torch.device("cpu"), torch.arange(8)
    short, long = recipe.batch(indices, cpu), wide.batch(indices, cpu)
    assert short.inputs[0].shape[1] < long.inputs[0].shape[1] == 64
    assert short.tokens == long.tokens
    torch.testing.assert_close(model(*short.inputs), model(*long.inputs))


def test_bucketing_pads_less_and_says_so(imdb_config, tmp_path, reviews_file):
    rows = reviews_file.read_text().splitlines()
    longer = [row.replace("film", "film " + "and " * (number % 10)) for number, row in enumerate(rows)]
    reviews_file.write_text("\n".join(longer))
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
    trainer = Trainer(Imdb(imdb_config(padding="max")))
    masks = []
    batch = trainer.recipe.batch

    def watched(indices, device):
        masks.append(batch(indices, device).inputs[1])
        return batch(indices, device)

    trainer.recipe.batch = watched
    result = trainer.fit()
    assert result.padding_fraction == pytest.approx(1 - torch.cat(masks).float().mean().item())


def test_training_and_validation_do_not_meet(imdb_config):
    recipe = Imdb(imdb_config(validation=0.25))
    assert len(recipe.training) == 36
    assert sorted(recipe.training.tolist() + recipe.held_out.tolist()) == list(range(48))


def test_the_defaults_are_the_ones_promised():
    config = ImdbConfig()
    assert (config.lr, config.batch_size, config.max_length, config.tokenizer) == (3e-4, 16, 256, "gpt2")


@pytest.mark.parametrize("batching", ["shuffled", "bucketed"])
def test_resuming_is_bit_exact(imdb_config, tmp_path, batching):
    whole = imdb_config(out=str(tmp_path / "a"), schedule="constant", batching=batching)
    Trainer(Imdb(whole)).fit()
    half = dataclasses.replace(whole, out=str(tmp_path / "b"), steps=2)
    Trainer(Imdb(half)).fit()
    resumed = Trainer(Imdb(dataclasses.replace(half, steps=4)))
    resumed.restore(Path(half.out, "last"))
    resumed.fit()
    expected = load_trained(tmp_path / "a" / "last").model.state_dict()
    for name, weight in resumed.model.state_dict().items():
        assert torch.equal(weight, expected[name]), name


def test_the_report_is_scikit_learns():
    probabilities = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4], [0.3, 0.7]])
    accuracy, report = classification_report([0, 1, 1, 1], probabilities)
    assert accuracy == 0.75
    assert "precision" in report
    assert "negative          1          0" in report
    assert "positive          1          2" in report


def test_the_baseline_learns(imdb_config):
    reviews = load_part(imdb_config(), "train")
    assert baseline_accuracy(reviews, reviews) == 1.0
