"""The power law of a sweep: found where it is known, with an uncertainty that covers it."""

import itertools
import json

import numpy as np
import pytest

from transformer_kernels.visualization.sweep import Point, Sweep, fit_power_law, read_size, read_sweep, train_points

SIZES, BUDGETS = (10_000, 30_000, 100_000, 400_000), (50_000, 200_000, 1_000_000)


def points(alpha, beta, noise=0.0, budgets=BUDGETS):
    draws = np.random.default_rng(0)
    grid = itertools.product(SIZES, budgets)
    return [Point("", n, d, 20.0 * n**-alpha * d**-beta * np.exp(noise * draws.standard_normal())) for n, d in grid]


def test_a_law_without_noise_is_found_exactly():
    law = fit_power_law(points(0.08, 0.11))
    np.testing.assert_allclose((law.factor, law.alpha, law.beta), (20.0, 0.08, 0.11), rtol=1e-9)
    assert max(law.alpha_error, law.beta_error) < 1e-9


def test_the_uncertainty_is_that_of_the_exponents():
    law = fit_power_law(points(0.08, 0.11, noise=0.05))
    spread = np.log([p.parameters for p in points(0, 0)]).std() * len(SIZES * len(BUDGETS)) ** 0.5
    assert 0.5 < law.alpha_error / (0.05 / spread) < 2.0  # the standard error of a slope
    assert 0.0 < abs(law.alpha - 0.08) < 3 * law.alpha_error and abs(law.beta - 0.11) < 3 * law.beta_error


def test_what_was_not_varied_has_no_exponent():
    law = fit_power_law(points(0.08, 0.11, noise=0.01, budgets=BUDGETS[:1]))
    assert law.beta == law.beta_error == 0.0 and abs(law.alpha - 0.08) < 0.02
    assert str(law).startswith("loss = ") and "D^" not in str(law) and f"N^-({law.alpha:.4f} ± " in str(law)


def test_sweeps_that_tell_nothing(tmp_path):
    for sizes, tokens, message in (
        (["16x1", "32x1"], [4096], "2 sizes and 1 budgets of tokens make 2 points; .* requires at least 3"),
        (["16x1", "16x1"], [4096, 8192], "1 sizes and 2 budgets of tokens make 2 points"),
        (["16x1", "32x1"], [8192, 100], "a step takes 4096 tokens, more than a budget of 100"),
        (["16"], [4096], "a size is WIDTHxLAYERS, such as 64x2; got '16'"),
    ):
        with pytest.raises(ValueError, match=message):
            next(train_points(Sweep(sizes, tokens, {}, []), tmp_path))
    with pytest.raises(ValueError, match="requires at least 4"):
        fit_power_law(points(0.1, 0.1)[:3] and [points(0.1, 0.1)[index] for index in (0, 1, 3)])
    assert not list(tmp_path.iterdir())


def test_sizes():
    assert read_size("64x2") == {"width": 64, "layers": 2, "heads": 2}
    assert read_size("48x1") == {"width": 48, "layers": 1, "heads": 1}


def test_the_figure_has_the_points_and_the_law(monkeypatch, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    from transformer_kernels.visualization import sweep

    drawn = []
    monkeypatch.setattr(sweep, "write_figure", lambda figure, path: drawn.append((figure, path)))
    measured = points(0.08, 0.11, noise=0.01)
    law = fit_power_law(measured)
    sweep.draw_sweep(measured, law, tmp_path / "sweep.png")
    ((figure, path),) = drawn
    assert path == tmp_path / "sweep.png" and figure.get_suptitle() == str(law)
    panels = ("parameters", "tokens", BUDGETS), ("tokens", "parameters", SIZES)
    for axes, (across, group, kept) in zip(figure.axes, panels, strict=True):
        assert (axes.get_xlabel(), axes.get_ylabel()) == (across, "validation loss")
        assert axes.get_xscale() == axes.get_yscale() == "log"
        assert [text.get_text() for text in axes.get_legend().get_texts()] == [f"{each:,} {group}" for each in kept]
        dots, curves = axes.get_lines()[::2], axes.get_lines()[1::2]
        for value, dot, curve in zip(kept, dots, curves, strict=True):
            own = sorted((p for p in measured if getattr(p, group) == value), key=lambda p: getattr(p, across))
            assert list(dot.get_xdata()) == list(curve.get_xdata()) == [getattr(p, across) for p in own]
            assert list(dot.get_ydata()) == [p.loss for p in own]
            assert list(curve.get_ydata()) == [law.loss(p.parameters, p.tokens) for p in own]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parameters": "x"}, "expected positive numbers"),
        ({"parameters": -5}, "expected positive numbers"),
        ({"loss": "3"}, "expected positive numbers"),
        ({"loss": 0}, "expected positive numbers"),
        ({"loss": float("nan")}, "not JSON: the number NaN"),
        ({"size": [1]}, "not the record of a sweep"),
    ],
)
def test_a_point_that_no_sweep_has(change, message, tmp_path):
    point = {"size": "16x1", "parameters": 100, "tokens": 512, "loss": 3.0}
    record = {"sizes": ["16x1"], "tokens": [512], "options": {}, "points": [point]}
    (tmp_path / "sweep.json").write_text(json.dumps(record))
    assert read_sweep(tmp_path).points == [Point(**point)]
    (tmp_path / "sweep.json").write_text(json.dumps(record | {"points": [point | change]}))
    with pytest.raises(ValueError, match=rf"sweep\.json: .*{message}"):
        read_sweep(tmp_path)


@pytest.mark.parametrize("change", [{"tokens": ["512"]}, {"sizes": [16]}, {"options": {"foo": 1}}, {"options": [1]}])
def test_a_record_that_no_sweep_has(change, tmp_path):
    record = {"sizes": ["16x1"], "tokens": [512], "options": {}, "points": []}
    (tmp_path / "sweep.json").write_text(json.dumps(record | change))
    with pytest.raises(ValueError, match=r"sweep\.json: not the record of a sweep"):
        read_sweep(tmp_path)
    (tmp_path / "sweep.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"sweep\.json: not JSON"):
        read_sweep(tmp_path)
