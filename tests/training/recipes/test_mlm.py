"""Masked language modelling: what is masked, that it is learned, and that a classifier starts from it."""

import dataclasses
import math
import re

import pytest
import torch

import python_ref
from transformer_kernels import cli
from transformer_kernels.training import CheckpointError, Imdb, Processes, Trainer, load_trained
from transformer_kernels.training.data.tokenizers import ByteTokenizer, LearnedTokenizer, from_description
from transformer_kernels.training.recipes.mlm import Mlm, MlmConfig, mask_tokens
from transformer_kernels.training.step import IGNORED

CPU = torch.device("cpu")


@pytest.fixture
def mlm_config(imdb_config, tmp_path):
    """Makes configs of a tiny masked language model on bytes."""
    shared = {spec.name for spec in dataclasses.fields(MlmConfig)}

    def make(**changes):
        usual = {name: value for name, value in vars(imdb_config()).items() if name in shared}
        return MlmConfig(**{**usual, "out": str(tmp_path / "mlm"), **changes})

    return make


def test_a_tenth_and_a_half_of_the_text_is_masked_8_to_1_to_1():
    tokenizer, generators = ByteTokenizer(), [torch.Generator().manual_seed(seed) for seed in range(200)]
    ids = torch.full((200, 102), ord("x"))
    ids[:, 0], ids[:, -1], ids[:100, 60:] = tokenizer.cls, tokenizer.sep, tokenizer.pad
    masked, places, targets = mask_tokens(ids, tokenizer, generators)
    assert places.shape == targets.shape == (200 * 15,)
    kept = targets != IGNORED
    assert kept.view(200, 15).sum(1).tolist() == [9] * 100 + [15] * 100  # 15 % of 59, and of 100
    chosen = places[kept]
    assert len(chosen.unique()) == len(chosen)
    assert torch.equal(ids.flatten()[chosen], targets[kept])
    changed = masked.flatten()[chosen]
    assert (changed == tokenizer.mask).double().mean().item() == pytest.approx(0.8, abs=0.03)
    assert (changed == ord("x")).double().mean().item() == pytest.approx(0.1, abs=0.03)
    assert (changed < 256).all()
    untouched = torch.ones(ids.numel(), dtype=torch.bool)
    untouched[chosen] = False
    assert torch.equal(masked.flatten()[untouched], ids.flatten()[untouched])


def test_a_review_without_text_has_nothing_masked():
    tokenizer = ByteTokenizer()
    ids = torch.tensor([[tokenizer.cls, tokenizer.sep, tokenizer.pad, tokenizer.pad]])
    masked, _, targets = mask_tokens(ids, tokenizer, [torch.Generator()])
    assert torch.equal(masked, ids)
    assert (targets == IGNORED).all()


def test_masks_are_a_function_of_the_item_number_and_change_with_the_epoch(mlm_config):
    recipe = Mlm(mlm_config())
    sampler = recipe.sampler(Processes())
    seen = []
    for _ in range(2 * sampler.batches_per_epoch):
        seen.append(sampler.peek())
        sampler.advance()
    assert torch.cat(seen).unique().numel() == 2 * sampler.batches_per_epoch * sampler.batch_size
    again = Mlm(mlm_config())
    for first, second in zip(recipe.batch(seen[0], CPU).inputs, again.batch(seen[0], CPU).inputs, strict=True):
        assert torch.equal(first, second)
    later = recipe.batch(seen[0] + recipe.train_length, CPU)
    assert torch.equal(later.inputs[1], recipe.batch(seen[0], CPU).inputs[1])
    assert not torch.equal(later.inputs[0], recipe.batch(seen[0], CPU).inputs[0])


def test_the_loss_is_that_of_the_logits_at_the_masked_places(mlm_config):
    recipe = Mlm(mlm_config())
    model = recipe.build_model().eval()
    batch = recipe.batch(torch.arange(8), CPU)
    logits = model(*batch.inputs)
    assert logits.shape == (*batch.targets.shape, recipe.tokenizer.vocabulary_size)
    whole = model.token_logits(model.hidden_states(*batch.inputs[:2])).flatten(0, 1)
    torch.testing.assert_close(logits, whole[batch.inputs[2]])
    loss = torch.nn.functional.cross_entropy(logits, batch.targets, ignore_index=IGNORED)
    torch.testing.assert_close(recipe.loss(model, batch.inputs, batch.targets), loss)


