"""Fine-tuning starts from a pretrained encoder of transformers: its sizes, its tokenizer, its weights."""

import json

import pytest
import torch

from transformer_kernels.training import CheckpointError, Trainer
from transformer_kernels.training.data.tokenizers import PretrainedTokenizer, from_description
from transformer_kernels.training.recipes.imdb import Imdb
from transformer_kernels.training.recipes.initial import read_encoder

transformers = pytest.importorskip("transformers", reason="transformers is not installed (extra `test`)")

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "great", "dull", "film", "##s", "."]
SIZES = {"vocab_size": 13, "max_position_embeddings": 80, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.fixture
def pretrained(tmp_path):
    folder = tmp_path / "pretrained"
    config = transformers.BertConfig(**SIZES, hidden_size=16, intermediate_size=24, hidden_act="relu")
    torch.manual_seed(0)
    transformers.BertForMaskedLM(config).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    return folder


def test_a_classifier_starts_from_a_pretrained_encoder(pretrained, imdb_config, capsys):
    config = imdb_config(init=str(pretrained), model={}, steps=1, lr=0.0, epochs=None)
    recipe = Imdb(config)
    trainer = Trainer(recipe)
    trainer.fit()
    printed = capsys.readouterr().out
    assert "newly initialised: classifier.weight, classifier.bias; not used: masked_lm.bias" in printed
    theirs = transformers.BertModel.from_pretrained(pretrained, add_pooling_layer=False).eval()
    ids = recipe.batch(torch.tensor([0, 1]), torch.device("cpu")).inputs[0]
    assert ids[0, 0] == WORDS.index("[CLS]")
    hidden = theirs(ids, attention_mask=(ids != 0).long()).last_hidden_state
    model = trainer.model.eval()
    where = (ids != 0).unsqueeze(-1)
    torch.testing.assert_close(model.hidden_states(ids, ids != 0) * where, hidden * where, rtol=1e-4, atol=1e-5)
    expected = model.classifier((hidden * where).sum(1) / where.sum(1))
    torch.testing.assert_close(model(ids, ids != 0), expected, rtol=1e-4, atol=1e-5)


def test_its_checkpoint_needs_the_folder_no_more(pretrained, imdb_config, monkeypatch):
    from transformer_kernels.training import load_trained

    config = imdb_config(init=str(pretrained), model={}, steps=1, epochs=None)
    trainer = Trainer(Imdb(config))
    trainer.fit()
    pretrained.rename(pretrained.with_name("gone"))
    trained = load_trained(config.out, command="classify")
    probabilities = trained.recipe.classify(trained, ["a great film", "dull films ."]).probabilities
    assert probabilities.shape == (2, 2) and trained.config.model["activation"] == "relu"


def test_what_is_no_encoder_is_refused(pretrained, imdb_config, tmp_path):
    with pytest.raises(CheckpointError, match=r"another model.*mismatched"):
        Trainer(Imdb(imdb_config(init=str(pretrained), model={"width": 32}, steps=1, epochs=None))).fit()
    writer = tmp_path / "writer"
    transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=8, n_positions=8, n_embd=16, n_layer=1, n_head=2)
    ).save_pretrained(writer)
    with pytest.raises(ValueError, match="must be a text encoder such as BERT"):
        read_encoder(writer)
    (pretrained / "vocab.txt").unlink()
    with pytest.raises(FileNotFoundError, match=r"no tokenizer\.json, vocab\.txt"):
        read_encoder(pretrained)
    with pytest.raises(CheckpointError, match=r"gone/on: no such checkpoint; .*mlm; .*`hf download gone/on "):
        read_encoder("gone/on")
    with pytest.raises(CheckpointError, match=r"gone: no such checkpoint; pass a run of train mlm$"):
        read_encoder(tmp_path / "gone")


def test_special_tokens_are_those_of_the_tokenizer(pretrained):
    described = read_encoder(pretrained).tokenizer
    tokenizer = from_description(json.loads(json.dumps(described)))
    assert (tokenizer.pad, tokenizer.cls, tokenizer.sep, tokenizer.mask) == (0, 2, 3, 4)
    assert tokenizer.vocabulary_size == 13 and tokenizer.encode("A great films") == [5, 6, 8, 9]
    nameless = json.loads(described["tokenizer"])
    nameless["model"]["vocab"] = {"[UNK]": 0, "a": 1}
    nameless["added_tokens"] = []
    with pytest.raises(ValueError, match="the tokenizer has neither"):
        PretrainedTokenizer(json.dumps(nameless | {"post_processor": None}), 2)
