"""Finds bits of weights, gradients and optimizer state that change without a write, and stale replays."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

PART = 1 << 15
"""Maximum number of elements that are compared of a tensor, unless all are."""
MAX_BITS = 2
"""Maximum number of changed bits that is reported. More are taken as a program's write through `weight.data`, which
does not change the version of a tensor."""
MIN_GRADIENT = 16
"""Minimum number of elements of a compared gradient: scaling a smaller one may change as few bits."""
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integers of as many bytes."""


class Copy(NamedTuple):
    """A tensor, flat, with its version and its values at some time."""

    x: Tensor
    version: int
    before: Tensor

    @classmethod
    def of(cls, x: Tensor) -> Copy:
        return cls(x, x._version, x.clone())

    def has_flipped(self) -> bool:
        """Whether one or two bits have changed since then, without a write."""
        return self.x._version == self.version and 0 < changed_bits(self.x, self.before) <= MAX_BITS

    def is_clamped(self) -> bool:
        """Whether the copy has values outside of the present range, as after a clamp through `.data`."""
        if not self.x.is_floating_point():
            return False
        smallest, largest = self.x.aminmax()
        return bool(((self.before < smallest) | (self.before > largest)).any())


class BetweenSteps:
    """Compares weights and optimizers' state before a step of an optimizer with their values after the step before it,
    gradients with their values as they were computed, and what a replay reads with the arguments that it was given.

    On a CPU; in recorded steps too.

    Args:
        report: is called with the operation, the direction, the layer, what is wrong with which tensor, and its shape.
        path_of: returns the path of a parameter.
        share: of the time, for random parts of random tensors; 1.0: all tensors in each step.
    """

    def __init__(
        self, report: Callable[[str, str, str, str, torch.Size], None], path_of: Callable[[Tensor], str], share: float
    ) -> None:
        self._report, self._path_of, self._share = report, path_of, share
        self._copies: WeakKeyDictionary[Optimizer, list[tuple[Tensor, str, Copy]]] = WeakKeyDictionary()
        self._gradients: list[tuple[tuple[str, str, str, str, torch.Size], Copy]] = []
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
        self._copies.clear()
        self._gradients.clear()

    def _in_each_step(self, function: Callable[[Optimizer], None], optimizer: Optimizer) -> None:
        if torch.compiler.is_compiling():
            return
        if (recording := current_recording()) is not None:
            self._copies.pop(optimizer, None)  # the capture is a step, too
            recording.observe(lambda: self._timed(function, optimizer))
        else:
            self._timed(function, optimizer)

    def compare_arguments(self, read: Sequence[Tensor], given: Callable[[], Sequence[Tensor]]) -> None:
        """Compare the memory that a recorded step reads with the arguments of each call, as the step begins.

        Args:
            read: private copies of the arguments.
            given: returns the arguments of the current call.
        """
        if (recording := current_recording()) is not None:
            recording.observe(lambda *read: self._timed(self._compare, read, given()), *read)

    def _compare(self, read: Sequence[Tensor], given: Sequence[Tensor]) -> None:
        if self._is_due():
            for number, (x, argument) in enumerate(zip(read, given, strict=False)):
                if not torch.equal(bits(x), bits(argument)):
                    what = f"argument {number} of a call is not what its replay reads"
                    self._report("graphed", "step", "", what, x.shape)

    def keep(self, operation: str, layer: str, name: str, gradient: Tensor) -> None:
        """Copy a gradient of a parameter until the next step of an optimizer, or until `forget_gradients`."""
        if gradient.device.type == "cpu" and gradient.is_contiguous() and gradient.numel() >= MIN_GRADIENT:
            what = f"{name} changed in memory before the optimizer's step"
            where = operation, "backward", layer, what, gradient.shape
            self._gradients.append((where, Copy.of(self._part(gradient))))

    def forget_gradients(self) -> None:
        """Discard the copies: no optimizer step has followed."""
        self._gradients.clear()

    def _timed(self, function: Callable[..., None], *arguments: Any) -> None:
        started = time.perf_counter()
        with _disable_current_modes(), torch.no_grad():
            function(*arguments)
        self.seconds += time.perf_counter() - started

    def _is_due(self) -> bool:
        return self._share >= 1.0 or self.seconds <= self._share * (time.perf_counter() - self._began)

    def _after(self, optimizer: Optimizer) -> None:
        if not self._is_due():
            return
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if self._share < 1.0:
            parameters = [self._random.choice(parameters)]
        copies = []
        for parameter in parameters:
            named = [("", parameter), *optimizer.state.get(parameter, {}).items()]
            for name, x in named:
                if isinstance(x, Tensor) and x.device.type == "cpu" and x.is_contiguous():
                    copies.append((parameter, name, Copy.of(self._part(x))))
        self._copies[optimizer] = copies

    def _part(self, x: Tensor) -> Tensor:
        flat = x.detach().view(-1)
        if self._share >= 1.0 or x.numel() <= PART:
            return flat
        start = self._random.randrange(x.numel() - PART)
        return flat[start : start + PART]

    def _before(self, optimizer: Optimizer) -> None:
        for where, copy in self._gradients:
            if copy.has_flipped() and not copy.is_clamped():
                self._report(*where)
        self._gradients.clear()
        for parameter, name, copy in self._copies.pop(optimizer, ()):
            if copy.has_flipped() and (name or not copy.is_clamped()):
                layer, _, weight = self._path_of(parameter).rpartition(".")
                what = f"{f'{name} of ' if name else ''}{weight} changed in memory between two steps"
                self._report(type(optimizer).__name__, "step", layer, what, parameter.shape)


def current_recording() -> Any:
    """The active recording of `graphs`, whose `observe` adds a function to its replays; None outside of one."""
    modes: list[Any] = _get_current_dispatch_mode_stack()
    return next((mode for mode in modes if hasattr(mode, "observe")), None)


def bits(x: Tensor) -> Tensor:
    """A tensor's elements as integers."""
    x = torch.view_as_real(x.detach().resolve_conj()) if x.is_complex() else x.detach()
    return x.view(WORDS[x.element_size()])


def sum_of_bits(x: Tensor) -> int:
    """The sum of a tensor's elements as integers."""
    return int(bits(x).sum(dtype=torch.int64))


def changed_bits(x: Tensor, before: Tensor) -> int:
    """The number of bits in which a tensor differs from its copy; above `MAX_BITS` a lower bound."""
    if torch.equal(bits(x), bits(before)):
        return 0
    changed = bits(x) ^ bits(before)
    elements = int(torch.count_nonzero(changed))
    if elements > MAX_BITS:
        return elements
    mask = (1 << 8 * changed.element_size()) - 1
    return sum((word & mask).bit_count() for word in changed[changed != 0].tolist())
