"""Patched models of transformers compute what they compute unpatched, and are otherwise unchanged."""

from __future__ import annotations

import copy
import functools
import inspect
import json
import pickle

import pytest
import torch
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel

import transformer_kernels as tk
from tests.support import transformers_models as models
from tests.support.transformers_models import one_thread  # noqa: F401  # a fixture of every test here
from transformer_kernels.patching._swap import Patched

transformers = pytest.importorskip("transformers")

ONE_OF_EACH = ("bert", "distilbert", "gpt2", "llama", "t5", "vit")


def pair(family, **options):
    """The model, and a patched copy of it."""
    eager = models.make(family, **options)
    ours = copy.deepcopy(eager)
    report = tk.patch(ours)
    assert report.patched
    return eager, ours


@pytest.mark.parametrize("padding", ["right", "left", None])
@pytest.mark.parametrize("family", models.FAMILIES)
def test_forward_and_gradients_match_eager(family, padding):
    if family == "vit" and padding is not None:
        pytest.skip("images have no padding")
    eager, ours = pair(family)
    batch = models.inputs(family, padding)
    exact = models.run(family, models.exact(eager), batch)
    models.assert_within_budget(models.run(family, ours, batch), models.run(family, eager, batch), exact)


def test_a_block_with_a_forward_of_its_own_keeps_its_dropout():
    """A forward replaced by accelerate's hooks calls the parts of the block, not the patched forward."""
    model = models.make("gpt2", resid_pdrop=0.5).train()
    block = model.transformer.h[0]
    block.forward = block.forward
    report = tk.patch(model)
    reasons = {row.name: row.reason for row in report.left}
    assert reasons["transformer.h.0"] == "its method forward is replaced on this instance"
    hidden = torch.ones(1, 8, 48)
    dropped = block.attn.resid_dropout(hidden)
    assert (dropped == 0).any()


@pytest.mark.parametrize("family", ONE_OF_EACH)
def test_bfloat16_matches_eager(family):
    eager, ours = pair(family)
    eager, ours, batch = eager.bfloat16(), ours.bfloat16(), models.inputs(family)
    exact = models.run(family, models.exact(eager), batch)
    models.assert_within_budget(models.run(family, ours, batch), models.run(family, eager, batch), exact)
    assert ours(**batch).loss.dtype is eager(**batch).loss.dtype


@pytest.mark.parametrize("family", ONE_OF_EACH)
def test_twenty_steps_of_training_give_the_same_losses(family):
    losses = []
    for model in pair(family):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        losses.append([])
        for step in range(20):
            loss = model(**models.inputs(family, ("right", None)[step % 2])).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    torch.testing.assert_close(losses[1], losses[0], rtol=0, atol=1e-5)
    assert losses[1][-1] < losses[1][0]


@pytest.mark.parametrize("family", models.FAMILIES)
def test_dropout_of_everything_matches_eager(family):
    eager, ours = pair(family, dropout=1.0)
    batch = models.inputs(family)
    torch.testing.assert_close(ours(**batch).logits, eager(**batch).logits)


