"""Small programs that write attention, norms, activations, rotary embeddings and losses by hand.

A `Program` is a function of tensors, named by its parameters (`INPUTS`). Each family's module has

- `spelled(choices)`: the family's computation, spelled by one choice of each of its OPTIONS,
- TRAPS: functions that resemble the family's computation and are something else, or that observe or change one of its
  intermediate values.

Sizes are equal wherever they can be (8 rows of 8 columns, 8 keys of 8 features): a match of the wrong axis then has the
right shape.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

B, H, L, D, V = 2, 2, 8, 8, 11


def _normal(*shape: int, scale: float = 1.0) -> Callable[[torch.Generator], Tensor]:
    return lambda generator: scale * torch.randn(*shape, generator=generator, dtype=torch.float64)


def _rows(generator: torch.Generator) -> Tensor:
    """Rows with variances from 1e-6 to 10, off centre: the position of eps shows."""
    scale = 10.0 ** torch.linspace(-3, 0.5, B * L, dtype=torch.float64).view(B, L, 1)
    return scale * (torch.randn(B, L, D, generator=generator, dtype=torch.float64) + 0.3)


def _padding(generator: torch.Generator) -> Tensor:
    """True at padding keys (B, 1, 1, L), two of the first sequence, five of the second."""
    hidden = torch.zeros(B, 1, 1, L, dtype=torch.bool)
    hidden[0, ..., 6:], hidden[1, ..., 3:] = True, True
    return hidden


def _causal(generator: torch.Generator) -> Tensor:
    return torch.ones(L, L, dtype=torch.bool).triu(1)


def _any_mask(generator: torch.Generator) -> Tensor:
    """True at hidden keys (B, 1, L, L); every query sees its own position."""
    hidden = torch.rand(B, 1, L, L, generator=generator) > 0.5
    return hidden & ~torch.eye(L, dtype=torch.bool)


def _hides_rows(generator: torch.Generator) -> Tensor:
    """True at hidden keys; two queries of each sequence see none."""
    hidden = _any_mask(generator)
    hidden[:, :, 1], hidden[:, :, 6] = True, True
    return hidden


def _tokens(high: int, *shape: int) -> Callable[[torch.Generator], Tensor]:
    return lambda generator: torch.randint(0, high, shape, generator=generator)


def _targets(generator: torch.Generator) -> Tensor:
    targets = torch.randint(0, V, (B, L), generator=generator)
    targets[0, 2], targets[1, 5] = -100, 0
    return targets


def _angles(function: Callable[[Tensor], Tensor], *shape: int) -> Callable[[torch.Generator], Tensor]:
    """Random tables, so that halves differ and nothing is periodic."""
    return lambda generator: function(6.0 * torch.rand(*shape, generator=generator, dtype=torch.float64))


INPUTS: dict[str, Callable[[torch.Generator], Tensor]] = {
    **dict.fromkeys(("q", "k", "v", "other"), _normal(B, H, L, D)),
    "x": _rows,
    **dict.fromkeys(("y", "residual", "gate"), _normal(B, L, D)),
    **dict.fromkeys(("weight", "bias", "bias2"), _normal(D)),
    "modulation": _normal(B, 1, D),
    **dict.fromkeys(("W", "W2", "W3"), _normal(D, D, scale=0.4)),
    "Wqkv": _normal(3 * D, D, scale=0.4),
    "Wup": _normal(2 * D, D, scale=0.4),
    "head": _normal(V, D),
    "table": _normal(V, D),
    "positions": _normal(L, D),
    "columns": _normal(L, 1),
    "temperature": lambda generator: torch.tensor(0.7, dtype=torch.float64),
    "score_bias": _normal(H, L, L),
    "head_scale": _normal(1, H, 1, 1),
    "cos": _angles(torch.cos, L, D),
    "sin": _angles(torch.sin, L, D),
    "half_cos": _angles(torch.cos, L, D // 2),
    "half_sin": _angles(torch.sin, L, D // 2),
    "logits": _normal(B, L, V, scale=3.0),
    "class_weights": lambda generator: torch.rand(V, generator=generator, dtype=torch.float64) + 0.5,
    "probabilities": lambda generator: torch.rand(B * L, V, generator=generator, dtype=torch.float64).softmax(-1),
    "pad": _padding,
    "causal": _causal,
    "mask": _any_mask,
    "hides_rows": _hides_rows,
    "tokens": _tokens(V, B, L),
    "segments": _tokens(2, B, L),
    "targets": _targets,
}
CONSTANT = ("cos", "sin", "half_cos", "half_sin", "class_weights", "probabilities")
"""Floating-point inputs without a gradient."""


@dataclass(frozen=True)
class Program:
    """A small function of tensors.

    Args:
        name: family and spelling.
        function: takes tensors of INPUTS by name; returns a tensor or a tuple of tensors.
        matched: operations of the package that must be in the rewritten program.
        without_gradients: the function writes to values that autograd keeps.
    """

    name: str
    function: Callable[..., Any]
    matched: frozenset[str] = frozenset()
    without_gradients: bool = False
    seed: int = 0

    def inputs(self, dtype: torch.dtype, gradients: bool) -> dict[str, Tensor]:
        """New tensors, the same for every dtype up to rounding to `dtype`."""
        made = {}
        for number, name in enumerate(inspect.signature(self.function).parameters):
            tensor = INPUTS[name](torch.Generator().manual_seed(97 * self.seed + number))
            if tensor.is_floating_point():
                tensor = tensor.to(dtype).requires_grad_(gradients and name not in CONSTANT)
            made[name] = tensor
        return made


def wide(x: Tensor) -> Tensor:
    """x in float32, as programs write it; in float64 where it is the reference."""
    return x if x.dtype is torch.float64 else x.float()


@dataclass
class Family:
    """The spellings of one computation.

    Args:
        options: option -> its choices by name; the first is the default.
        spelled: choices -> the function.
        matched: choices -> the operations that must be in the rewritten program.
    """

    name: str
    options: dict[str, list[str]]
    spelled: Callable[..., Callable[..., Any]]
    matched: Callable[[dict[str, str]], frozenset[str]]
    traps: list[Callable[..., Any]] = field(default_factory=list)

    def program(self, choices: dict[str, str], seed: int = 0) -> Program:
        changed = [f"{option} {choice}" for option, choice in choices.items() if choice != self.options[option][0]]
        name = f"{self.name}: {', '.join(changed) or 'default'}"
        return Program(name, self.spelled(**choices), self.matched(choices), "no_grad" in name, seed)

    def default(self) -> dict[str, str]:
        return {option: choices[0] for option, choices in self.options.items()}

    def single(self) -> list[Program]:
        """The default, and each choice of each option alone."""
        programs = [self.program(self.default())]
        for option, choices in self.options.items():
            programs += [self.program({**self.default(), option: choice}) for choice in choices[1:]]
        return programs

    def sampled(self, count: int, seed: int) -> list[Program]:
        """Random choices of every option."""
        chance = random.Random(f"{self.name} {seed}")
        return [
            self.program({option: chance.choice(choices) for option, choices in self.options.items()}, index)
            for index in range(count)
        ]

    def trapped(self) -> list[Program]:
        return [
            Program(f"{self.name}: {trap.__name__}", trap, without_gradients=trap.__name__.endswith("no_grad"))
            for trap in self.traps
        ]

    def trap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Register a program that must not be taken for the family's computation."""
        self.traps.append(function)
        return function
