"""Charts in block characters: what the demo prints."""

import io
import math
import types

import pytest

from transformer_kernels.training import blocks


@pytest.fixture(params=["utf-8", "ascii"])
def encoding(request, monkeypatch):
    output = io.TextIOWrapper(io.BytesIO(), encoding=request.param)
    monkeypatch.setattr(blocks, "sys", types.SimpleNamespace(stdout=output))
    return request.param


def test_bars(encoding):
    bars = [blocks.bar(value, 8.0) for value in (8.0, 4.0, 1.0, 0.01)]
    assert [len(bar) for bar in bars] == [blocks.BAR, blocks.BAR // 2, blocks.BAR // 8, 1]
    assert set("".join(bars)) == {"█" if encoding == "utf-8" else "#"}
    assert blocks.bar(math.nan, 8.0) == ""


def test_means_of_equal_times():
    points = [(0.1, 4.0), (0.4, 2.0), (0.6, 1.0), (1.02, 3.0)]
    assert blocks.means(points, 1.0, 2) == [3.0, 2.0]  # a step that ends after the time belongs to the last part
    assert blocks.means([(0.6, 1.0)], 1.0, 4) == [1.0] * 4
    assert all(math.isnan(value) for value in blocks.means([], 1.0, 2))


def test_chart_of_two_curves(encoding):
    lines = blocks.curves([4.0, 2.0, 0.0], [4.0, 4.0, 2.0], rows=4)
    full, shade, edge = "█░│" if encoding == "utf-8" else "#.|"
    assert lines == [
        f"  3.50 {edge}{full}{shade}",
        f"  2.50 {edge}{full}{shade}",
        f"  1.50 {edge}{full}{full}{shade}",
        f"  0.50 {edge}{full}{full}{shade}",
    ]
    "\n".join(lines).encode(encoding)


def test_two_texts_side_by_side(encoding):
    lines = blocks.beside("one two three\n\nfour", "five", 8, 3)
    mark = "│" if encoding == "utf-8" else "|"
    assert lines == [f"one two  {mark} five", f"three    {mark}", f"         {mark}"]
