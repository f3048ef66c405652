"""Plots of a deep network: what the pages say about them."""

import pytest

from transformer_kernels.visualization import networks

pytest.importorskip("matplotlib", reason="matplotlib is not installed")


def test_gradients_vanish_towards_the_first_layer_without_shortcuts():
    without, with_shortcuts = (networks.gradient_sizes(20, shortcuts) for shortcuts in (False, True))
    assert without == sorted(without) and without[0] < 1e-12 and without[-1] > 1e-4
    assert min(with_shortcuts) > 1e-2


def test_landscapes_share_their_colours(tmp_path, monkeypatch):
    """A colour is one loss in both panels, and nothing is outside the scale."""
    figures = []
    monkeypatch.setattr(networks, "write_figure", lambda figure, path: figures.append(figure))
    networks.draw_landscape(2, tmp_path / "landscape.png", steps=2, points=5)
    left, right, bar = figures[0].axes
    levels = [axes.collections[0].levels.tolist() for axes in (left, right)]
    assert levels[0] == levels[1] and bar.get_ylabel() == "log10 of the loss"
    for axes in (left, right):
        values = axes.collections[0].get_array()
        assert levels[0][0] <= values.min() and values.max() <= levels[0][-1]
