"""Weights and the state of optimizers between two steps: a bit of them that changes without a write."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

PART = 1 << 15
"""Maximum number of elements that are summed of a tensor, unless all are."""


class BetweenSteps:
    """Sums the bits of weights and of optimizers' state after a step of an optimizer, and again before the next one.

    A single changed bit in a tensor of unchanged version is reported. Larger changes are not: programs write through
    `weight.data`, which does not change the version. On a CPU; in recorded steps too.

    Args:
        changed: is called with the optimizer, the parameter, and the tensor's name ("" for the weight itself).
        share: of the time, for random parts of random tensors; 1.0: all tensors in each step.
    """

    def __init__(self, changed: Callable[[Optimizer, Tensor, str], None], share: float) -> None:
        self._changed, self._share = changed, share
        self._sums: WeakKeyDictionary[Optimizer, list[tuple[Tensor, str, Tensor, int, int]]] = WeakKeyDictionary()
        self._random = random.Random(0)
        self.seconds = 0.0

    def __enter__(self) -> BetweenSteps:
        self._began = time.perf_counter()
        self._hooks = [
            register_optimizer_step_pre_hook(lambda optimizer, *_: self._in_each_step(self._before, optimizer)),
            register_optimizer_step_post_hook(lambda optimizer, *_: self._in_each_step(self._after, optimizer)),
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._sums.clear()

    def _in_each_step(self, function: Callable[[Optimizer], None], optimizer: Optimizer) -> None:
        if torch.compiler.is_compiling():
            return
        if (recording := current_recording()) is not None:
            recording.observe(lambda: self._timed(function, optimizer))
        else:
            self._timed(function, optimizer)

    def _timed(self, function: Callable[[Optimizer], None], optimizer: Optimizer) -> None:
        started = time.perf_counter()
        with _disable_current_modes(), torch.no_grad():
            function(optimizer)
        self.seconds += time.perf_counter() - started

    def _after(self, optimizer: Optimizer) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if self._share < 1.0:
            if self.seconds > self._share * (time.perf_counter() - self._began):
                return
            parameters = [self._random.choice(parameters)]
        sums = []
        for parameter in parameters:
            named = [("", parameter), *optimizer.state.get(parameter, {}).items()]
            for name, x in named:
                if isinstance(x, Tensor) and x.device.type == "cpu" and x.is_contiguous() and x.dim():
                    part = x.detach().view(-1)
                    if self._share < 1.0 and x.numel() > PART:
                        start = self._random.randrange(x.numel() - PART)
                        part = part[start : start + PART]
                    sums.append((parameter, name, part, part._version, sum_of_bits(part)))
        self._sums[optimizer] = sums

    def _before(self, optimizer: Optimizer) -> None:
        for parameter, name, part, version, before in self._sums.pop(optimizer, ()):
            difference = abs(sum_of_bits(part) - before) if part._version == version else 0
            if difference.bit_count() == 1:
                self._changed(optimizer, parameter, name)


def current_recording() -> Any:
    """The active recording of `graphs`, whose `observe` adds a function to its replays; None outside of one."""
    modes: list[Any] = _get_current_dispatch_mode_stack()
    return next((mode for mode in modes if hasattr(mode, "observe")), None)


def sum_of_bits(x: Tensor) -> int:
    """The sum of a tensor's elements as integers."""
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return int(x.detach().view(words).sum(dtype=torch.int64))
