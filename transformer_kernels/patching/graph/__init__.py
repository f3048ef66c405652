"""Any PyTorch program on these kernels: `torch.compile(model, backend="transformer_kernels")`.

Dynamo gives a graph of torch calls, before autograd is traced. What the patterns of `ops/*/_pattern.py` describe is
replaced by this package's operations, and the graph runs eagerly with autograd. What is not described stays as it is.

    _canonical.py   one form for all spellings of an operator
    _rules.py       the operators, one rule each
    _writes.py      in-place operators
    _constants.py   parts that depend on buffers and sizes alone
    _match.py       the search for a term
    _rewrite.py     one pass over a graph
    _equal.py       equal computations become one
    _calls.py       calls of torch.nn.functional; _multi_head.py and _encoder_layer.py those that are several
    _checkpoint.py  parts that are computed again
    _unpad.py       values of tokens without padding
    _tracing.py     what Dynamo traces besides
    _report.py      the report
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn

from transformer_kernels.backends.dispatch import BACKENDS
from transformer_kernels.graphs._host import Recording
from transformer_kernels.patching.graph._report import GraphReport, GraphRow, Shares, report_of, timed
from transformer_kernels.patching.graph._rewrite import Outcome, rewrite
from transformer_kernels.patching.graph._tracing import trace_further

__all__ = ["GraphReport", "GraphRoute", "GraphRow", "Shares", "compile", "transformer_kernels"]


ALONE: dict[str, Any] = {
    name: True for name in inspect.signature(torch.compile).parameters if name == "isolate_recompiles"
}
"""Each compiled model has its own limit of recompilations, in versions of PyTorch that support that."""


class GraphRoute:
    """A backend of `torch.compile` that records its matches.

    Args:
        backend: "torch", "cpu", "triton" or "cuda" computes every match; None: the fastest, PyTorch's own functions
            included.
        unpad: leave out padding.
    """

    def __init__(self, backend: str | None = None, unpad: bool = False) -> None:
        if backend not in (*BACKENDS, "auto", None):
            raise ValueError(f"compile: backend must be one of {(*BACKENDS, 'auto', None)}; got {backend!r}")
        trace_further()
        self.backend, self.unpad = None if backend == "auto" else backend, unpad
        self.outcomes: list[Outcome] = []
        self._modules: list[fx.GraphModule] = []
        self._switch: dict[str, Any] = {}

    @property
    def __name__(self) -> str:
        return "transformer_kernels"

    def __call__(self, graph_module: fx.GraphModule, example_inputs: list[Any], **_: Any) -> Callable[..., Any]:
        """Rewrite a graph; returns what runs it."""
        Recording.runs_compiled = True
        self.outcomes.append(self._rewritten(graph_module))
        self._modules.append(graph_module)
        forward, switch = graph_module.forward, self._switch

        def run(*arguments: Any) -> Any:
            return switch["run"](graph_module, *arguments) if switch else forward(*arguments)

        return run

    def _rewritten(self, graph_module: fx.GraphModule) -> Outcome:
        """Rewrite a graph; where that fails, it runs as it was given, with a warning, unless a backend is named."""
        trains = torch.is_grad_enabled()
        if self.backend is not None:
            return rewrite(graph_module, trains, self.backend, self.unpad)
        parts = [part for part in graph_module.modules() if isinstance(part, fx.GraphModule)]
        before = [copy.deepcopy(part.graph) for part in parts]
        try:
            return rewrite(graph_module, trains, None, self.unpad)
        except Exception as error:
            for part, graph in zip(parts, before, strict=True):
                part.graph = graph
            reason = f"rewriting it failed, which is a fault of this package: {type(error).__name__}: {error}"
            warnings.warn(f"compile: a graph is left to PyTorch: {reason}", RuntimeWarning, stacklevel=2)
            return Outcome(left={("the graph", ""): reason})

    def report(self) -> GraphReport:
        """The matches in the graphs so far; graphs are compiled at the first call."""
        return report_of(self.outcomes)

    def shares(self, run: Callable[[], Any]) -> Shares:
        """Where the time of the forward pass goes in one call of `run`, which calls the compiled model."""
        return timed(self._modules, run, self._switch)

    def __reduce__(self) -> tuple[Any, ...]:
        return GraphRoute, (self.backend, self.unpad)


def _transformer_kernels(
    graph_module: fx.GraphModule, example_inputs: list[Any], options: dict[str, Any] | None = None
) -> Callable[..., Any]:
    """`torch.compile(model, backend="transformer_kernels", options={"backend": None, "unpad": False})`."""
    given = options or {}
    return GraphRoute(given.get("backend"), given.get("unpad", False))(graph_module, example_inputs)


_transformer_kernels.__name__ = "transformer_kernels"


def __getattr__(name: str) -> Any:
    """The entry point, which is looked up before the program is traced."""
    if name != "transformer_kernels":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    trace_further()
    return _transformer_kernels


def compile(
    model: Any,
    *,
    backend: str | None = None,
    dynamic: bool | None = None,
    fullgraph: bool = False,
    unpad: bool = False,
) -> Any:
    """Run any PyTorch module or function on these kernels, recognised by what it computes.

    It is `torch.compile` with the backend "transformer_kernels", and a report. Attention, norms, activations, residual
    additions, dropout, linear layers and losses are recognised however they are written; a match that would not give
    the same result is left alone. The first call compiles: about a second.

    Args:
        model: a module or a function.
        backend: "torch", "cpu", "triton" or "cuda" computes every match and never falls back; None or "auto": the
            fastest, PyTorch's own functions included.
        dynamic, fullgraph: as in `torch.compile`.
        unpad: leave out padding on the right between the first and the last operator that acts on each token alone,
            around attention whose mask hides the keys of padding. Their results at padding become zeros, as by
            `patch(model, unpad=True)`; real tokens have the same results, and dropout drops other elements.

    Returns:
        what `torch.compile` returns, with two methods more: `report()`, which prints as a table, and
        `shares(run)`, where the time of the forward pass in one call of `run` goes.

    Raises:
        ValueError: the name of the backend is unknown.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU())
        >>> compiled = compile(model)
        >>> compiled(torch.randn(512, 64)).shape
        torch.Size([512, 64])
        >>> compiled.report().graphs
        1
    """
    route = GraphRoute(backend, unpad)
    compiled = torch.compile(model, backend=route, dynamic=dynamic, fullgraph=fullgraph, **ALONE)
    target = vars(compiled) if isinstance(compiled, nn.Module) else compiled.__dict__
    target["report"], target["shares"] = route.report, route.shares
    return compiled
