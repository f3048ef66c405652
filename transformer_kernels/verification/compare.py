"""A model on these kernels beside the same model on PyTorch, module by module, each against a float64 copy."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from transformer_kernels.backends.dispatch import use_backend
from transformer_kernels.patching import Patched, accelerate, patch, unpatch
from transformer_kernels.verification.budget import GRADIENT_FACTOR, OUTPUT_FACTOR, measure
from transformer_kernels.verification.recompute import is_floating

MAX_ROWS = 18
"""Of the printed table; the others are counted."""
THE_MODEL = "(the model)"


class Compared(NamedTuple):
    """The output of a module or the gradient of a parameter: largest errors over the largest element of float64's.

    Attributes:
        name: of the module or the parameter; a module's second call has the suffix "#2".
        kind: "output" or "gradient".
        kernels, pytorch: the relative error of this package and of plain PyTorch.
        share: the error of this package over its budget: twice PyTorch's error (a gradient: three times), or, if it is
            larger, the error of PyTorch with weights rounded once more, plus one rounding.
    """

    name: str
    kind: str
    kernels: float
    pytorch: float
    share: float

    @property
    def closer(self) -> str:
        """ "kernels", "PyTorch" or "equal": which of the two is closer to float64."""
        if self.kernels == self.pytorch:
            return "equal"
        return "kernels" if self.kernels < self.pytorch else "PyTorch"

    @property
    def parts(self) -> bool:
        """Whether this package's error is more than rounding beside PyTorch's."""
        return not self.share <= 1.0


@dataclass(frozen=True, repr=False)
class Comparison:
    """The result of `compare`. It prints as a table.

    Attributes:
        rows: a `Compared` for each output, in the order of the forward pass, then for each gradient.
        computed_by: how the model was run on these kernels.
    """

    rows: tuple[Compared, ...]
    computed_by: str

    @property
    def first(self) -> Compared | None:
        """The first module, in the order of the forward pass, or else the last parameter, that is beyond rounding."""
        outputs = [row for row in self.rows if row.kind == "output" and row.parts]
        gradients = [row for row in reversed(self.rows) if row.kind == "gradient" and row.parts]
        return next(iter((*outputs, *gradients)), None)

    def __repr__(self) -> str:
        worst = sorted(self.rows, key=lambda row: row.share if row.share == row.share else torch.inf, reverse=True)
        chosen = {id(row) for row in worst[:MAX_ROWS]} | ({id(self.first)} if self.first else set())
        shown = [row for row in self.rows if id(row) in chosen]
        lines = [("module or parameter", "of", "kernels", "PyTorch", "closer", "of the budget")]
        lines += [
            (row.name, row.kind, f"{row.kernels:.1e}", f"{row.pytorch:.1e}", row.closer, f"{row.share:.2f}")
            for row in shown
        ]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        table = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
        rest = len(self.rows) - len(shown)
        return "\n".join(
            [table[0], "-" * max(map(len, table)), *table[1:], *[f"... {rest} more"] * bool(rest), str(self)]
        )

    def __str__(self) -> str:
        """The conclusion in one line."""
        counts = {kind: sum(row.closer == kind for row in self.rows) for kind in ("kernels", "PyTorch", "equal")}
        first = self.first
        where = "nowhere" if first is None else f"first at {first.name} ({first.kind}, {first.share:.3g} of the budget)"
        return (
            f"{self.computed_by}; closer to float64: kernels {counts['kernels']}, PyTorch {counts['PyTorch']}, "
            f"equal {counts['equal']}; beyond rounding: {where}"
        )


Loss = Callable[[Any], Tensor]


def compare(model: nn.Module, batch: Any, *, loss: Loss | None = None) -> Comparison:
    """Run a model on these kernels, on plain PyTorch and in float64, and compare outputs and gradients of each module.

    The model itself is not run and does not change: copies of it are, in evaluation mode, since PyTorch's dropout draws
    other masks. A model that was patched, or that calls this package (`build`, `nn`), runs as it is; another one is
    patched, and if there is nothing to patch it runs inside `accelerate`. The plain copy is unpatched, with
    `use_backend("torch")`. The float64 copy has the weights and inputs of the model, widened, and no autocast.

    Args:
        model: a module of torch.nn, transformers or this package, or written by hand; its parameters float32, float16
            or bfloat16, on any device.
        batch: the arguments of the model: a tensor, a tuple of arguments or a dict of keyword arguments.
        loss: the model's result -> the scalar whose gradients are compared; by default the `loss` of the result, if it
            has one, the result itself if that is a scalar, else the sum of its first tensor times fixed random numbers.

    Returns:
        a `Comparison`; print its repr for the table.

    Raises:
        TypeError: not a module or one that cannot be copied, or its result has no tensor of floating point, or its loss
            is no scalar tensor.
        ValueError: the model does not run in float64.

    Examples:
        >>> model = torch.nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
        >>> comparison = compare(model, torch.randn(2, 8, 32))
        >>> comparison.first is None
        True
    """
    if not isinstance(model, nn.Module) or isinstance(model, torch.jit.ScriptModule):
        raise TypeError(f"compare: model must be a torch.nn.Module; got {type(model).__name__}")
    with torch.inference_mode(False):
        return _compared(model, batch, loss)


def _compared(model: nn.Module, batch: Any, loss: Loss | None) -> Comparison:
    try:
        ours, plain = copy.deepcopy(model), copy.deepcopy(model)
    except (TypeError, RuntimeError) as error:
        raise TypeError(f"compare: the model cannot be copied: {str(error).partition(chr(10))[0]}") from error
    computed_by, around = _on_kernels(ours)
    _on_torch(plain)
    exact = copy.deepcopy(plain).double()
    device = next((parameter.device.type for parameter in model.parameters()), "cpu")
    got = _run(ours, batch, loss, around)
    with use_backend("torch"):
        eager = _run(plain, batch, loss, nullcontext())
        widened = pytree.tree_map(lambda x: x.double() if is_floating(x) else x, batch)
        try:
            wanted = _run(exact, widened, loss, torch.autocast(device, enabled=False))
        except RuntimeError as error:  # of a model that casts to another dtype by name
            reason = str(error).partition("\n")[0]
            raise ValueError(f"compare: the model does not run in float64, but in its own dtype: {reason}") from error

    @functools.cache
    def rounded() -> dict[str, Any]:
        with use_backend("torch"):
            return _run(_rounded(exact, plain), widened, loss, torch.autocast(device, enabled=False))

    rows = []
    for kind, factor in (("output", OUTPUT_FACTOR), ("gradient", GRADIENT_FACTOR)):
        found, plainly, truly = got[kind], eager[kind], wanted[kind]
        sizes = {name: _largest(value) for name, value in truly.items()}
        magnitude = max(sizes.values(), default=0.0) if kind == "gradient" else None
        for name, value in truly.items():
            if name in found and name in plainly and found[name].shape == value.shape == plainly[name].shape:
                dtype = found[name].dtype
                again = functools.partial(lambda kind, name: rounded()[kind][name], kind, name)
                errors = measure(found[name], value, plainly[name], factor, dtype, magnitude, None, again)
                size = sizes[name] or 1.0
                beyond = float("inf") if not torch.isfinite(found[name][torch.isfinite(value)]).all() else errors.share
                rows.append(Compared(name, kind, errors.error / size, errors.eager / size, beyond))
    return Comparison(tuple(rows), computed_by)


def _on_kernels(ours: nn.Module) -> tuple[str, AbstractContextManager[Any]]:
    """Let a copy run on these kernels; returns how, and the context in which it does."""
    if any(isinstance(module, Patched) for module in ours.modules()):
        return "the patched model", nullcontext()
    if any(_backend_attribute(module) for module in ours.modules()):
        return "the model's own calls", nullcontext()
    report = patch(ours)
    if report.patched:
        return f"{len(report.patched)} modules patched", nullcontext()
    return "inside accelerate()", accelerate()


def _on_torch(plain: nn.Module) -> None:
    """Unpatch a copy; its calls of this package follow `use_backend`."""
    unpatch(plain)
    for module in plain.modules():
        attribute = _backend_attribute(module)
        if attribute == "ops":
            module.ops = type(module.ops)(None)  # type: ignore[operator]
        elif attribute == "backend":
            module.backend = None  # type: ignore[assignment]


def _rounded(exact: nn.Module, plain: nn.Module) -> nn.Module:
    """A float64 copy whose weights are changed by up to a unit of rounding in the dtype of the plain one."""
    shaken, generator = copy.deepcopy(exact), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight, like in zip(shaken.parameters(), plain.parameters(), strict=True):
            noise = 2.0 * torch.rand(weight.shape, generator=generator, dtype=torch.float64) - 1.0
            weight.mul_(1.0 + torch.finfo(like.dtype).eps * noise.to(weight.device))
    return shaken


def _backend_attribute(module: nn.Module) -> str:
    """The attribute that names the backend of a module of this package; "" for any other module."""
    if hasattr(getattr(module, "ops", None), "backend"):
        return "ops"
    return "backend" if type(module).__module__ == "transformer_kernels.nn" and hasattr(module, "backend") else ""


def _largest(x: Tensor) -> float:
    """The largest finite element, in absolute value."""
    return float(x.abs().nan_to_num(0.0, 0.0, 0.0).max()) if x.numel() else 0.0


def _first(values: Any) -> Tensor | None:
    return next(filter(is_floating, pytree.tree_leaves(values)), None)


def _run(model: nn.Module, batch: Any, loss: Loss | None, around: AbstractContextManager[Any]) -> dict[str, Any]:
    """The first output of each call of a module, and the gradient of each parameter, by name."""
    outputs: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, result: Any) -> None:
            if (output := _first(result)) is not None:
                calls = sum(key.partition("#")[0] == name for key in outputs)
                outputs[f"{name}#{calls + 1}" if calls else name] = output.detach().clone()

        return hook

    hooks = [part.register_forward_hook(keep(name or THE_MODEL)) for name, part in model.named_modules()]
    model.eval().zero_grad()
    batch = pytree.tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, batch)  # it may be written to
    with torch.random.fork_rng(), torch.enable_grad(), around:
        torch.manual_seed(0)
        if isinstance(batch, Mapping):
            result = model(**batch)
        else:
            result = model(*batch) if isinstance(batch, tuple) else model(batch)
        scalar = _loss_of(result) if loss is None else loss(result)
        if not isinstance(scalar, Tensor) or scalar.numel() != 1:
            raise TypeError(f"compare: loss must return a scalar tensor; got {scalar!r:.80}")
        if scalar.requires_grad:  # a frozen model has outputs only
            scalar.backward()
    for hook in hooks:
        hook.remove()
    return {
        "output": outputs,
        "gradient": {
            name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None
        },
    }


def _loss_of(result: Any) -> Tensor:
    """The loss in a result, or a product of its first tensor with random numbers that every dtype represents."""
    found = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", None)
    output = _first(result if found is None else found)
    if output is None:
        raise TypeError(f"compare: the model's result has no tensor of floating point; got {type(result).__name__}")
    if output.dim() == 0:
        return output
    generator = torch.Generator().manual_seed(0)
    cotangent = torch.randn(output.shape, generator=generator).to(torch.bfloat16)
    return (output * cotangent.to(output)).sum()