@pytest.mark.parametrize("family", models.FAMILIES)
def test_dropout_follows_the_seed_and_the_mode(family):
    _, ours = pair(family, dropout=0.3)
    eager, batch = models.make(family), models.inputs(family)
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append(ours(**batch).logits)
    assert torch.equal(runs[0], runs[1]) and not torch.equal(runs[0], runs[2])
    where = models.real(family, batch)
    expected = (eager.eval()(**batch).logits * where).detach()
    torch.testing.assert_close((ours.eval()(**batch).logits * where).detach(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ("bert", "gpt2"))
def test_each_dropout_keeps_its_rate(family):
    """The variance that dropout adds to the logits is that of eager, within the noise of 150 draws."""
    eager, ours = pair(family, dropout=0.2)
    batch = models.inputs(family, None)
    spreads = []
    for model in (eager, ours):
        torch.manual_seed(5)
        with torch.no_grad():
            spreads.append(torch.stack([model(**batch).logits for _ in range(150)]).var(0).mean())
    assert 0.8 < spreads[1] / spreads[0] < 1.25


@pytest.mark.parametrize("asked", ["return_attention", "output_attentions"])
@pytest.mark.parametrize("family", models.FAMILIES)
@torch.no_grad()
def test_attention_maps_are_those_of_eager_and_change_nothing(family, asked):
    eager, ours = (model.eval() for model in pair(family))
    batch = models.inputs(family)
    plain, out = ours(**batch).logits, ours(**batch, **{asked: True})
    assert torch.equal(out.logits, plain) and torch.equal(ours(**batch).logits, plain)
    expected = eager(**batch, output_attentions=True)
    kinds = [name for name in expected if name.endswith("attentions") and expected[name]]
    assert kinds
    for name in kinds:
        for given, wanted in zip(out[name], expected[name], strict=True):
            torch.testing.assert_close(given[..., :5, :], wanted[..., :5, :], rtol=0, atol=1e-5)  # 5 tokens are real


@pytest.mark.parametrize("family", models.FAMILIES)
def test_unpatched_models_are_what_they_were(family):
    eager, ours = pair(family)
    tk.unpatch(ours)
    assert [type(module) for module in ours.modules()] == [type(module) for module in eager.modules()]
    assert [sorted(vars(module)) for module in ours.modules()] == [sorted(vars(module)) for module in eager.modules()]
    assert ours.config._attn_implementation == "eager"
    assert not any(module._forward_pre_hooks or module._forward_pre_hooks_with_kwargs for module in ours.modules())
    batch = models.inputs(family)
    assert torch.equal(ours(**batch).logits, eager(**batch).logits)


def test_patching_twice_changes_the_backend_only():
    _, ours = pair("gpt2")
    kinds, names = [type(module) for module in ours.modules()], [row.name for row in tk.patch(ours).rows]
    report = tk.patch(ours, backend="torch")
    assert [type(module) for module in ours.modules()] == kinds and [row.name for row in report.rows] == names
    backends = {module.backend for module in ours.modules() if isinstance(module, Patched)}
    assert backends == {"torch"} == {ours._loss_function.keywords["backend"]}


def test_a_named_backend_never_falls_back(monkeypatch):
    model = models.make("bert")
    with pytest.raises(ValueError, match="backend must be one of"):
        tk.patch(model, backend="nonsense")
    monkeypatch.setattr("transformer_kernels.patching.unavailable", lambda *_: "no such device")
    with pytest.raises(tk.BackendUnavailable, match="patch: backend 'cuda' is not available: no such device"):
        tk.patch(model, backend="cuda")
    assert not any(isinstance(module, Patched) for module in model.modules())
    with pytest.raises(TypeError, match="patch: model must be a torch"):
        tk.patch("bert")


@pytest.mark.parametrize("family", ONE_OF_EACH)
def test_every_patched_module_asks_its_backend(family):
    """With an unknown backend of one module, the model raises: no module is skipped, and none falls back."""
    _, ours = pair(family)
    batch = models.inputs(family)
    fused = ("LayerNorm", "RMSNorm", "Activation", "Dropout")  # where the module around them computes for them
    fused += ("Linear",)  # which gives the logits by PyTorch's products
    for module in ours.modules():
        if not hasattr(module, "operation") or any(word in type(module).__name__ for word in fused):
            continue
        module.backend = "nonsense"
        with pytest.raises(ValueError, match="backend must be one of"):
            ours(**batch)
        module.backend = None
    ours(**batch)


def test_only_this_instance_changes():
    config = transformers.BertConfig(**models.ENCODER)
    first, second = transformers.BertModel(config), transformers.BertModel(config)
    tk.patch(first)
    assert (first.config._attn_implementation, second.config._attn_implementation) == ("transformer_kernels", "sdpa")
    assert not any(isinstance(module, Patched) for module in second.modules())
    assert config._attn_implementation == "sdpa"


@pytest.mark.parametrize("family", ONE_OF_EACH)
def test_saved_and_loaded(family, tmp_path):
    eager, ours = pair(family)
    assert list(ours.state_dict()) == list(eager.state_dict())
    ours.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["architectures"] == [type(eager).__name__]
    assert "transformer_kernels" not in json.dumps(saved)
    loaded = type(eager).from_pretrained(tmp_path, attn_implementation="eager").train()
    batch = models.inputs(family)
    torch.testing.assert_close(loaded(**batch).logits, eager(**batch).logits)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("family", ONE_OF_EACH)
def test_copies_stay_patched(family, duplicate):
    eager, ours = pair(family)
    try:
        duplicate(eager)
    except AttributeError as error:  # Llama before 5.23, with the package kernels
        pytest.skip(f"the unpatched model cannot be copied: {error}")
    twin = duplicate(ours)
    assert [type(module) for module in twin.modules()] == [type(module) for module in ours.modules()]
    batch = models.inputs(family)
    assert torch.equal(twin(**batch).logits, ours(**batch).logits)
    tk.unpatch(twin)
    assert not any(isinstance(module, Patched) for module in twin.modules())
    assert any(isinstance(module, Patched) for module in ours.modules())


@pytest.mark.parametrize("family", ONE_OF_EACH)
def test_signatures_that_trainers_read_stay(family):
    eager, ours = pair(family)
    for mine, theirs in zip(ours.modules(), eager.modules(), strict=True):
        if not type(mine).__module__.startswith("torch.nn"):
            assert list(inspect.signature(mine.forward).parameters) == list(
                inspect.signature(theirs.forward).parameters
            )
        assert isinstance(mine, type(theirs)) and type(mine).__name__ == type(theirs).__name__


@pytest.mark.parametrize("family", ONE_OF_EACH)
def test_hidden_states_and_tuples(family):
    eager, ours = pair(family)
    batch = models.inputs(family, None)
    mine, theirs = (model(**batch, output_hidden_states=True, return_dict=False) for model in (ours, eager))
    assert len(mine) == len(theirs)
    torch.testing.assert_close(mine[0], theirs[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(mine[1], theirs[1], rtol=1e-4, atol=1e-5)
    named = "encoder_hidden_states" if family == "t5" else "hidden_states"
    mine, theirs = (model(**batch, output_hidden_states=True) for model in (ours, eager))
    assert list(mine) == list(theirs)
    for a, b in zip(mine[named], theirs[named], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ONE_OF_EACH)
def test_gradient_checkpointing(family):
    _, ours = pair(family)
    batch = models.inputs(family)
    plain = models.run(family, ours, batch)
    ours.gradient_checkpointing_enable()
    for name, value in models.run(family, ours, batch).items():
        torch.testing.assert_close(value, plain[name], msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("family", ONE_OF_EACH)
def test_autocast(family):
    eager, ours = pair(family)
    batch = models.inputs(family, None)
    with torch.autocast("cpu", torch.bfloat16):
        mine, theirs = ours(**batch), eager(**batch)
    assert (mine.loss - theirs.loss).abs() < 0.02
    mine.loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in ours.parameters() if p.grad is not None)


@pytest.mark.parametrize("family", ("bert", "gpt2"))
def test_compiled(family):
    eager, ours = pair(family)
    batch = models.inputs(family, None)
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    loss = compiled(**batch).loss
    loss.backward()
    torch.testing.assert_close(loss, eager(**batch).loss, rtol=1e-5, atol=1e-6)
    gradients = [p.grad for p in ours.parameters()]
    ours.zero_grad(set_to_none=True)
    ours(**batch).loss.backward()
    for mine, plain in zip(gradients, [p.grad for p in ours.parameters()], strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-4, atol=1e-6)


def test_distributed_data_parallel(tmp_path):
    eager, ours = pair("bert")
    batch = models.inputs("bert")
    init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        DistributedDataParallel(ours)(**batch).loss.backward()
    finally:
        destroy_process_group()
    eager(**batch).loss.backward()
    for (name, mine), theirs in zip(ours.named_parameters(), eager.parameters(), strict=True):
        if theirs.grad is not None:
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-3, atol=1e-6, msg=lambda text, n=name: n + text)


class LowRank(torch.nn.Module):
    """Replaces a layer as adapters do, and contains it."""

    def __init__(self, layer, width):
        super().__init__()
        self.base_layer, self.change = layer, torch.nn.Linear(width, width, bias=False)
        torch.nn.init.normal_(self.change.weight, std=0.1)

    @property
    def weight(self):
        return self.base_layer.weight

    @property
    def bias(self):
        return self.base_layer.bias

    def forward(self, x):
        out = self.base_layer(x)
        return out + torch.nn.functional.pad(self.change(x), (0, out.shape[-1] - x.shape[-1]))


@pytest.mark.parametrize("first", ["patch", "adapters"])
@pytest.mark.parametrize("family", ("bert", "gpt2"))
def test_adapters_and_hooks_are_called(family, first):
    eager = models.make(family)
    ours = copy.deepcopy(eager)
    calls = []
    for model in (eager, ours):
        if first == "patch" and model is ours:
            tk.patch(model)
        torch.manual_seed(3)
        block = model.bert.encoder.layer[0] if family == "bert" else model.transformer.h[0]
        owner, name = (block.intermediate, "dense") if family == "bert" else (block.mlp, "c_fc")
        setattr(owner, name, LowRank(getattr(owner, name), 32))
        norm = block.output.LayerNorm if family == "bert" else block.ln_2
        norm.register_forward_hook(lambda module, given, out: calls.append(module) or out * 2)
        last = model.bert.encoder.layer[1].output.LayerNorm if family == "bert" else model.transformer.h[1].ln_2
        last.forward = lambda x, own=last.forward: own(x) * 2  # as offloading replaces it
        if first == "adapters" and model is ours:
            tk.patch(model)
    batch = models.inputs(family, None)
    torch.testing.assert_close(ours(**batch).logits, eager(**batch).logits, rtol=1e-4, atol=1e-5)
    assert len(calls) == 2


@pytest.mark.parametrize("option", [{"max_norm": 0.3}, {"scale_grad_by_freq": True}, {"sparse": True}], ids=str)
@pytest.mark.parametrize("family", ["bert", "distilbert"])
def test_options_of_a_table_are_kept(family, option):
    found = []
    for model in pair(family):
        table = model.get_input_embeddings()
        vars(table).update(option)
        hidden = model.base_model(models.inputs(family)["input_ids"].clamp(max=7)).last_hidden_state
        hidden.square().sum().backward()
        assert table.weight.grad.is_sparse == table.sparse
        found.append([hidden.detach(), table.weight.detach(), table.weight.grad.to_dense()])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


def test_a_loss_module_with_options_keeps_them():
    eager, ours = pair("distilbert")
    for model in (eager, ours):
        model.mlm_loss_fct = torch.nn.CrossEntropyLoss(label_smoothing=0.3)
    batch = models.inputs("distilbert")
    torch.testing.assert_close(ours(**batch).loss, eager(**batch).loss, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
@pytest.mark.parametrize("family", ["bert", "distilbert", "gpt2", "llama"])
def test_every_kind_of_hook_is_called_in_the_modules_of_an_eager_model(family, kind):
    eager = models.make(family, dropout=0.1)
    ours = copy.deepcopy(eager)
    tk.patch(ours)
    called = []
    for model in (eager, ours):
        names = []
        for name, part in model.named_modules():
            if not [*part.children()]:
                getattr(part, f"register_{kind}_hook")(lambda *_, name=name, names=names: names.append(name))
        model(**models.inputs(family)).loss.backward()
        called.append(set(names))
    assert called[0] and called[0] <= called[1]


@pytest.mark.parametrize("family", ("bert", "roberta"))
def test_feed_forward_networks_in_chunks(family):
    eager = models.make(family, chunk_size_feed_forward=3).eval()
    ours = copy.deepcopy(eager)
    tk.patch(ours)
    batch = {name: value[:, :6] for name, value in models.inputs(family, None, labels=False).items()}
    expected = eager(**batch).logits
    torch.testing.assert_close(ours(**batch).logits, expected, rtol=1e-4, atol=1e-5)


def test_the_loss_of_a_part_of_a_batch():
    eager, ours = pair("llama")
    batch = models.inputs("llama")
    for items in (7, torch.tensor(7)):
        mine, theirs = (model(**batch, num_items_in_batch=items).loss for model in (ours, eager))
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_what_cannot_be_exact_is_left_with_its_reason():
    report = tk.patch(reordered := models.make("gpt2", reorder_and_upcast_attn=True))
    assert {row.reason for row in report.left} == {"reorder_and_upcast_attn is set"}
    assert reordered.config._attn_implementation == "eager"
    batch = models.inputs("gpt2")
    torch.testing.assert_close(reordered(**batch).loss, models.make("gpt2", reorder_and_upcast_attn=True)(**batch).loss)
    crossed = tk.patch(models.make("gpt2", add_cross_attention=True))
    assert any("cross-attention" in row.reason for row in crossed.left)
    own = models.make("llama")
    own.loss_function = lambda **_: torch.zeros(())
    assert [row.reason for row in tk.patch(own).left] == ["the model has a loss function of its own"]
    weights = models.make("bert")
    weights.config.output_attentions = True
    assert "output_attentions is set" in tk.patch(weights).left[0].reason
    assert weights(**batch).attentions[0] is not None


DEEPSEEK = {**models.ENCODER, "kv_lora_rank": 16, "q_lora_rank": 16, "n_routed_experts": 4, "moe_intermediate_size": 16}
DEEPSEEK |= {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4, "n_group": 1}
DEEPSEEK |= {"topk_group": 1, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 4, "num_experts_per_tok": 2}
PEGASUS = {"vocab_size": models.VOCABULARY, "d_model": 32, "num_global_tokens": 2, "block_size": 4}
PEGASUS |= {f"{side}_{size}": count for side in ("encoder", "decoder") for size, count in models.SIDE.items()}


def of_kind(name, **sizes):
    """Eager attention, for evaluation."""
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    return kind._from_config(kind.config_class(**sizes, **models.TOKENS), attn_implementation="eager").eval()


def test_keys_chosen_for_each_query_are_refused():
    """By `patch`, which leaves the attention, and by the function that `attn_implementation` names."""
    eager = of_kind("DeepseekV32ForCausalLM", **DEEPSEEK)
    ours, batch = copy.deepcopy(eager), models.inputs("llama", None, labels=False)
    report = tk.patch(ours)
    attentions = {row.reason for row in report.left if row.name.endswith("self_attn")}
    assert report.patched and attentions == {"keys chosen for each query"}
    torch.testing.assert_close(ours(**batch).logits, eager(**batch).logits, rtol=1e-4, atol=1e-5)
    eager.set_attn_implementation("transformer_kernels")
    with pytest.raises(ValueError, match="keys chosen for each query"):
        eager(**batch)


@pytest.mark.parametrize("padding", ["left", None])
@pytest.mark.parametrize(
    ("name", "sizes"),
    [("PegasusXForConditionalGeneration", PEGASUS), ("GitModel", models.ENCODER | {"vision_config": models.VIT})],
)
def test_models_that_add_their_masks_to_the_scores(name, sizes, padding):
    """Layers without a flag for causality (Pegasus-X), or without the attention interface (GIT's text)."""
    eager = of_kind(name, **sizes)
    patched, chosen = copy.deepcopy(eager), copy.deepcopy(eager)
    tk.patch(patched)
    chosen.set_attn_implementation("transformer_kernels")
    batch = models.inputs("t5" if eager.config.is_encoder_decoder else "llama", padding, labels=False)
    expected = eager(**batch)[0]
    for ours in (patched, chosen):
        torch.testing.assert_close(ours(**batch)[0], expected, rtol=1e-4, atol=1e-5)


def test_softcapped_scores_match_eager():
    sizes = models.DECODER | {"head_dim": 8, "sliding_window": 5, "attn_logit_softcapping": 0.5}
    torch.manual_seed(0)
    config = transformers.Gemma2Config(**sizes, **models.TOKENS)
    eager = transformers.Gemma2ForCausalLM._from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in eager.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)  # large scores, which the cap changes
    ours = copy.deepcopy(eager)
    assert not tk.patch(ours).left
    batch = models.inputs("llama")
    mine, theirs = (models.run("llama", model, batch) for model in (ours, eager))
    for name, value in theirs.items():
        torch.testing.assert_close(mine[name], value, rtol=1e-4, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}")
    for layer in eager.model.layers:
        layer.self_attn.attn_logit_softcapping = None
    assert (models.run("llama", eager, batch)["logits"] - theirs["logits"]).abs().max() > 0.01


def test_segments_and_positions_of_bert():
    eager, ours = pair("bert")
    generator = torch.Generator().manual_seed(4)
    tokens = models.inputs("bert", None)["input_ids"]
    segments = torch.randint(0, 2, tokens.shape, generator=generator)
    places = torch.randint(0, 64, tokens.shape, generator=generator)
    for given in ({"token_type_ids": segments}, {"position_ids": places}, {"position_ids": places[:1]}):
        for extra in ({}, {"token_type_ids": segments}):
            mine, theirs = (model(tokens, **given | extra).logits for model in (ours, eager))
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    embeds = eager.bert.embeddings.word_embeddings(tokens)
    mine, theirs = (model(inputs_embeds=embeds, token_type_ids=segments).logits for model in (ours, eager))
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    with pytest.raises(IndexError):
        ours(tokens, token_type_ids=segments + 1)


def test_the_report_is_a_table():
    text = str(tk.patch(models.make("bert"), backend="torch"))
    lines = text.splitlines()
    assert lines[0].split() == ["module", "class", "computed", "by", "count"]
    assert any(line.split() == ["bert.encoder.layer.*.output", "BertOutput", "add_layer_norm", "2"] for line in lines)
    assert lines[-1] == "17 modules patched, 0 not patched; backend 'torch'"


@pytest.mark.parametrize("family", ("bert", "roberta", "distilbert"))
def test_the_padding_rows_of_tables_get_no_gradient(family):
    """Even where a padding token is attended to, as without a mask."""
    tokens = models.inputs(family, None)["input_ids"]
    tokens[:, 3] = models.TOKENS["pad_token_id"]
    gradients = []
    for model in pair(family):
        model(tokens, labels=tokens).loss.backward()
        tables = (module for module in model.modules() if isinstance(module, torch.nn.Embedding))
        gradients.append([table.weight.grad for table in tables if table.padding_idx is not None])
    for theirs, mine in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


def test_unpatch_returns_the_configuration_itself():
    """The original object, with later changes except the name of the attention."""
    config = transformers.BertConfig(**models.ENCODER)
    ours, other = transformers.BertModel(config), transformers.BertModel(config)
    before = [module.config for module in ours.modules() if hasattr(module, "config")]
    tk.patch(ours)
    tk.patch(ours, backend="torch")
    assert ours.config is not config and ours.config is ours.encoder.config
    ours.config.layer_norm_eps = 0.5
    tk.unpatch(ours)
    after = [module.config for module in ours.modules() if hasattr(module, "config")]
    assert len(before) > 3 and all(x is y for x, y in zip(after, before, strict=True))
    assert ours.config is config is other.config
    assert (config.layer_norm_eps, config._attn_implementation) == (0.5, "sdpa")
    tk.patch(ours)
    twin = copy.deepcopy(ours)
    twin.config = own = transformers.BertConfig(**models.ENCODER)
    for model in (twin, ours):
        tk.unpatch(model)
        assert not [name for module in model.modules() for name in vars(module) if "patch" in name]
    assert ours.config is config and twin.config is own and twin.encoder.config is not config


@pytest.mark.parametrize("family", ["llama", "modernbert"])
def test_the_loss_ignores_the_index_that_the_caller_names(family):
    if family == "llama":
        eager, ours = pair("llama")
    else:
        torch.manual_seed(0)
        config = transformers.ModernBertConfig(**models.ENCODER, **models.TOKENS)
        eager = transformers.ModernBertForMaskedLM._from_config(config, attn_implementation="eager")
        tk.patch(ours := copy.deepcopy(eager))
    logits = torch.randn(2, 9, models.VOCABULARY)
    labels = torch.randint(5, 8, (2, 9), generator=torch.Generator().manual_seed(1))
    for options in ({"ignore_index": 5}, {"ignore_index": 6, "num_items_in_batch": 4}, {}):
        mine, theirs = (
            model.loss_function(logits, labels, vocab_size=models.VOCABULARY, **options) for model in (ours, eager)
        )
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_layers_with_and_without_a_window(family):
    """Without padding, full layers have no mask, and ignore the window of the configuration."""
    types = ["full_attention", "sliding_attention"]
    options = {"sliding_window": 3, "use_sliding_window": True, "max_window_layers": 1, "layer_types": types}
    eager, ours = pair(family, **options)
    batch = models.inputs(family, None)
    torch.testing.assert_close(ours(**batch).logits, eager(**batch).logits, rtol=1e-4, atol=1e-5)
    full = models.make(family)
    assert (full(**batch).logits - eager(**batch).logits).abs().max() > 0.01, "the window matters"


def test_each_row_is_rotated_by_its_own_positions():
    eager, ours = pair("llama")
    tokens = models.inputs("llama", None, labels=False)["input_ids"]
    places = torch.arange(tokens.shape[1]) * torch.arange(1, len(tokens) + 1)[:, None]
    mine, theirs = (model(tokens, position_ids=places).logits for model in (ours, eager))
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_a_decoder_with_a_cache_goes_on_counting_positions():
    torch.manual_seed(0)
    config = transformers.BertConfig(**models.ENCODER, **models.TOKENS, is_decoder=True)
    eager = transformers.BertLMHeadModel._from_config(config, attn_implementation="eager").eval()
    tk.patch(ours := copy.deepcopy(eager))
    tokens = models.inputs("bert", None, labels=False)["input_ids"]
    name = "cache" if "cache" in inspect.signature(eager.forward).parameters else "past_key_values"
    outcomes = []
    for model in (ours, eager):
        cache = transformers.DynamicCache(config=model.config)
        model(tokens[:, :7], use_cache=True, **{name: cache})
        outcomes.append(model(tokens[:, 7:], use_cache=True, **{name: cache}).logits)
    torch.testing.assert_close(*outcomes, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(outcomes[0], eager(tokens).logits[:, 7:], rtol=1e-4, atol=1e-5)


SMALL = {**models.ENCODER, "pad_token_id": 1}
NEO = {"vocab_size": 97, "hidden_size": 32, "num_layers": 2, "attention_types": [[["global", "local"], 1]]}
LEFT = {
    "DebertaModel": (SMALL, {"DisentangledSelfAttention"}),
    "MPNetModel": (SMALL, {"MPNetSelfAttention"}),
    "GPTNeoForCausalLM": (NEO | {"num_heads": 4, "max_position_embeddings": 64}, {"GPTNeoSelfAttention"}),
    "BloomForCausalLM": ({"vocab_size": 97, "hidden_size": 32, "n_layer": 2, "n_head": 4}, {"BloomAttention"}),
}


@pytest.mark.parametrize("name", LEFT)
def test_attention_that_is_left_is_in_the_report(name):
    sizes, kinds = LEFT[name]
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**sizes))
    report = tk.patch(model)
    assert kinds <= {row.kind for row in report.left}
    assert all(row.reason for row in report.left)
    assert len({row.name for row in report.rows}) == len(report.rows)


def test_hand_written_modules_are_in_the_report():
    class CausalSelfAttention(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.c_attn, self.norm = torch.nn.Linear(8, 24), torch.nn.LayerNorm(8)

        def forward(self, x):
            q, k, v = self.c_attn(self.norm(x)).chunk(3, dim=-1)
            return (q @ k.mT).softmax(-1) @ v

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.attn, self.mlp, self.norm = CausalSelfAttention(), MLP(), torch.nn.RMSNorm(8)

    class MLP(torch.nn.Sequential):
        def __init__(self):
            super().__init__(torch.nn.Linear(8, 8), torch.nn.SiLU(), torch.nn.Dropout())

    model = torch.nn.ModuleDict({"h": torch.nn.ModuleList([Block()]), "loss": torch.nn.CrossEntropyLoss()})
    report = tk.patch(model)
    assert {row.name: row.kind for row in report.left} == {
        "h.0.attn": "CausalSelfAttention",
        "h.0.mlp.1": "SiLU",
        "loss": "CrossEntropyLoss",
    }
    assert [row.name for row in report.patched] == ["h.0.attn.norm", "h.0.norm"]
    assert not tk.patch(torch.nn.TransformerEncoderLayer(16, 2, activation=torch.nn.SiLU())).left


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_a_layer_takes_its_cache_by_the_name_of_every_release(name):
    """5.24 renamed `past_key_values` to `cache`."""
    eager, ours = pair("llama")
    layers = [model.eval().model.layers[0] for model in (eager, ours)]
    if name not in inspect.signature(layers[0].forward).parameters and name == "cache":
        pytest.skip("the name is newer than the installed transformers")
    x = torch.randn(1, models.LENGTH, 32)
    angles = eager.model.rotary_emb(x, torch.arange(models.LENGTH)[None])
    outcomes = []
    for layer in layers:
        cache = transformers.DynamicCache()
        for part in (slice(0, 7), slice(7, None)):
            tables = tuple(table[:, part] for table in angles)
            mask = torch.ones(models.LENGTH, models.LENGTH).tril().bool()[None, None, part, : part.stop]
            bias = torch.zeros(mask.shape).masked_fill(~mask, -1e30)
            out = layer(x[:, part], position_embeddings=tables, attention_mask=bias, **{name: cache})
        assert cache.get_seq_length() == models.LENGTH
        outcomes.append(out)
    torch.testing.assert_close(*outcomes, rtol=1e-4, atol=1e-5)


def test_labels_after_two_positional_arguments():
    """T5 derives the decoder's tokens from the labels unless the third argument gives them."""
    plain, batch = models.make("t5"), models.inputs("t5")
    ours = copy.deepcopy(plain)
    tk.patch(ours)
    given = batch["input_ids"], batch["attention_mask"]
    for more in ((), (batch["input_ids"],)):
        expected, got = (each(*given, *more, labels=batch["labels"]) for each in (plain, ours))
        torch.testing.assert_close(got.loss, expected.loss, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(got.logits, expected.logits, rtol=1e-4, atol=1e-4)


def leaves(model):
    """The leaf modules, by the class of their parent and their name in it."""
    found = {}
    for parent in model.modules():
        for name, part in parent.named_children():
            if not list(part.children()):
                found.setdefault((type(parent).__name__, "" if name.isdigit() else name), []).append(part)
    return found


def halve(self, kind, *args, **kwargs):
    result = kind.forward(self, *args, **kwargs)
    return tuple(0.5 * each for each in result) if isinstance(result, tuple) else 0.5 * result


@pytest.mark.parametrize("family", ONE_OF_EACH)
def test_a_submodule_with_its_own_forward_is_called(family):
    """Each leaf module in turn becomes a subclass with another forward, which the patched parent must not bypass."""
    plain, batch = models.make(family).eval(), models.inputs(family)
    for where in leaves(plain):
        halved = copy.deepcopy(plain)
        for part in leaves(halved)[where]:
            kind = type(part)
            part.__class__ = type("Halved", (kind,), {"forward": functools.partialmethod(halve, kind)})
        ours = copy.deepcopy(halved)
        tk.patch(ours, backend="torch")  # "auto" may leave small calls to PyTorch
        with torch.no_grad():
            expected, got = halved(**batch), ours(**batch)
        difference = ((got.logits - expected.logits) * models.real(family, batch)).abs().max()
        assert difference < 1e-4 and (got.loss - expected.loss).abs() < 1e-5, f"{where}: {difference}"
