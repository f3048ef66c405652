"""Document 000: the numbers of docs/corrections.md, computed from the inputs that the document prints."""

import math

import pytest
import torch

import python_ref
from python_ref import ops
from tests.seeds import inputs_000 as given
from tests.seeds.page import corrections, shown, tables
from transformer_kernels import ops as fused
from transformer_kernels.training.data.tokenizers import Gpt2Tokenizer

WORDS = ("The", "next", "day", "is", "bright")


def chain():
    """Listings 1.4 to 1.7 and the causal rows, by the reference, from X and the printed weights."""
    q, k, v = (given.X @ weight for weight in (given.W_QUERY, given.W_KEY, given.W_VALUE))
    q, k, v = (each.view(1, 1, 5, 4) for each in (q, k, v))
    computed = {"queries": q, "keys": k, "values": v, "scores": q @ k.mT}
    for prefix, causal in (("", False), ("causal ", True)):
        computed[f"{prefix}weights"] = ops.attention_weights(q, k, causal=causal)
        computed[f"{prefix}context"] = ops.attention(q, k, v, causal=causal)
    return {name: each[0, 0] for name, each in computed.items()}


def attended(weights, *, digits=1):
    """Shares of attention, largest first: "36.1 % bright, 25.9 % is"."""
    pairs = sorted(zip((100 * weights).tolist(), WORDS, strict=True), reverse=True)
    return ", ".join(f"{share:.{digits}f} % {word}" for share, word in pairs)


def largest_differences():
    computed = chain()
    printed = {"queries": given.QUERIES, "keys": given.KEYS, "values": given.VALUES}
    return ", ".join(f"{(computed[name] - each).abs().max():.2f} ({name})" for name, each in printed.items())


def causal_weights_of_the_arithmetic_table():
    """Listing 1.12 from the printed table of 1.11: 0.5 more for each key, 0.25 more for each query."""
    scores = 0.5 + 0.5 * torch.arange(5.0, dtype=torch.float64) + 0.25 * torch.arange(5.0).unsqueeze(1)
    return fused.softmax(scores, causal=True)


