"""DeepSeek's model gives the logits and gradients of transformers' DeepseekV3, and its cache changes nothing."""

import re
import warnings

import pytest
import torch
from torch.nn import functional as F

import python_ref
import transformer_kernels as tk
from python_ref.deepseek import MixtureOfExperts
from transformer_kernels.pretrained.generation import Sampling, generate_many

SMALL = {
    "vocab_size": 29,
    "context": 24,
    "width": 32,
    "layers": 3,
    "heads": 2,
    "latent": 12,
    "content_width": 8,
    "rotary_width": 4,
    "value_dim": 10,
    "ffn_width": 40,
    "experts": 8,
    "experts_per_token": 3,
    "expert_width": 12,
    "norm_eps": 1e-6,
}
CONFIGS = {
    "low-rank queries, groups": {
        "query_latent": 20,
        "expert_groups": 4,
        "groups_per_token": 2,
        "expert_scale": 2.5,
        "shared_experts": 2,
    },
    "full queries": {},
}
BACKENDS = ["reference", "torch", "cpu", *(pytest.param(name, marks=pytest.mark.slow) for name in ("triton", "cuda"))]
NAMES = {
    r"embed_tokens": "embedding.tokens",
    r"^lm_head\.weight": "head_weight",
    r"^model\.norm": "final_norm",
    r"(model\.)?layers\.(\d+)": r"blocks.\2",
    r"self_attn\.q_a_proj": "attention.query_down",
    r"self_attn\.q_a_layernorm": "attention.query_norm",
    r"self_attn\.q(_b)?_proj": "attention.query_up",
    r"self_attn\.kv_a_proj_with_mqa": "attention.down",
    r"self_attn\.kv_a_layernorm": "attention.latent_norm",
    r"self_attn\.kv_b_proj": "attention.up",
    r"self_attn\.o_proj": "attention.out",
    r"input_layernorm": "attention_norm",
    r"post_attention_layernorm": "feed_forward_norm",
    r"mlp\.gate\.weight": "feed_forward.router",
    r"mlp\.gate\.e_score_correction_bias": "feed_forward.balance",
    r"mlp\.experts\.gate_up_proj": "feed_forward.up",
    r"mlp\.experts\.down_proj": "feed_forward.down",
    r"mlp\.shared_experts\.": "feed_forward.shared.",
    r"mlp\.": "feed_forward.",
    r"down_proj": "down",
    r"^mtp_block": "block",
    r"^enorm": "token_norm",
    r"^hnorm": "hidden_norm",
    r"^eh_proj": "merge",
    r"^post_norm": "final_norm",
    r"^model\.": "",
}


def make(backend="torch", **fields):
    torch.manual_seed(0)
    model = tk.build("deepseek", backend, **{**SMALL, **fields})
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    for layer in model.modules():
        if isinstance(layer, MixtureOfExperts):
            torch.nn.init.normal_(layer.balance, std=0.1)
    return model.eval()


def theirs(config):
    """transformers' model of the same sizes."""
    transformers = pytest.importorskip("transformers", minversion="5.0")
    torch.manual_seed(0)
    made = transformers.DeepseekV3Config(
        vocab_size=config.vocab_size,
        hidden_size=config.width,
        intermediate_size=config.ffn_width,
        moe_intermediate_size=config.expert_width,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.heads,
        n_shared_experts=config.shared_experts,
        n_routed_experts=config.experts,
        routed_scaling_factor=config.expert_scale,
        kv_lora_rank=config.latent,
        q_lora_rank=config.query_latent,
        qk_rope_head_dim=config.rotary_width,
        qk_nope_head_dim=config.content_width,
        v_head_dim=config.value_dim,
        n_group=config.expert_groups,
        topk_group=config.groups_per_token,
        num_experts_per_tok=config.experts_per_token,
        first_k_dense_replace=config.dense_layers,
        rms_norm_eps=config.norm_eps,
        attn_implementation="eager",
        experts_implementation="eager",
    )
    return transformers.DeepseekV3ForCausalLM(made).eval()