def test_it_learns_to_fill_in_and_a_classifier_starts_from_it(mlm_config, imdb_config, capsys):
    config = mlm_config(steps=120, lr=1e-2, eval_every=120)
    trained = Trainer(Mlm(config))
    before = trained.evaluate()["loss"]
    assert trained.fit().validation["loss"] < 0.6 * before
    assert cli.main(["evaluate", "--checkpoint", config.out]) == 0
    loss, perplexity = re.search(r"loss (\S+), perplexity (\S+), accuracy", capsys.readouterr().out).groups()
    assert abs(math.exp(float(loss)) / float(perplexity) - 1) < 1e-3
    assert cli.main(["fill-mask", "--checkpoint", config.out, "a [MASK] film", "--top", "3"]) == 0
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    shares = [float(share.rstrip("%")) for share, *_ in lines]
    assert len(lines) == 3 and shares == sorted(shares, reverse=True) and 0 < sum(shares) <= 100.1
    for text in ("no mask", "[MASK] [MASK]"):
        assert cli.main(["fill-mask", "--checkpoint", config.out, text]) == 1
        assert f"fill-mask: the text must contain [MASK] exactly once; got {text!r}" in capsys.readouterr().err
    assert cli.main(["fill-mask", "--checkpoint", config.out, "a" * 99 + "[MASK]"]) == 1
    assert f"must have at most {config.max_length} tokens; got 102; shorten it" in capsys.readouterr().err
    fine = Trainer(Imdb(imdb_config(init=config.out, steps=1, lr=0.0, model={})))  # its sizes come along
    assert not torch.equal(fine.model.embedding.tokens.weight, trained.model.embedding.tokens.weight)
    fine.fit()
    assert "newly initialised: classifier.weight, classifier.bias" in capsys.readouterr().out
    for name, weight in fine.model.state_dict().items():
        assert name.startswith("classifier.") or torch.equal(weight, trained.model.state_dict()[name])


def test_a_run_of_another_size_or_none_is_refused(mlm_config, imdb_config, tmp_path):
    Trainer(Mlm(mlm_config(steps=1))).fit()
    wider = imdb_config(init=mlm_config().out, model={"layers": 1, "width": 32, "heads": 2})
    with pytest.raises(CheckpointError, match=r"mismatched: .*embedding\.tokens\.weight"):
        Trainer(Imdb(wider)).fit()
    with pytest.raises(CheckpointError, match="no such checkpoint"):
        Imdb(imdb_config(init=str(tmp_path / "nothing")))


def test_learned_byte_pairs_come_along(mlm_config, imdb_config):
    config = mlm_config(tokenizer="learned", vocabulary=300, steps=2)
    learned = Mlm(config)
    assert isinstance(learned.tokenizer, LearnedTokenizer)
    text = "a dull film — naïve, 7/10"
    assert learned.tokenizer.decode(learned.tokenizer.encode(text)) == text
    assert len(learned.tokenizer.encode("a great film number 7")) < 12
    assert from_description(learned.tokenizer.describe()).encode(text) == learned.tokenizer.encode(text)
    trainer = Trainer(learned)
    trainer.fit()
    fine = Trainer(Imdb(imdb_config(init=config.out, steps=1)))
    assert fine.recipe.tokenizer.describe() == learned.tokenizer.describe()
    fine.fit()
    assert load_trained(fine.config.out).tokenizer.encode(text) == learned.tokenizer.encode(text)
    with pytest.raises(ValueError, match="vocabulary must hold the 256 bytes; got 100"):
        Mlm(mlm_config(tokenizer="learned", vocabulary=100))


def test_the_encoder_is_the_classifiers():
    with torch.device("meta"):
        model, classifier = python_ref.build("imdb_mlm"), python_ref.build("imdb_bert")
    shared = [name for name, _ in classifier.named_parameters() if not name.startswith("classifier.")]
    ours = dict(model.named_parameters())
    assert all(ours[name].shape == classifier.get_parameter(name).shape for name in shared)
    assert sorted(set(ours) - set(shared)) == [
        f"masked_lm.{name}" for name in ("bias", "dense.bias", "dense.weight", "norm.bias", "norm.weight")
    ]


def test_masks_of_a_review_do_not_depend_on_the_batch_and_the_processes(mlm_config):
    recipe = Mlm(mlm_config(batch_size=4))
    indices = recipe.sampler(Processes()).peek()
    (masked, mask, _), alone = recipe.batch(indices, CPU).inputs, recipe.batch(indices[1:2], CPU).inputs
    width = int(mask[1].sum())
    assert torch.equal(masked[1, :width], alone[0][0, :width])

    def held_out(count):
        batches = [each for rank in range(count) for each in recipe.validation_batches(CPU, Processes(rank, count))]
        return sorted(row[row != recipe.tokenizer.pad].tolist() for each in batches for row in each.inputs[0])

    assert held_out(1) == held_out(2) == held_out(3) != []
