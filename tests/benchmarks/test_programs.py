"""The benchmark of hand-written models at a tiny size."""

import pytest
import torch

from benchmarks import programs
from benchmarks.correctness import WrongResult
from benchmarks.handwritten import MODELS, Size


@pytest.fixture(autouse=True)
def fresh():
    threads = torch.get_num_threads()
    torch.compiler.reset()
    yield
    torch.compiler.reset()
    torch.set_num_threads(threads)


@pytest.mark.parametrize("way", ["accelerate", "route"])
@pytest.mark.parametrize("name", MODELS)
def test_a_way_gives_eager_results(name, way):
    assert programs.check(name, programs.TINY, way) <= programs.TOLERANCE


def test_every_mode_has_a_row_for_each_way(capsys):
    rows = programs.main(["--tiny", "--models", "gpt", "--columns", "route", "--seconds", "0.01", "--threads", "1"])
    assert [(row["mode"], row["way"]) for row in rows] == [
        (mode, way) for mode in programs.MODES for way in ("eager", "route")
    ]
    assert all(row["ms"] > 0 for row in rows) and rows[1]["first"] > rows[0]["first"]
    assert [line.split()[:3] for line in capsys.readouterr().out.splitlines()] == [
        ["gpt", row["mode"], row["way"]] for row in rows
    ]


def test_wrong_gradients_are_not_timed(monkeypatch):
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, dy):
            return 1.01 * dy

    monkeypatch.setitem(programs.WAYS, "route", lambda model: lambda *inputs: Wrong.apply(model(*inputs)))
    with pytest.raises(WrongResult, match="gpt, route"):
        programs.measure("gpt", programs.TINY, ["eager", "route"], ["train"], 0.01)


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_is_trained(name):
    torch.manual_seed(0)
    program = programs.Program(MODELS[name](Size(1, 32, 2, 16, 2, 50), 0.1), "eager")
    program.backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in program.model.parameters())
