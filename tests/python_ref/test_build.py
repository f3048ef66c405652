"""The presets are the documented models, and can be varied, copied and compared."""

import copy
import pickle

import pytest
import torch

import python_ref


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("char_gpt", 807_745),
        ("imdb_bert", 16_092_674),
        ("gpt2", 124_439_808),
        ("llama", 134_515_008),
        ("vit_base", 86_567_656),
    ],
)
def test_preset_has_exactly_as_many_parameters(name, parameters):
    with torch.device("meta"):
        model = python_ref.build(name)
    assert model.num_parameters() == parameters


def test_override_replaces_a_field():
    model = python_ref.build("char_gpt", vocab_size=96, dropout=0.0)
    assert model(torch.zeros(1, 5, dtype=torch.int64)).shape == (1, 5, 96)
    assert model.config.dropout == 0.0


def test_width_override_takes_the_feed_forward_network_along():
    assert python_ref.build("char_gpt", width=64).blocks[0].feed_forward.up.weight.shape == (256, 64)


def test_unknown_override_names_the_fields():
    with pytest.raises(
        TypeError, match=r"char_gpt has no field hidden, depth; its fields are vocab_size, context, width"
    ):
        python_ref.build("char_gpt", hidden=128, depth=4)


def test_unknown_preset_names_the_presets():
    with pytest.raises(
        ValueError,
        match="one of 'char_gpt', 'deepseek', 'gpt2', 'imdb_bert', 'imdb_mlm', 'llama', 'swin_digits', "
        "'swin_tiny', 'translator', 'vit_base', 'vit_digits'; got 'gpt3'",
    ):
        python_ref.build("gpt3")


def test_same_seed_gives_the_same_weights():
    first, second, other = (build_seeded(seed) for seed in (0, 0, 1))
    assert all(torch.equal(a, b) for a, b in zip(first.values(), second.values(), strict=True))
    assert not torch.equal(first["embedding.tokens.weight"], other["embedding.tokens.weight"])


def build_seeded(seed):
    torch.manual_seed(seed)
    return python_ref.build("char_gpt").state_dict()


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"]
)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_copies_compute_the_same_and_share_nothing(duplicate, tied):
    model = python_ref.build("char_gpt", tied=tied, layers=1).eval()
    twin = duplicate(model)
    tokens = torch.arange(10).view(1, 10)
    assert torch.equal(model(tokens), twin(tokens))
    assert twin.ops is python_ref.ops
    twin.embedding.tokens.weight.data.zero_()
    assert model.embedding.tokens.weight.abs().sum() > 0


def test_state_dict_holds_each_parameter_once():
    model = python_ref.build("gpt2", vocab_size=50, width=24, heads=2, layers=1)
    state = model.state_dict()
    assert sum(tensor.numel() for tensor in state.values()) == model.num_parameters()
    assert len({tensor.data_ptr() for tensor in state.values()}) == len(state)


def test_layers_call_the_operations_they_were_given():
    class Counting:
        def __init__(self):
            self.calls = []

        def __getattr__(self, name):
            def call(*args, **kwargs):
                self.calls.append(name)
                return getattr(python_ref.ops, name)(*args, **kwargs)

            return call

    ops = Counting()
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    python_ref.build("gpt2", ops=ops, vocab_size=50, width=24, heads=2, layers=2)(tokens)
    attention = ["linear", "packed_attention", "linear", "add_layer_norm"]
    block = [*attention, "linear", "linear"]
    assert ops.calls == ["embedding", "layer_norm", *block, "add_layer_norm", *block, "add_layer_norm", "linear"]
    ops.calls.clear()
    python_ref.build("char_gpt", ops=ops, layers=2)(tokens)
    block = [*attention, "linear", "linear", "add_layer_norm"]
    assert ops.calls == ["embedding", *block, *block, "linear"]
