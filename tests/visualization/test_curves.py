"""Position codes, and the curves of runs from their logs."""

import json

import pytest
import torch

from transformer_kernels.visualization import curves
from transformer_kernels.visualization.curves import draw_runs, position_codes, read_log


def test_sinusoidal_codes_are_sines_and_cosines():
    codes = position_codes("sinusoidal", 5, 4)
    angles = torch.arange(5.0)[:, None] * torch.tensor([1.0, 0.01])
    torch.testing.assert_close(codes, torch.stack((angles.sin(), angles.cos()), -1).flatten(1))


def test_words_integers_and_bits():
    assert position_codes("fraction", 3, 9).tolist() == [[0], [0.5], [1]]
    assert position_codes("integer", 3, 9).tolist() == [[0], [1], [2]]
    assert position_codes("binary", 6, 9)[5].tolist() == [1, 0, 1] and position_codes("binary", 1, 9).shape == (1, 1)


def test_products_of_rotated_vectors_depend_on_the_distance_only():
    codes = position_codes("rotary", 12, 8).double()
    products = codes @ codes.T
    for distance in range(12):
        along = products.diagonal(distance)
        torch.testing.assert_close(along, along[:1].expand(12 - distance), rtol=0, atol=1e-5)
    assert (products.diagonal() > products.diagonal(1).max() + 0.1).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("learned", 4, 4), "kind must be one of integer, fraction, binary, sinusoidal, rotary; got 'learned'"),
        (("rotary", 4, 3), "width must be even and positive; got 3"),
        (("sinusoidal", 0, 4), "must be at least 1; got 0 and 4"),
    ],
)
def test_positions_that_there_are_not(arguments, message):
    with pytest.raises(ValueError, match=message):
        position_codes(*arguments)


def write_log(folder, *lines):
    folder.mkdir()
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(folder)


def line(event, step, **values):
    return {"event": event, "step": step, **values}


LINES = [line("start", 0), *(line("train", step, loss=3.0 - step / 10) for step in (2, 4, 6))]
LINES += [line("validation", 6, loss=2.5, accuracy=0.4)]


def test_a_resumed_run_goes_through_its_steps_once(tmp_path):
    again = [line("start", 4), line("train", 6, loss=2.0)]
    lines = read_log(write_log(tmp_path / "run", *LINES, *again))
    assert [each["step"] for each in lines if each["event"] == "train"] == [2, 4, 6]
    assert lines[-1] == again[-1] and not any(each["event"] == "validation" for each in lines)


def test_logs_that_cannot_be_drawn(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"nowhere/log.jsonl: no such file; pass the folder of a run, such as runs/char-gpt"
    ):
        read_log(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="no step of training is logged yet"):
        read_log(write_log(tmp_path / "fresh", LINES[0]))
    broken = write_log(tmp_path / "broken", LINES[0], {"step": 1})
    with pytest.raises(ValueError, match=r"log.jsonl, line 2: not a log entry of a run"):
        read_log(broken)


def test_the_picture_of_runs_has_their_curves(tmp_path, monkeypatch):
    kept = []
    monkeypatch.setattr(curves, "write_figure", lambda figure, path: kept.append(figure))
    draw_runs([write_log(tmp_path / "one", *LINES), write_log(tmp_path / "two", *LINES[:-1])], tmp_path / "runs.png")
    loss, accuracy = kept[0].axes
    drawn = {drawn.get_label().removeprefix(str(tmp_path)): drawn.get_xydata().tolist() for drawn in loss.lines}
    training = [[2, 2.8], [4, 2.6], [6, 2.4]]
    assert drawn == {"/one: train": training, "/one: validation": [[6, 2.5]], "/two: train": training}
    assert [drawn.get_xydata().tolist() for drawn in accuracy.lines] == [[[6, 0.4]]]


def test_the_time_axis_of_a_run_has_the_times_of_its_log():
    times = [line("train", step, loss=1.0, seconds=seconds) for step, seconds in ((0, 0), (10, 60), (20, 240))]
    unit, there, back = curves._clock(times)
    assert unit == "minutes"
    assert there([0, 5, 10, 20]).tolist() == [0, 0.5, 1, 4] and back([1, 4]).tolist() == [10, 20]
    _, there, _ = curves._clock([*times, line("start", 20), line("train", 30, loss=1.0, seconds=60)])
    assert there([20, 30]).tolist() == [4, 5]
    assert curves._clock(LINES) is None
    short = [line("train", step, loss=1.0, seconds=step) for step in (0, 90)]
    assert curves._clock(short)[0] == "seconds"


def test_runs_without_an_accuracy_have_no_panel_for_it(tmp_path, monkeypatch):
    kept = []
    monkeypatch.setattr(curves, "write_figure", lambda figure, path: kept.append(figure))
    draw_runs([write_log(tmp_path / "one", *LINES[:-1], line("validation", 6, loss=2.5))], tmp_path / "runs.png")
    (loss,) = kept[0].axes
    assert [len(drawn.get_xydata()) for drawn in loss.lines] == [3, 1]


@pytest.mark.parametrize(
    "entry",
    [
        '{"event": "train", "step": "a", "loss": 1.0}',
        '{"event": "train", "step": -1, "loss": 1.0}',
        '{"event": "train", "step": 1, "loss": "x"}',
        '{"event": "train", "step": 1, "loss": 1.0, "seconds": "x"}',
        '{"event": "validation", "step": 1, "loss": 1.0, "accuracy": "high"}',
        '{"event": "train", "loss": 1.0}',
        "[1, 2]",
        "[" * 100_000,
    ],
)
def test_an_entry_that_no_run_writes_is_named(entry, tmp_path):
    (tmp_path / "log.jsonl").write_text('{"event": "train", "step": 0, "loss": 1.0}\n' + entry + "\n")
    with pytest.raises(ValueError, match=r"log\.jsonl, line 2: not a log entry of a run"):
        read_log(tmp_path)


@pytest.mark.parametrize("seconds", [(1.0, 2.0, 3.0), (1.0, 1.0, 1.0), (1.0, float("nan"), 3.0)])
@pytest.mark.parametrize("steps", [(1, 2, 3), (1, 1, 1), (3, 2, 1)])
def test_the_times_of_a_run_are_drawn(seconds, steps, tmp_path):
    entries = [
        json.dumps({"event": "train", "step": step, "loss": 1.0, "seconds": time})
        for step, time in zip(steps, seconds, strict=True)
    ]
    (tmp_path / "log.jsonl").write_text("\n".join(entries))
    draw_runs([str(tmp_path)], tmp_path / "run.png")
    assert (tmp_path / "run.png").stat().st_size > 1000