def projection(seed=123):
    """Listing 1.3: what its three calls of randn draw."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(8, 4, generator=generator) for _ in range(3)]


def heads():
    """Listings 1.15 to 1.19: scores, weights and context of two heads."""
    generator = torch.Generator().manual_seed(123)
    weights = [torch.randn(6, 6, generator=generator).double() for _ in range(3)]
    q, k, v = ((given.X_OF_HEADS @ weight).view(1, 3, 2, 3).transpose(1, 2) for weight in weights)
    return q @ k.mT, ops.attention_weights(q, k), ops.attention(q, k, v).transpose(1, 2).reshape(3, 6)


def classifier(layers):
    with torch.device("meta"):
        model = python_ref.build("imdb_bert", width=256, layers=layers, heads=4, context=256)
    return f"{model.num_parameters():,}"


def cycles(index, length=1024, width=768):
    period = 2 * math.pi * 10_000 ** (2 * index / width)
    return f"period {period:,.1f}" + f", {length / period:.2f} cycles"


ROWS = {  # by the first cell of the page: what the last cell must contain
    "1.2, width of the output": lambda: [str(given.W_QUERY.shape[1])],
    "1.3, row 0 of W_query": lambda: [shown(projection()[0][0])],
    "1.4, row 0 of the queries": lambda: [shown(chain()["queries"][0]), largest_differences()],
    "1.5, row 0": lambda: [
        shown((given.QUERIES @ given.KEYS.T)[0]),
        f"{(given.QUERIES @ given.KEYS.T - given.SCORES).abs().max():.2f}",
    ],
    "1.6, row 0": lambda: [shown(ops.softmax(given.SCORES / 2)[0])],
    "1.7, row 0": lambda: [shown((given.WEIGHTS @ given.VALUES)[0])],
    'before 1.5, scores of "next"': lambda: [shown(chain()["scores"][1])],
    'after 1.5, shares of "next"': lambda: [
        attended(ops.softmax(given.SCORES)[1]),
        attended(ops.softmax(given.table("11.0 10.2 10.1 10.4 11.2"))[0]),
    ],
    'after 1.6, shares of "day"': lambda: [attended(given.WEIGHTS[2])],
    "softmax of 1, 2, 3, 6: largest over smallest": lambda: [f"{math.exp(5):.1f}"],
    "1.9, triangle of ones": lambda: [shown(torch.ones(3, 3).tril(), 0)],
    "1.11, row 0": lambda: [shown(given.SCORES[0] / 2)],
    "1.12, rows 1 and 4": lambda: [shown(causal_weights_of_the_arithmetic_table()[[1, 4]])],
    "1.13, row 3 of the context": lambda: [shown((given.DROPPED @ given.VALUES)[3])],
    "1.13, sums of the rows": lambda: [shown(given.DROPPED.sum(1))],
    "1.14, set_printoptions": lambda: ["`sci_mode=False`"],
    "1.18, weights of head 0": lambda: [shown(heads()[1][0, 0], 0), shown(heads()[0][0, 0, 0], 2)],
    "1.19, each row": lambda: [shown(heads()[2][0])],
    "1.36, heads": lambda: [f"{256 / 6:.2f}", classifier(4), classifier(6)],
    "1.38, updates per epoch": lambda: [f"{math.ceil(25_000 / 16):,}", f"{100 * math.ceil(25_000 / 16):,}"],
    "1.38, mean loss of a batch": lambda: [f"{1078.51 / math.ceil(25_000 / 16):.3f}", f"{285.67 / 1563:.3f}"],
    "1.38 and 1.39, LayerNorm": lambda: ["dropout only"],
    "positions, i = 150 of width 768": lambda: [cycles(150)],
    "positions, i = 250": lambda: [cycles(250), *far_codes(250)],
    "end of text of GPT-2": lambda: ["`<\\|endoftext\\|>`", "50256"],
}


def far_codes(index):
    """Sine and cosine of one frequency at position 1,023."""
    sine, cosine = ops.sinusoidal_positions(1024, 768, dtype=torch.float64)[-1, 2 * index : 2 * index + 2].tolist()
    return [f"sine {sine:.2f}", f"cosine {cosine:.2f}"]


@pytest.mark.parametrize("row", ROWS)
def test_the_page_shows_the_right_number(row):
    printed, correct = corrections("000")[row]
    assert printed and all(text in correct for text in ROWS[row]()), (ROWS[row](), correct)
    assert printed != correct


def test_each_row_of_the_page_is_computed():
    assert list(corrections("000")) == list(ROWS)


def on_the_page():
    return {name: given.table(" / ".join(rows)) for name, rows in tables("000")[1].items()}


def test_chain_of_listings_1_4_to_1_7():
    assert {name: shown(rows) for name, rows in on_the_page().items()} == {
        name: shown(rows) for name, rows in chain().items()
    }


@pytest.mark.parametrize("causal", [False, True])
def test_fused_attention_gives_the_same_chain(causal):
    q, k, v = (chain()[name].view(1, 1, 5, 4) for name in ("queries", "keys", "values"))
    wanted = on_the_page()["causal context" if causal else "context"]
    torch.testing.assert_close(fused.attention(q, k, v, causal=causal)[0, 0], wanted, rtol=0, atol=6e-5)


def test_printed_projections_are_partly_another_draw():
    """1.3: the first two columns of the three printed matrices are three draws of rand(8, 2) with seed 123."""
    generator = torch.Generator().manual_seed(123)
    for printed in (given.W_QUERY, given.W_KEY, given.W_VALUE):
        drawn = torch.rand(8, 2, generator=generator)
        torch.testing.assert_close(printed[:, :2].float(), drawn, rtol=0, atol=6e-5)


def test_what_listing_1_3_draws():
    """Attention with the three matrices that seed 123 draws, in float32."""
    q, k, v = ((given.X.float() @ weight).view(1, 1, 5, 4) for weight in projection())
    assert shown(fused.attention_weights(q, k)[0, 0, 0]) == "0.2133 0.3945 0.3265 0.0324 0.0333"
    assert shown(fused.attention(q, k, v)[0, 0, 0]) == "-0.9789 -0.0259 0.4282 -1.8176"


def test_middle_rows_of_the_causal_weights_agree():
    wanted = "0.1863 0.3072 0.5065 0.0000 0.0000 / 0.1015 0.1674 0.2760 0.4551 0.0000"
    assert shown(causal_weights_of_the_arithmetic_table()[2:4]) == wanted


def test_context_of_the_printed_dropped_weights():
    wanted = (
        "4.2426 5.0158 -0.5660 1.5386 / 1.6024 1.8945 -0.2138 0.5811 / 2.0484 2.2850 -0.2468 0.5894 / "
        "3.3195 3.5583 -0.4094 1.2199 / 2.3427 2.5214 -0.2895 0.8951"
    )
    assert shown(given.DROPPED @ given.VALUES) == wanted


def test_saturated_heads():
    """1.18: each row of both heads attends to the first token only, so 1.19 has three equal rows."""
    scores, weights, context = heads()
    assert shown(scores[0, 0, 0], 2) == "78.66 -44.05 4.95"
    assert shown(weights[0, 0], 5) == shown(torch.tensor([[1.0, 0.0, 0.0]] * 3), 5)
    assert shown(context) == " / ".join(["-2.0893 14.5012 -7.8525 -10.7435 11.3284 -10.0390"] * 3)


def test_torch_has_no_option_of_numpy():
    with pytest.raises(TypeError):
        torch.set_printoptions(precision=3, suppress=True)


def test_width_that_heads_do_not_divide():
    with pytest.raises(ValueError, match=r"heads of 42\.67"):
        python_ref.preset("imdb_bert", width=256, layers=4, heads=6)


def test_layer_norm_has_no_running_statistics():
    norm = torch.nn.LayerNorm(8)
    x = torch.randn(4, 8)
    assert torch.equal(norm.train()(x), norm.eval()(x)) and len(list(norm.buffers())) == 0


def test_slowest_described_wave():
    """Positions: "cosine near 1, sine near 0" fits i = 383, the last pair; i = 50 has a period of 20.8 as printed."""
    assert far_codes(383) == ["sine 0.10", "cosine 0.99"]
    assert cycles(50).startswith("period 20.8,")


def test_tokens_of_gpt2(data_folder):
    encode = Gpt2Tokenizer(str(data_folder / "gpt2_bpe")).encode
    assert [encode(text) for text in ("Building", " Building")] == [[25954], [11819]]