def ours(tensors):
    """Their tensors under our names, gate and up projection as one."""
    found, gates = {}, {}
    for name, tensor in tensors.items():
        for pattern, wanted in NAMES.items():
            name = re.sub(pattern, wanted, name)
        if name.endswith(("gate_proj.weight", "up_proj.weight")):
            stem, part = re.fullmatch(r"(.*\.)(gate|up)_proj\.weight", name).groups()
            gates.setdefault(stem, {})[part] = tensor
        else:
            found[name] = tensor
    return found | {f"{stem}up.weight": torch.cat((parts["gate"], parts["up"])) for stem, parts in gates.items()}


def gradients(model):
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def compare(got, expected):
    assert got.keys() == expected.keys()
    for name, wanted in expected.items():
        scale = max(1.0, wanted.abs().max().item())
        assert (got[name] - wanted).abs().max().item() <= 1e-5 * scale, name


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("fields", CONFIGS.values(), ids=CONFIGS)
def test_logits_and_gradients_are_those_of_transformers(fields, backend):
    model = make(backend, **fields, predictions=0)
    other = theirs(model.config)
    for parameter in other.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    for name, buffer in other.named_buffers():
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(buffer, std=0.3)
    model.load_state_dict(ours(other.state_dict()))
    tokens = torch.randint(29, (2, 17))
    expected, logits = other(tokens).logits, model(tokens)
    assert (logits - expected).abs().max() <= 1e-5 * max(1.0, expected.abs().max().item())
    F.cross_entropy(expected.flatten(0, 1), tokens.roll(-1, 1).flatten()).backward()
    model.loss(tokens, tokens.roll(-1, 1)).backward()
    compare(gradients(model), ours(gradients(other)))


def test_further_predictions_are_those_of_transformers():
    modeling = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    layers = pytest.importorskip("transformers.modeling_layers")
    model = make(predictions=2)
    other = theirs(model.config)
    tokens = torch.randint(29, (2, 9))
    hidden = expected = model.hidden_states(tokens[:, :-1]).detach()
    states = model.further(hidden, tokens[:, 1:])
    assert [tuple(state.shape) for state in states] == [(2, 7, 32), (2, 6, 32)]
    for depth, (predictor, state) in enumerate(zip(model.predictors, states, strict=True), 1):
        layer = layers.MtpLayer(other.config, modeling.DeepseekV3DecoderLayer, modeling.DeepseekV3RMSNorm, 2).eval()
        weights, wanted = predictor.state_dict(), ours(layer.state_dict())
        assert weights.keys() == wanted.keys()
        with torch.no_grad():
            for name, tensor in layer.state_dict().items():  # ours into theirs
                (mine,) = ours({name: tensor}) if "shared_experts" not in name else (None,)
                if mine is not None:
                    tensor.copy_(weights[mine])
            gate, up = weights["block.feed_forward.shared.up.weight"].chunk(2)
            shared = layer.mtp_block.mlp.shared_experts
            shared.gate_proj.weight.copy_(gate)
            shared.up_proj.weight.copy_(up)
            shared.down_proj.weight.copy_(weights["block.feed_forward.shared.down.weight"])
            known = tokens[:, depth:-1]
            position_ids = torch.arange(known.shape[1])[None]
            expected = layer(
                model.embedding.tokens(known),
                expected[:, :-1],
                position_embeddings=other.model.rotary_emb(expected, position_ids),
                attention_mask=torch.full((known.shape[1],) * 2, -torch.inf).triu(1)[None, None],
                position_ids=position_ids,
                past_key_values=None,
            )
        torch.testing.assert_close(state, expected, rtol=1e-5, atol=1e-5)


def test_loss_in_training_adds_the_further_predictions():
    model = make(predictions=2, prediction_weight=0.4, balance_rate=0.0)
    tokens = torch.randint(29, (2, 9))
    with torch.no_grad():
        hidden = model.hidden_states(tokens[:, :-1])
        further = [
            model.loss_of(state, tokens[:, 2 + n :], 0.0)
            for n, state in enumerate(model.further(hidden, tokens[:, 1:]))
        ]
        main = model.loss(tokens[:, :-1], tokens[:, 1:])
        assert model.train().loss(tokens[:, :-1], tokens[:, 1:]).item() == pytest.approx(
            main.item() + 0.2 * sum(further).item(), rel=1e-6
        )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("fields", [*CONFIGS.values(), {"window": 5}], ids=[*CONFIGS, "window"])
