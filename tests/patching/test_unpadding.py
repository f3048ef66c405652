"""`patch(model, unpad=True)`: the same results at real tokens, zeros at padding, and no work on padding between."""

import copy
import pickle

import pytest
import torch
from torch import nn

import transformer_kernels as tk
from tests.support import transformers_models as models
from tests.support.transformers_models import one_thread  # noqa: F401  # a fixture of every test here
from transformer_kernels.patching import _real_tokens

transformers = models.transformers
REAL = 12 + 8 + 5
FAMILIES = {
    "Bert": {},
    "Roberta": {},
    "XLMRoberta": {},
    "Camembert": {},
    "Electra": {"embedding_size": 16},
    "DistilBert": models.DISTILBERT,
    "ModernBert": {"local_attention": 6, "cls_token_id": 2, "sep_token_id": 2},
}
HEAD = "ForSequenceClassification"


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch):
    monkeypatch.setattr(_real_tokens, "MIN_ELEMENTS", 1)


def make(family, head=HEAD, dropout=0.0, **options):
    given = FAMILIES[family] if family == "DistilBert" else models.ENCODER | FAMILIES[family]
    config = getattr(transformers, f"{family}Config")(**given, **models.TOKENS, **options)
    for name, value in vars(config).items():
        if "dropout" in name and isinstance(value, float):
            setattr(config, name, dropout)
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}{head}")._from_config(config, attn_implementation="sdpa").train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def unpadded(model):
    """A patched copy, and the shapes of what its first norm is called with."""
    ours, shapes = copy.deepcopy(model), []
    tk.patch(ours, unpad=True)
    norm = next(module for module in ours.modules() if isinstance(module, nn.LayerNorm))
    norm.register_forward_pre_hook(lambda _, args: shapes.append(tuple(args[0].shape[:2])))
    return ours, shapes


def batch(labels=True):
    given = models.inputs("bert", labels=False)
    return given | ({"labels": torch.tensor([0, 1, 1])} if labels else {})


@pytest.mark.parametrize("family", FAMILIES)
def test_losses_and_gradients_are_those_of_the_padded_model(family):
    plain = make(family)
    ours, shapes = unpadded(plain)
    found = models.run("vit", ours, batch())
    assert shapes[0] == (1, REAL)
    exact = models.run("vit", copy.deepcopy(plain).double(), batch())
    models.assert_within_budget(found, models.run("vit", plain, batch()), exact)


@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_are_zero_at_padding(family):
    plain = make(family, "Model").eval()
    ours, shapes = unpadded(plain)
    given = batch(labels=False)
    out, expected, real = ours(**given), plain(**given), given["attention_mask"].bool()
    assert shapes[0] == (1, REAL) and type(out) is type(expected)
    assert bool((out.last_hidden_state[~real] == 0.0).all())
    torch.testing.assert_close(out.last_hidden_state[real], expected.last_hidden_state[real], rtol=1e-4, atol=1e-5)
    if family == "Bert":
        torch.testing.assert_close(out.pooler_output, expected.pooler_output, rtol=1e-4, atol=1e-5)


def embedded(model, given):
    return {"inputs_embeds": model.get_input_embeddings()(given.pop("input_ids")).detach()}


MORE = {
    "positions": lambda model, given: {"position_ids": torch.arange(12).flip(0).expand(3, 12) + 2},
    "segments": lambda model, given: {"token_type_ids": torch.arange(12).expand(3, 12) % 2},
    "embedded tokens": embedded,
    "a bool mask": lambda model, given: {"attention_mask": given["attention_mask"].bool()},
}


@pytest.mark.parametrize("name", MORE)
@pytest.mark.parametrize("family", ["Bert", "Roberta"])
def test_arguments_with_a_value_for_each_token(family, name):
    plain = make(family, type_vocab_size=2).eval()
    ours, shapes = unpadded(plain)
    given = batch()
    given |= MORE[name](plain, given)
    torch.testing.assert_close(ours(**given).logits, plain(**given).logits, rtol=1e-4, atol=1e-5)
    assert shapes[0] == (1, REAL)


def left(given):
    return {"attention_mask": given["attention_mask"].flip(1)}


def without(*positions):
    def changed(given):
        mask = given["attention_mask"].clone()
        for row, first, last in positions:
            mask[row, first:last] = 0
        return {"attention_mask": mask}

    return changed


