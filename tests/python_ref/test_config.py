"""A configuration that makes no model is refused when it is made, in words."""

import math

import pytest

from python_ref import BERTConfig, GPTConfig

SMALL = {"vocab_size": 11, "context": 8, "width": 12, "layers": 1, "heads": 3}


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("heads", 5, "GPTConfig: the hidden size must be divisible by the number of heads; got width=12 with heads=5"),
        ("kv_heads", 2, "GPTConfig: kv_heads must divide heads; got kv_heads=2 with heads=3"),
        ("layers", 0, "GPTConfig: layers must be at least 1; got 0"),
        ("vocab_size", -3, "GPTConfig: vocab_size must be at least 1; got -3"),
        (
            "activation",
            "swish",
            r"activation must be one of \('relu', 'gelu', 'gelu_tanh', 'swiglu', 'geglu'\); got 'swish'",
        ),
        ("norm", "sandwich", r"norm must be one of \('pre', 'post', 'rms'\); got 'sandwich'"),
        ("positions", "alibi", r"positions must be one of \('learned', 'sinusoidal', 'rotary'\); got 'alibi'"),
        ("window", 0, "GPTConfig: window must be at least 1; got 0"),
        ("window_pattern", "LXG", 'GPTConfig: window_pattern must be letters "L" and "G"; got \'LXG\''),
        ("window_pattern", "", 'GPTConfig: window_pattern must be letters "L" and "G"; got \'\''),
        ("rotary_base", -1.0, "GPTConfig: rotary_base must be positive and finite; got -1.0"),
        (
            "rotary_scaling",
            (8.0, 1.0, 4.0),
            r"rotary_scaling must be \(factor, low, high, context\); got \(8.0, 1.0, 4",
        ),
        ("residual_dropout", 1.5, r"residual_dropout must be in \[0, 1\]; got 1.5"),
        ("ffn_dropout", -0.5, r"ffn_dropout must be in \[0, 1\]; got -0.5"),
        ("dropout", 1.5, r"dropout must be in \[0, 1\]; got 1.5"),
        ("dropout", math.nan, r"dropout must be in \[0, 1\]; got nan"),
        ("norm_eps", 0.0, "norm_eps must be positive and finite; got 0.0"),
        ("init_std", math.inf, "init_std must be positive and finite; got inf"),
    ],
)
def test_bad_value_is_refused(field, value, message):
    with pytest.raises(ValueError, match=message):
        GPTConfig(**{**SMALL, field: value})


@pytest.mark.parametrize("fields", [{"rotary_width": 3}, {"rotary_width": 6}, {"width": 15, "heads": 3}])
def test_rotated_width_that_is_odd_or_wider_than_a_head_is_refused(fields):
    with pytest.raises(ValueError, match="the rotated width must be even and at most the width of a head; got"):
        GPTConfig(**{**SMALL, "positions": "rotary", **fields})


def test_layers_take_their_windows_from_the_pattern():
    config = GPTConfig(**{**SMALL, "window": 4, "window_pattern": "LLG"})
    assert [config.window_of(layer) for layer in range(5)] == [4, 4, None, 4, 4]


def test_dropout_of_a_place_goes_before_that_of_all():
    config = GPTConfig(**{**SMALL, "dropout": 0.2, "attention_dropout": 0.0})
    assert [config.dropout_on(place) for place in ("embedding", "attention", "residual")] == [0.2, 0.0, 0.2]


@pytest.mark.parametrize("value", [2.0, "4", True])
def test_size_that_is_no_integer_is_refused(value):
    with pytest.raises(TypeError, match="GPTConfig: layers must be an integer; got"):
        GPTConfig(**{**SMALL, "layers": value})


@pytest.mark.parametrize("value", ["0.1", None])
def test_number_that_is_no_number_is_refused(value):
    with pytest.raises(TypeError, match="GPTConfig: dropout must be a number; got"):
        GPTConfig(**{**SMALL, "dropout": value})


@pytest.mark.parametrize(("field", "value"), [("classes", 0), ("segments", -1)])
def test_bad_head_is_refused(field, value):
    with pytest.raises(ValueError, match=f"BERTConfig: {field} must be at least 1; got {value}"):
        BERTConfig(**{**SMALL, field: value})
