"""sentence-transformers: a patched encoder packs its texts, and its embeddings are those of the padded ones."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import transformer_kernels as tk

reason = "the package sentence-transformers is not installed"
library = pytest.importorskip("sentence_transformers", reason=reason)
transformers = pytest.importorskip("transformers", reason=reason)

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "happy", "person", "dog", "sunny", "day", "it", "rains"]
TEXTS = ["a happy person", "a dog", "it rains a day a sunny day it rains", "day", "a sunny dog rains", "person"]
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}


@pytest.fixture(scope="module", params=["Bert", "Roberta"])
def folder(request, tmp_path_factory):
    where = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    config = getattr(transformers, f"{request.param}Config")(vocab_size=len(WORDS), pad_token_id=0, **SIZES)
    model = getattr(transformers, f"{request.param}Model")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(where)
    (where / "vocab.txt").write_text("\n".join(WORDS))
    transformers.BertTokenizerFast(str(where / "vocab.txt")).save_pretrained(where)
    return where


def encoder(folder, **options):
    modules = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
    transformer = modules.Transformer(str(folder), **options)
    pooling = modules.Pooling(transformer.get_embedding_dimension())
    return library.SentenceTransformer(modules=[transformer, pooling], device="cpu")


def tokens_of(model):
    """The shapes of the tokens that the model inside is called with."""
    shapes = []
    model[0].model.embeddings.register_forward_pre_hook(
        lambda _, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    return shapes


def test_texts_are_packed(folder):
    plain, ours = encoder(folder), encoder(folder)
    report = tk.patch(ours)
    assert [row.operation for row in report.rows if row.kind == "Transformer"] == ["packed inputs"]
    shapes = tokens_of(ours)
    expected, given = plain.encode(TEXTS), ours.encode(TEXTS)
    torch.testing.assert_close(torch.tensor(given), torch.tensor(expected), rtol=1e-4, atol=1e-5)
    assert shapes == [(1, sum(len(text.split()) + 2 for text in TEXTS))]
    torch.testing.assert_close(torch.tensor(ours.encode(TEXTS[0])), torch.tensor(expected[0]), rtol=1e-4, atol=1e-5)
    assert shapes[1] == (1, 5)
    ours[0].model.embeddings._forward_pre_hooks.clear()
    ours[0].model.embeddings._forward_pre_hooks_with_kwargs.clear()
    for again in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        torch.testing.assert_close(torch.tensor(again.encode(TEXTS)), torch.tensor(given))


def test_the_name_with_flash_packs_texts_without_a_patch(folder):
    name = pytest.importorskip("transformer_kernels.huggingface").FLASH_NAME
    plain, ours = encoder(folder), encoder(folder, model_kwargs={"attn_implementation": name})
    shapes = tokens_of(ours)
    given, expected = ours.encode(TEXTS), plain.encode(TEXTS)
    assert shapes == [(1, sum(len(text.split()) + 2 for text in TEXTS))]
    torch.testing.assert_close(torch.tensor(given), torch.tensor(expected), rtol=1e-4, atol=1e-5)


def test_unpatch_pads_again(folder):
    ours = encoder(folder)
    before = dict(vars(ours[0]))
    tk.patch(ours)
    tk.patch(ours, backend="torch")
    tk.unpatch(ours)
    assert vars(ours[0]).keys() == before.keys()
    shapes = tokens_of(ours)
    ours.encode(TEXTS)
    assert shapes == [(len(TEXTS), 11)]


def test_why_texts_are_padded(folder):
    ours = encoder(folder)
    ours[0].unpad_inputs = False
    report = tk.patch(ours)
    assert [row.reason for row in report.left if row.kind == "Transformer"] == ["unpad_inputs is False"]
    weights = encoder(folder)
    weights[0].model.set_attn_implementation("eager")
    weights[0].model.config.output_attentions = True
    report = tk.patch(weights)
    reasons = [row.reason for row in report.left if row.kind == "Transformer"]
    assert reasons == ["the attention of its model is not patched"]


def another_task(module, monkeypatch):
    monkeypatch.setattr(module, "transformer_task", "text-generation")


def no_texts(module, monkeypatch):
    monkeypatch.setattr(module, "modality_config", {})


def another_method(module, monkeypatch):
    monkeypatch.setattr(module, "modality_config", {"text": module.modality_config["text"] | {"method": "encode"}})


def no_position_ids(module, monkeypatch):
    forward = module.model.forward
    changed = lambda input_ids, attention_mask, **kwargs: forward(input_ids, attention_mask, **kwargs)  # noqa: E731
    monkeypatch.setattr(module.model, "forward", changed)


def another_release(module, monkeypatch):
    monkeypatch.delattr(type(module), "_infer_flatten_position_offset")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (another_task, "its task is not the encoding of texts"),
        (no_texts, "its task is not the encoding of texts"),
        (another_method, "it calls other methods than forward"),
        (no_position_ids, "its model takes no positions"),
        (another_release, "this release of sentence-transformers does not pack texts"),
    ],
)
def test_what_is_not_packed(folder, change, reason, monkeypatch):
    ours = encoder(folder)
    change(ours[0], monkeypatch)
    assert [row.reason for row in tk.patch(ours).left if row.kind == "Transformer"] == [reason]
    assert not ours[0].can_flatten_inputs