NOTHING = {
    "left": left,
    "a hole": without((1, 2, 4)),
    "an empty row": without((2, 0, 12)),
    "no padding": lambda given: {"attention_mask": torch.ones_like(given["attention_mask"])},
    "no mask": lambda given: {"attention_mask": None},
    "four axes": lambda given: {"attention_mask": given["attention_mask"].bool()[:, None, None].expand(3, 1, 12, 12)},
    "positions of one row": lambda given: {"position_ids": torch.arange(12)[None]},
    "hidden states": lambda given: {"output_hidden_states": True},
    "weights": lambda given: {"output_attentions": True},
    "a tuple": lambda given: {"return_dict": False},
}


@pytest.mark.parametrize("name", NOTHING)
def test_every_other_call_is_that_of_the_padded_model(name):
    plain = make("Bert", "Model").eval()
    if name == "weights":
        plain.set_attn_implementation("eager")
    ours, shapes = unpadded(plain)
    given = batch(labels=False)
    given |= NOTHING[name](given)
    out, expected = ours(**given), plain(**given)
    assert shapes[0] == (3, 12)
    torch.testing.assert_close(out[0], expected[0], rtol=1e-4, atol=1e-5)
    assert type(out) is type(expected) and len(out) == len(expected)


@pytest.mark.parametrize("limit", [{"MIN_SHARE": 0.4}, {"MIN_ELEMENTS": 12 * 32}])
def test_a_little_padding_is_computed_and_set_to_zero(limit, monkeypatch):
    for name, value in limit.items():
        monkeypatch.setattr(_real_tokens, name, value)
    plain = make("Bert", "Model").eval()
    ours, shapes = unpadded(plain)
    given = batch(labels=False)
    found, expected = (model(**given).last_hidden_state for model in (ours, plain))
    assert shapes[0] == (3, 12)
    torch.testing.assert_close(found, expected * given["attention_mask"].unsqueeze(-1), rtol=1e-4, atol=1e-5)


def test_the_configuration_may_request_hidden_states():
    ours, shapes = unpadded(make("Bert", "Model", output_hidden_states=True).eval())
    assert len(ours(**batch(labels=False)).hidden_states) == 3 and shapes[0] == (3, 12)


def test_recorded_and_compiled_steps_have_the_same_results():
    plain = make("Bert", "Model").eval()
    ours, shapes = unpadded(plain)
    given = tuple(batch(labels=False).values())
    run = lambda tokens, mask: ours(tokens, mask).last_hidden_state  # noqa: E731
    recorded, compiled = tk.graphed(run, warm_up_calls=1), torch.compile(run, backend="eager")
    expected = plain(*given).last_hidden_state * given[1].unsqueeze(-1)
    with torch.no_grad():
        for step in (recorded, recorded, recorded, compiled):
            torch.testing.assert_close(step(*given), expected, rtol=1e-4, atol=1e-5)
    assert shapes[0] == (1, REAL) and set(shapes[1:]) == {(3, 12)}


def test_recomputed_layers():
    plain = make("ModernBert")
    ours, shapes = unpadded(plain)
    expected = models.run("vit", ours, batch())
    ours.gradient_checkpointing_enable()
    found = models.run("vit", ours, batch())
    assert set(shapes) == {(1, REAL)}
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def reasons(model):
    return [row.reason for row in tk.patch(model, unpad=True).rows if row.kind == "BertModel"]


def test_encoders_that_compute_their_padding():
    assert reasons(make("Bert", "ForQuestionAnswering")) == ["the loss of spans reads padded positions"]
    assert reasons(make("Bert", "LMHeadModel", is_decoder=True)) == ["it is a decoder"]
    assert reasons(make("Bert", output_attentions=False)) == [None]
    model = make("Bert")
    model.bert.forward = model.bert.forward
    assert reasons(model) == ["its method forward is replaced on this instance"]


def test_unpatch_and_another_patch_pad_again():
    ours = make("Bert")
    before = type(ours.bert)
    for undo in (tk.unpatch, tk.patch):
        tk.patch(ours, unpad=True)
        assert type(ours.bert) is not before
        tk.patch(ours, backend="torch", unpad=True)
        undo(ours)
        assert type(ours.bert) is before


def test_copies_are_unpadded_too():
    ours, _ = unpadded(make("Bert").eval())
    next(module for module in ours.modules() if isinstance(module, nn.LayerNorm))._forward_pre_hooks.clear()
    expected = ours(**batch()).logits
    for again in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert torch.equal(again(**batch()).logits, expected)


