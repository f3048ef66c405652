"""The report of `patch` has each module that computes in PyTorch what this package has, with the true reason."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn

import transformer_kernels as tk
from transformer_kernels.patching._code import calls_of

WRITTEN = """
    import math
    import torch
    import torch.nn as nn
    import torch.nn.functional as F
    from torch.nn.functional import gelu, softmax

    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.query, self.key, self.value = (nn.Linear(8, 8, bias=False) for _ in range(3))

        def forward(self, x):
            weights = self.query(x) @ self.key(x).transpose(-2, -1) * 8**-0.5
            return F.softmax(weights, dim=-1) @ self.value(x)

    class MultiHead(nn.Module):
        def __init__(self):
            super().__init__()
            self.heads = nn.ModuleList([Head(), Head()])

        def forward(self, x):
            return torch.cat([head(x) for head in self.heads], dim=-1)

    class ByMethod(nn.Module):
        def scores(self, x):
            return torch.einsum("bqd,bkd->bqk", x, x).softmax(-1)

        def forward(self, x):
            return self.scores(x)

    class Fused(nn.Module):
        def forward(self, x):
            return F.scaled_dot_product_attention(x, x, x)

    class FullPath(nn.Module):
        def forward(self, x):
            return torch.nn.functional.scaled_dot_product_attention(x, x, x)

    class NewGELU(nn.Module):
        def forward(self, x):
            return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))

    class Norm(nn.Module):
        def forward(self, x):
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)

    class ByName(nn.Module):
        def forward(self, x):
            return gelu(x)

    class Gated(nn.Module):
        def forward(self, x):
            return F.silu(x) * x

    class GatedMLP(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.up, self.act = nn.Linear(8, 8), nn.Linear(8, 8), nn.GELU()

        def forward(self, x):
            return self.act(self.gate(x)) * self.up(x)

    class MLP(GatedMLP):
        def forward(self, x):
            return self.up(self.act(self.gate(x)))

    class Pooler(nn.Module):
        def forward(self, x):
            return torch.tanh(x[:, 0])

    class Plain(nn.Module):
        def forward(self, x):
            return torch.relu_(x) if False else x * 2
"""
SEPARATE = "its scores, softmax and product are separate calls, not scaled_dot_product_attention"
REASONS = {
    "Head": f"{SEPARATE}; `accelerate` reroutes its calls of softmax",
    "MultiHead": None,
    "ByMethod": f"{SEPARATE}; `accelerate` reroutes its calls of softmax",
    "FullPath": "its call of scaled_dot_product_attention cannot be replaced in its forward; "
    "`accelerate` reroutes its calls of scaled_dot_product_attention",
    "NewGELU": "a GELU that is written out: its code is not that of a known GELU",
    "Norm": "a norm that is written out: its code is not that of a known norm",
    "ByName": "its gelu is called inside its own code",
    "Gated": "there is no operation for silu alone",
    "GatedMLP": "its code is not that of a known gated MLP",
    "MLP": None,
    "Pooler": None,
    "Plain": None,
}
NO_SOURCE = "; source unavailable: it was not compared with known code"


@pytest.fixture
def written():
    """Classes without source, as those of `exec`, of a notebook's cell and of `python -`."""
    scope = {"__name__": "__main__"}
    exec(textwrap.dedent(WRITTEN), scope)
    return scope


@pytest.mark.parametrize("name", REASONS)
def test_hand_written_classes_without_source(written, name):
    report = tk.patch(written[name]())
    root = [row.reason for row in report.left if row.name == ""]
    if REASONS[name] is None:
        assert root == []
        return
    reason, _, remedy = REASONS[name].partition("; `acc")
    assert root == [reason + NO_SOURCE + (f"; `acc{remedy}" if remedy else "")]


def test_the_heads_of_a_hand_written_attention_are_in_the_report(written):
    report = tk.patch(nn.Sequential(written["MultiHead"]()))
    assert [row.name for row in report.left] == ["0.heads.0", "0.heads.1"]


def test_a_class_without_source_is_patched_by_its_code(written):
    module, x = written["Fused"](), torch.randn(2, 3, 40, 16)
    expected = module(x)
    assert [row.operation for row in tk.patch(module).patched] == ["attention"]
    torch.testing.assert_close(module(x), expected)


def test_a_program_on_the_standard_input():
    lines = "import transformer_kernels", "print(transformer_kernels.patch(nn.Sequential(Fused(), Head())))"
    program = "\n".join([textwrap.dedent(WRITTEN), *lines])
    out = subprocess.run([sys.executable, "-"], input=program, capture_output=True, text=True, check=True).stdout
    assert re.search(r"^\* +Fused +attention +1$", out, re.MULTILINE)
    assert re.search(rf"^\* +Head +not patched: {re.escape(SEPARATE)}", out, re.MULTILINE)


class Aliased(nn.Module):
    """torch.nn.functional under another name, and a decorator around nothing."""

    def forward(self, x):
        return functional.layer_norm(x, (8,))


functional = torch.nn.functional


def test_another_name_of_the_functions_is_followed():
    module, x = Aliased(), torch.randn(3, 8)
    assert [row.operation for row in tk.patch(module, "torch").patched] == ["layer_norm"]
    with pytest.raises(tk.UnsupportedByBackend, match="layer_norm: backend 'torch' does not compute this call"):
        module(x)  # without a weight, which only our call of it says


OF_TORCH = {
    "relu": (nn.ReLU, "there is no operation for relu alone"),
    "tanh": (nn.Tanh, "there is no operation for tanh"),
    "batch": (lambda: nn.BatchNorm1d(8), "there is no operation for batch_norm"),
    "log_softmax": (lambda: nn.LogSoftmax(-1), "log_softmax is called on its own"),
    "loss": (
        nn.CrossEntropyLoss,
        "cross_entropy is called with arguments that are known to its caller only; "
        "`accelerate` reroutes its calls of cross_entropy",
    ),
}


@pytest.mark.parametrize("name", OF_TORCH)
def test_modules_of_torch(name):
    make, reason = OF_TORCH[name]
    assert [row.reason for row in tk.patch(make()).left] == [reason]


def test_what_accelerate_is_said_to_reroute_it_sees(written):
    """Each sentence with a remedy is true: the block counts a call of that function."""
    inputs = {"Head": torch.randn(2, 5, 8), "ByMethod": torch.randn(2, 5, 8), "FullPath": torch.randn(2, 1, 5, 8)}
    for name, x in inputs.items():
        with tk.accelerate() as block:
            written[name]()(x)
        seen = {call.name for call in calls_of(written[name]) if call.seen}
        counted = {row.operation for row in block.report().rows} - {"linear"}
        assert counted == {"attention" if call == "scaled_dot_product_attention" else call for call in seen}
    with tk.accelerate() as block:  # a builtin that was imported by name
        written["ByName"]()(torch.randn(64, 64))
    assert not block.report().rows and not any(call.seen for call in calls_of(written["ByName"]))


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_code_that_is_not_python():
    scripted = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    report = tk.patch(nn.Sequential(scripted, nn.Linear(4, 4)))
    assert [(row.name, row.reason) for row in report.left] == [("0", "its forward is not Python code")]