@pytest.mark.parametrize("steady", [False, True])
def test_cache_of_latents_gives_the_logits_of_the_whole_sequence(fields, backend, steady):
    model = make(backend, **fields)
    tokens = torch.randint(29, (2, 20))
    real = torch.arange(8) >= torch.tensor([[0], [3]])
    cache = model.new_cache(2, 20, steady=steady)
    parts = [model(tokens[:, :8], real, cache=cache)]
    parts += [model(part, cache=cache) for part in tokens[:, 8:].split([1, 1, 4, 1, 1, 4], dim=1)]
    got = torch.cat(parts, dim=1)
    for row, first in enumerate((0, 3)):
        expected = model(tokens[row : row + 1, first:])[0]
        torch.testing.assert_close(got[row, first:], expected, rtol=2e-5, atol=2e-5)


def test_cache_holds_one_latent_and_one_rotated_key_per_token():
    model = make()
    assert model.new_cache(1, 24).nbytes == 3 * 24 * (12 + 4) * 4
    every_head = 3 * 24 * 2 * (8 + 4 + 10) * 4
    assert every_head / model.new_cache(1, 24).nbytes == 2.75


@pytest.mark.parametrize("backend", ["reference", "torch", "cpu"])
def test_generation_with_the_cache_is_generation_without(backend):
    model = make(backend, context=40)
    prompt = torch.randint(29, (1, 5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a step of one token has fixed shapes: it is recorded where steps are
        steps = list(
            generate_many(
                model, [prompt[0].tolist()], 30, Sampling(temperature=0.0), context=40, device=torch.device("cpu")
            )
        )
    tokens = prompt
    with torch.no_grad():
        for _ in range(30):
            tokens = torch.cat((tokens, model(tokens)[:, -1:].argmax(-1)), dim=1)
    assert [choices[0].token for choices in steps] == tokens[0, 5:].tolist()


def test_few_pairs_and_many_pairs_give_the_same():
    model = make(expert_groups=2, groups_per_token=1)
    experts = model.blocks[1].feed_forward
    rows = torch.randn(1, 40, 32)
    one_by_one = torch.cat([experts(row) for row in rows.split(1, dim=1)], dim=1)  # 3 pairs at a time, 8 experts
    torch.testing.assert_close(experts(rows), one_by_one, rtol=1e-5, atol=1e-5)


def test_bias_balances_the_experts_without_a_loss():
    experts = make(experts_per_token=2, balance_rate=0.02).blocks[1].feed_forward.train()
    experts.balance.zero_()
    rows = torch.randn(512, 32) + torch.randn(32)  # a common direction: some experts are preferred by all tokens

    def share():
        return experts.route(rows)[1].flatten().bincount(minlength=8).max().item() / (512 * 2 / 8)

    before = share()
    assert before > 2.0
    for _ in range(150):
        experts(rows)
    assert share() < 1.2
    experts.eval()
    bias = experts.balance.clone()
    experts(rows)
    assert torch.equal(experts.balance, bias)


def test_of_deepseek_v3_these_sizes_have_671_billion_parameters():
    with torch.device("meta"):
        model = python_ref.build(
            "deepseek",
            vocab_size=129_280,
            context=4096,
            width=7168,
            layers=61,
            heads=128,
            latent=512,
            query_latent=1536,
            content_width=128,
            rotary_width=64,
            value_dim=128,
            ffn_width=18_432,
            dense_layers=3,
            experts=256,
            experts_per_token=8,
            expert_width=2048,
            expert_groups=8,
            groups_per_token=4,
            expert_scale=2.5,
            predictions=0,
        )
    assert model.num_parameters() == 671_026_404_352
    active = (model.flops_per_token(1, training=False) - 61 * 2 * 128 * (192 + 128)) / 2
    assert 36e9 < active < 38e9  # the report's 37 billion, here without the embedding


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"norm": "pre"}, "norm must be 'rms'; got 'pre'"),
        ({"rotary_width": 3}, "rotary_width must be even; got 3"),
        ({"expert_groups": 3}, "expert_groups must divide experts"),
        ({"expert_groups": 4, "groups_per_token": 1}, "experts_per_token must be at most the experts of"),
        ({"latent": 0}, "latent must be at least 1; got 0"),
        ({"predictions": -1}, "predictions must not be negative; got -1"),
    ],
)
def test_sizes_that_make_no_model_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        python_ref.preset("deepseek", **{**SMALL, **fields})