def test_a_trainer_without_changes(tmp_path):
    pytest.importorskip("accelerate", reason="transformers' Trainer needs the package accelerate")
    data = [
        {"input_ids": [2 + i, *range(3, 3 + length)], "labels": i % 2} for i, length in enumerate((3, 17, 9, 5, 30, 8))
    ]
    losses = []
    for unpad in (None, True):
        model = make("Bert")
        shapes = []
        if unpad:
            model, shapes = unpadded(model)
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path), per_device_train_batch_size=3, num_train_epochs=3, learning_rate=1e-2,
            report_to=[], logging_steps=1, save_strategy="no", use_cpu=True, seed=0, disable_tqdm=True,
        )  # fmt: skip
        trainer = transformers.Trainer(model, arguments, train_dataset=data, data_collator=collated)
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert len(losses[0]) == 6 and shapes and all(rows == 1 for rows, _ in shapes)
    torch.testing.assert_close(torch.tensor(losses[1]), torch.tensor(losses[0]), rtol=1e-3, atol=1e-3)


def collated(rows):
    tokens = nn.utils.rnn.pad_sequence([torch.tensor(row["input_ids"]) for row in rows], True, 1)
    lengths = torch.tensor([len(row["input_ids"]) for row in rows])
    mask = (torch.arange(tokens.shape[1]) < lengths[:, None]).long()
    return {"input_ids": tokens, "attention_mask": mask, "labels": torch.tensor([row["labels"] for row in rows])}


def encoder(batch_first=True, norm_first=False, **options):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        32, 4, 64, dropout=0.0, batch_first=batch_first, norm_first=norm_first, activation="gelu"
    )
    return nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(32), **options).train()


PADDING = torch.arange(12) >= torch.tensor([12, 8, 5])[:, None]


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_encoders_of_torch_nn(batch_first, norm_first):
    plain = encoder(batch_first, norm_first)
    ours = copy.deepcopy(plain)
    tk.patch(ours, unpad=True)
    results, real = [], ~PADDING if batch_first else ~PADDING.t()
    for model, dtype in ((copy.deepcopy(plain).double(), torch.float64), (plain, None), (ours, None)):
        x = torch.randn(*real.shape, 32, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
        out = model(x, src_key_padding_mask=PADDING)
        out[real].square().sum().backward()
        gradients = {f"d{name}": parameter.grad for name, parameter in model.named_parameters()}
        results.append({"logits": out[real].detach(), "dx": x.grad, **gradients})
    exact, eager, found = results
    models.assert_within_budget(found, eager, exact)
    at_padding = ours(torch.randn(*real.shape, 32), src_key_padding_mask=PADDING)[~real]
    assert torch.equal(at_padding, ours.norm.bias.expand_as(at_padding))  # the norm of 0


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("nested", [True, False])
def test_inference_is_unpadded_where_that_of_torch_is(nested):
    plain = encoder(enable_nested_tensor=nested).eval()
    ours, x, lengths = copy.deepcopy(plain), torch.randn(3, 12, 32), []
    tk.patch(ours)
    ours.layers[0].linear2.register_forward_pre_hook(lambda _, args: lengths.append(tuple(args[0].shape[:2])))
    with torch.no_grad():
        found, expected = (model(x, src_key_padding_mask=PADDING) for model in (ours, plain))
    compared = slice(None) if nested else ~PADDING
    torch.testing.assert_close(found[compared], expected[compared], rtol=1e-4, atol=1e-5)
    assert lengths == [(1, REAL) if nested else (3, 12)]
    ours(x, src_key_padding_mask=PADDING)
    assert lengths[1] == (3, 12)


def test_recorded_encoders_of_torch_nn_have_the_same_results():
    ours, x = encoder().eval(), torch.randn(3, 12, 32)
    tk.patch(ours)
    recorded = tk.graphed(lambda x, padding: ours(x, src_key_padding_mask=padding), warm_up_calls=1)
    with torch.no_grad():
        expected = ours(x, src_key_padding_mask=PADDING)
    for _ in range(3):
        torch.testing.assert_close(recorded(x, PADDING), expected, rtol=1e-4, atol=1e-5)


def test_encoders_of_torch_nn_that_stay_padded():
    plain = encoder()
    causal = nn.Transformer.generate_square_subsequent_mask(12) == -torch.inf
    for given in (
        {"mask": causal, "src_key_padding_mask": PADDING},
        {"src_key_padding_mask": PADDING.flip(1)},
        {"src_key_padding_mask": torch.zeros(3, 12).masked_fill(PADDING, -torch.inf)},
        {},
    ):
        ours, x, lengths = copy.deepcopy(plain), torch.randn(3, 12, 32), []
        tk.patch(ours, unpad=True)
        ours.layers[0].register_forward_pre_hook(lambda _, args, lengths=lengths: lengths.append(args[0].shape[:2]))
        padding = given.get("src_key_padding_mask", torch.zeros(3, 12)) != 0
        real = ~padding
        torch.testing.assert_close(ours(x, **given)[real], plain(x, **given)[real], rtol=1e-4, atol=1e-5)
        assert lengths == [(3, 12)]
