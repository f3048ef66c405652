"""One call of an operation, or a part of its rows, again: by the backend "torch" in float64, against the budget."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from transformer_kernels.backends import dispatch
from transformer_kernels.verification.budget import (
    GRADIENT_FACTOR,
    OUTPUT_FACTOR,
    Errors,
    RandomRounding,
    measure,
    rms_of,
)

ROWS = frozenset(
    {"x", "logits", "residual", "up", "q", "k", "v", "qkv", "tokens", "position_ids", "cos", "sin", "mask"}
)
"""Fields of calls whose first axis has the length of the first tensor's first axis, or 1."""
RESULTS_OF_INPUTS = frozenset({"softmax", "rotary"})
"""Operations whose backward has results or nothing in place of its inputs."""
PARTS = 16
"""A part of a call is this share of its first axis."""
SMALL_RESULT, DRAWS = 64, 8
"""Elements up to which the rounding bound of a result is the largest of several random roundings, and their number."""


class Observed(NamedTuple):
    """A forward or backward pass of an operation: its inputs and outputs.

    Attributes:
        operation: an `ops._operation.Operation`.
        call: the validated call, without the fields that backward drops.
        result: all results of a forward pass, the kept results of a backward pass.
        grads, wanted, gradients: of backward, None for a forward pass.
        copied: whether hooks of saved tensors may put copies in place of what backward reads.
    """

    operation: Any
    call: Any
    result: Any
    grads: Any = None
    wanted: Any = None
    gradients: Any = None
    copied: bool = False

    @property
    def direction(self) -> str:
        return "forward" if self.grads is None else "backward"

    def named(self) -> Iterator[tuple[str, Tensor, bool]]:
        """The outputs: name, tensor, and whether it is a gradient."""
        operation = self.operation
        if self.grads is not None:
            for name, gradient, wanted in zip(operation.names, self.gradients, self.wanted, strict=False):
                if wanted and gradient is not None and gradient.numel():
                    yield f"gradient of {name.rpartition('.')[2]}", gradient, True
            return
        if operation.result is None:
            yield "output", self.result, False
            return
        fields = operation.result._fields
        for index, (field, tensor) in enumerate(zip(fields, self.result, strict=False)):
            ahead = field in ("dx", "dweight", "dbias")
            if (index < operation.public or ahead) and tensor is not None and tensor.numel():
                yield f"sum of {field}" if ahead else field, tensor, ahead

    def of_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """The gradients of parameters, which are sums over rows."""
        if self.grads is not None:
            for name, gradient, _ in self.named():
                if name.removeprefix("gradient of ") not in ROWS:
                    yield name, gradient

    def checked(self) -> Iterator[tuple[str, Tensor, bool]]:
        """The outputs, and the results that forward keeps for backward alone."""
        yield from self.named()
        operation, result = self.operation, self.result
        if self.grads is None and operation.result is not None:
            if getattr(result, "lse", 0) is None and result.statistics is not None:  # each row's maximum and logarithm
                result = result._replace(lse=result.statistics.double().sum(2), statistics=None)
            for index in operation.kept_results:
                if index >= operation.public and is_floating(result[index]) and result[index].numel():
                    yield f"{result._fields[index]} for backward", result[index], False

    def tensors(self) -> list[Tensor]:
        """The floating-point inputs."""
        return [leaf for leaf in pytree.tree_leaves((self.call, self.grads)) if is_floating(leaf)]

    def kept(self) -> Iterator[tuple[str, Tensor]]:
        """What backward reads of the values of forward, of floating point; a loss may write to its results."""
        operation = self.operation
        shapes_only = self.call.described()
        fields = zip(operation.fields, operation.flat(self.call), strict=True)
        named = [(name, x) for name, x in fields if name not in shapes_only]
        if not operation.name.endswith("cross_entropy"):
            results = {"output": self.result} if operation.result is None else self.result._asdict()
            named += results.items()
        return ((name.rpartition(".")[2], x) for name, x in named if is_floating(x))

    def part(self, start: int, stop: int) -> Observed | None:
        """The pass of these indices of the first axis; None if it cannot be divided."""
        call, operation = self.call, self.operation
        first = next((getattr(call, name) for name in call._fields if name in ROWS), None)
        if first is None or first.dim() < 2 or operation.name.endswith("cross_entropy"):
            return None
        if getattr(call, "causal", False) and first.dim() < 3:  # rows of softmax
            return None
        length, rows = first.shape[0], slice(start, stop)

        def cut(x: Any) -> Any:
            return x[rows] if isinstance(x, Tensor) and x.dim() > 1 and x.shape[0] == length else x

        fields = {name: cut(getattr(call, name)) for name in call._fields if name in ROWS}
        scores = getattr(call, "scores", None)
        if scores is not None:
            given = {name: value for name, value in scores._asdict().items() if isinstance(value, Tensor)}
            if any(value.dim() < 2 or value.shape[0] not in (1, length) for value in given.values()):
                return None
            fields["scores"] = scores._replace(**{name: cut(value) for name, value in given.items()})
        result = self.result
        if self.grads is None:
            result = cut(result) if operation.result is None else type(result)(*map(cut, result))
        elif operation.result is None:
            result = cut(result)
        elif getattr(result, "summed", None) is not None:
            result = result._replace(summed=cut(result.summed))
        placed = zip(operation.names, self.gradients or (), strict=False)
        gradients = [cut(value) if name in ROWS else None for name, value in placed]
        grads = None if self.grads is None else tuple(map(cut, self.grads))
        return Observed(operation, call._replace(**fields), result, grads, self.wanted, gradients)

    def columns(self, start: int, stop: int) -> Observed:
        """The pass of these columns of a linear layer's output: all that its weight's gradient sums over."""
        call, columns = self.call, slice(start, stop)
        bias = None if call.bias is None else call.bias[columns]
        call = call._replace(weight=call.weight[columns].contiguous(), bias=bias)
        result = type(self.result)(*(None if x is None else x[..., columns] for x in self.result))
        grads, gradients = self.grads, self.gradients
        if grads is not None:
            grads = grads[0][..., columns].contiguous(), *grads[1:]
            rows = [None if gradient is None else gradient[columns] for gradient in gradients[1:]]
            gradients = [None, *rows]
        return self._replace(call=call, result=result, grads=grads, gradients=gradients)

    def recomputed(self, change: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """The outputs of the backend "torch" with every tensor changed, by name."""

        def changed(x: Any) -> Any:
            if isinstance(x, torch.dtype):  # of the products of a loss
                return change(torch.empty(0, dtype=x)).dtype
            return change(x) if is_floating(x) else x

        call, result, grads = pytree.tree_map(changed, (self.call, self.result, self.grads))
        if getattr(call, "seed", None) is not None:  # a replay writes to it, and masks are cached by the tensor
            call = call._replace(seed=call.seed.clone())
        operation = self.operation
        found = dispatch.kernels_of(operation, "torch")
        if grads is None:
            computed = found.of(call).forward(call)
            return {name: x for name, x, _ in self._replace(call=call, result=computed).checked()}
        if getattr(result, "summed", None) is not None:  # a norm after an addition
            alone = call._replace(x=result.summed, residual=None, seed=None)
            call = call._replace(x=result.summed)
            result = found.of(alone).forward(alone)._replace(summed=result.summed)
        elif not (
            operation.name in RESULTS_OF_INPUTS
            or getattr(call, "kind", "") == "relu"
            or getattr(result, "dx", None) is not None
        ):
            result = found.of(call).forward(call) if operation.kept_results else None
        gradients = found.of(call).backward(call, result, grads, self.wanted)
        return {name: x for name, x, _ in self._replace(gradients=gradients).named()}


class Checked(NamedTuple):
    """One tensor of a checked pass: its name, its errors and the share of its budget; infinite if it is not finite
    where PyTorch's result is."""

    name: str
    errors: Errors
    share: float


def check(observed: Observed) -> list[Checked]:
    """Recompute a pass in float64 and measure each tensor that came out."""
    named = list(observed.checked())
    if not named:
        return []
    device = named[0][1].device.type
    first = observed.call[0] if is_floating(observed.call[0]) else (observed.grads or observed.tensors())[0]
    dtype = first.dtype
    with torch.no_grad(), torch.autocast(device, enabled=False):
        exact = observed.recomputed(Tensor.double)
        eager = observed.recomputed(lambda x: x)

        @functools.cache
        def rounded(seed: int = 0) -> dict[str, Tensor]:
            generator = torch.Generator().manual_seed(seed)
            unit = torch.finfo(dtype).eps

            def shaken(x: Tensor) -> Tensor:
                noise = torch.rand(x.shape, generator=generator, dtype=torch.float64).to(x.device)
                return x.double() * (1.0 + unit * (2.0 * noise - 1.0))

            with RandomRounding(dtype, seed):
                return observed.recomputed(shaken)

        def largest(name: str) -> Tensor:
            """The result with random rounding. In a mean roundings may cancel: of several, the least accurate one."""
            drawn = [rounded(seed)[name] for seed in range(1 if exact[name].numel() > SMALL_RESULT else DRAWS)]
            return max(drawn, key=lambda x: rms_of(_finite(x - exact[name])))

        sizes = [float(_finite(exact[name]).abs().max()) for name, _, gradient in named if gradient and name in exact]
        found = []
        for name, got, gradient in named:
            if name not in exact or exact[name].shape != got.shape:  # one backend computes or stores it, or lays it out
                continue
            want, plain = exact[name], eager[name]
            size = max(sizes) if gradient else _of_terms(name, exact)
            factor = GRADIENT_FACTOR if gradient else OUTPUT_FACTOR
            errors = measure(got, want, plain, factor, dtype, size, None, functools.partial(largest, name))
            if errors.rms > errors.limit:  # a gradient that is the difference of its terms, such as 0
                bound = factor * rms_of(largest(name) - want)
                errors = errors._replace(limit=max(errors.limit, bound))
            if got.numel() == 1:  # the RMS error is the largest error, which has a limit already
                errors = errors._replace(limit=max(errors.limit, errors.budget))
            wrong = (torch.isfinite(got) != torch.isfinite(want)) & torch.isfinite(plain)
            found.append(Checked(name, errors, torch.inf if bool(wrong.any()) else errors.share))
    return found


def _of_terms(name: str, exact: dict[str, Tensor]) -> float | None:
    """The magnitude of the terms of a norm's mean, which may cancel; None for other outputs."""
    rstd = exact.get("rstd for backward")
    if name != "mean for backward" or rstd is None:
        return None
    return float(_finite(torch.maximum(exact[name].abs(), rstd.reciprocal())).max())


def non_finite_row(tensors: Sequence[Tensor]) -> tuple[int, ...] | None:
    """The index, in all axes but the last, of the first non-finite element; None if there is none."""
    for x in tensors:
        if is_floating(x) and x.numel() and not bool(torch.isfinite(x).all()):
            return tuple(torch.nonzero(~torch.isfinite(x))[0].tolist()[: max(x.dim() - 1, 0)])
    return None


def _finite(x: Tensor) -> Tensor:
    return x.masked_fill(~torch.isfinite(x), 0.0)


def is_floating(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()
