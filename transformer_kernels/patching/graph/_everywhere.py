"""Every module that a program calls, compiled at its first call: `transformer-kernels run --compile`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from transformer_kernels.patching.graph import ALONE, GraphRoute


class CompiledEverywhere:
    """Compiles each module that is called outside any other module's forward, from `start` on.

    `torch.nn.Module.__call__` is replaced between such calls only, so that PyTorch traces the original.
    """

    def __init__(self, backend: str | None = None) -> None:
        self.route = GraphRoute(backend)
        self._original: Any = nn.Module.__call__
        self._failed: dict[str, str] = {}

    def start(self) -> None:
        """Compile modules from now on."""
        torch._dynamo.config.suppress_errors = True  # what cannot be compiled runs as it is

        def call(module: nn.Module, *arguments: Any, **options: Any) -> Any:
            nn.Module.__call__ = self._original  # type: ignore[method-assign]
            try:
                if module._compiled_call_impl is None and isinstance(module, nn.Module):
                    self._compile(module)
                return module(*arguments, **options)
            finally:
                nn.Module.__call__ = call  # type: ignore[method-assign]

        nn.Module.__call__ = call  # type: ignore[method-assign]

    def _compile(self, module: nn.Module) -> None:
        if isinstance(module, torch.jit.ScriptModule):
            self._failed[type(module).__name__] = "it is a TorchScript module"
            return
        module.compile(backend=self.route, **ALONE)

    def line(self) -> str:
        """The report on one line, with what could not be compiled."""
        reasons = dict(self._failed)
        for reason, count in torch._dynamo.utils.counters["graph_break"].items():
            first = str(reason).strip().split("\n")[0]
            reasons[f"{count} graph break{'' if count == 1 else 's'}"] = first
        left = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        report = self.route.report()
        found = ", ".join(f"{name} {count}" for name, count in report.matched.items())
        text = f"{report.line()}" + (f": {found}" if found else "")
        return text + (f"; not compiled in one piece: {left}" if left else "")
