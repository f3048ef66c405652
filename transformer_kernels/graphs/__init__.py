"""Steps that are captured once and replayed: a CUDA graph on a GPU, a recording on a CPU.

    step = tk.graphed(train, optimizer)  # train(tokens, targets): forward, backward, clipping, optimizer.step()
    for tokens, targets in batches:
        loss = step(tokens, targets)

A replay repeats the same kernels on the same addresses. So arguments are copied into static buffers, learning rates are
tensors, weights and optimizer state are updated in place, and random numbers come from PyTorch's generators, which
each replay advances as far as the step itself would have.

A step is first run a few times as it is, and each of those runs is a real one on real data: it loads kernels, creates
the optimizer's state, and changes nothing that capturing would have to undo. Nothing is computed while a CUDA graph is
captured, and what is computed while a step is recorded on the CPU is the first replay's result, so a run gives the same
numbers with and without graphs.
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from transformer_kernels._dispatch import get_backend
from transformer_kernels.graphs._cuda import CudaGraphs
from transformer_kernels.graphs._host import HostGraphs, Work, in_one_piece, tensors

__all__ = [
    "WARM_UP_CALLS",
    "Graphed",
    "Graphs",
    "Work",
    "graphed",
    "graphs_on",
    "in_one_piece",
    "tensors",
]

WARM_UP_CALLS = 3
GRAPH_LIMIT = 8


class Graphs(Protocol):
    """Runs work now, or captures it for replay."""

    def side_stream(self) -> AbstractContextManager:
        """The stream on which captured work, and DistributedDataParallel around it, has to be prepared."""
        ...

    def run(self, work: Work) -> Any:
        """Run the work eagerly on the side stream."""
        ...

    def capture(self, work: Work) -> Work:
        """Capture the work; returns its replay, whose result lies in static memory. A replay must follow at once."""
        ...

    def on_host(self, function: Callable[..., None]) -> Callable[..., None]:
        """The function, to be called in work that is captured."""
        ...


def graphs_on(device: torch.device, *, distributed: bool = False) -> Graphs:
    """What captures work on a CPU or a CUDA device."""
    return HostGraphs() if device.type == "cpu" else CudaGraphs(device, distributed=distributed)


class Captured(NamedTuple):
    """A graph and the static tensors that it reads its arguments from."""

    buffers: list[Tensor]
    replay: Work


class Graphed:
    """A function of tensors, captured for each frequent shape of its arguments and replayed.

    A shape is captured after `warm_up_calls` eager calls; rarer shapes (a short last batch, an unusual padded length),
    and new ones once there are `limit` graphs, are run eagerly.

    Args:
        function: what to run.
        graphs: how to capture it.
        optimizer: the one that it steps, if any.
        warm_up_calls: eager calls of each shape before it is captured.
        limit: largest number of graphs.
        failed: called with the error of a failed capture, and may raise; if it does not, capturing is disabled.
        kind: () -> whatever else a graph fixes.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        graphs: Graphs,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        warm_up_calls: int = WARM_UP_CALLS,
        limit: int = GRAPH_LIMIT,
        failed: Callable[[RuntimeError], None],
        kind: Callable[[], Hashable] = tuple,
    ) -> None:
        self._function, self._graphs, self._optimizer = function, graphs, optimizer
        self._warm_up_calls, self._limit, self._kind = warm_up_calls, limit, kind
        self._failed, self._gave_up = failed, False
        self._seen: Counter[Hashable] = Counter()
        self._captured: dict[Hashable, Captured] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The function's result, by replay where there is a graph for such arguments."""
        leaves, layout = pytree.tree_flatten((args, kwargs))
        shape = (str(layout), self._kind(), *map(_fixed, leaves))
        if shape not in self._captured and self._is_due(shape):
            self._capture(shape, leaves, layout)
        captured = self._captured.get(shape)
        if captured is None:
            self._seen[shape] += 1
            return self._graphs.run(lambda: self._function(*args, **kwargs))
        for buffer, tensor in zip(captured.buffers, tensors(leaves), strict=True):
            buffer.copy_(tensor, non_blocking=True)
        return pytree.tree_map(lambda each: each.clone() if isinstance(each, Tensor) else each, captured.replay())

    def reset(self) -> None:
        """Drop all graphs: tensors that they read were replaced."""
        self._captured.clear()

    def _is_due(self, shape: Hashable) -> bool:
        room = not self._gave_up and len(self._captured) < self._limit
        return room and self._seen[shape] >= self._warm_up_calls

    def _capture(self, shape: Hashable, leaves: list[Any], layout: Any) -> None:
        kept = [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(kept, layout)
        try:
            with _capturable(self._optimizer):
                replay = self._graphs.capture(lambda: self._function(*args, **kwargs))
            if any(each._version for each in tensors(kept)):
                raise RuntimeError("it writes to an argument")
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self._failed(error)
            self._gave_up = True
            return
        self._captured[shape] = Captured(tensors(kept), replay)


def _fixed(leaf: Any) -> Hashable:
    """What a graph fixes of an argument."""
    return (leaf.shape, leaf.dtype, leaf.device) if isinstance(leaf, Tensor) else (type(leaf), leaf)


@contextmanager
def _capturable(optimizer: torch.optim.Optimizer | None):  # type: ignore[no-untyped-def]
    """The optimizer marked so on a GPU: a fused one always is, but PyTorch checks the flag."""
    groups = [] if optimizer is None else optimizer.param_groups
    groups = [group for group in groups if "capturable" in group and group["params"][0].is_cuda]
    before = [group["capturable"] for group in groups]
    for group in groups:
        group["capturable"] = True
    try:
        yield
    finally:
        for group, value in zip(groups, before, strict=True):
            group["capturable"] = value


def graphed(
    function: Callable[..., Any],
    optimizer: torch.optim.Optimizer | None = None,
    *,
    warm_up_calls: int = WARM_UP_CALLS,
    limit: int = GRAPH_LIMIT,
) -> Callable[..., Any]:
    """The function, captured for each shape of its arguments and then replayed without the Python around it.

    On a GPU a call is one CUDA graph, on a CPU a list of the kernels and operators that it called, on memory of its
    own. The first `warm_up_calls` calls with arguments of a shape are run as they are. A recording of the CPU is
    proved: repeated from where it began, it has to come to the same weights and results.

    With an optimizer the function is a training step: forward, backward, clipping, `optimizer.step()`, with several
    backward passes to accumulate over. Gradients are None before and after each call. Learning rates become tensors,
    and what a schedule or your loop writes into `param_groups` is what the next call uses; a value there other than the
    learning rate (OneCycleLR's momentum) has graphs of its own. Without an optimizer it is run under `torch.no_grad()`.

    What the function does in Python, it does only while it is run as it is: it must not count, print, or read values
    (`.item()`, `if tensor > 0`); return tensors and read them after the call. Numbers that it finds elsewhere, such as
    a dropout's `p`, are those of the capture. What else it reads besides its arguments, such as the weights of a model
    that only it knows, must stay where it is: changed in place, as optimizers and `load_state_dict` do.

    Args:
        function: takes tensors of one device, and hashable constants, each of which has graphs of its own, in any
            nesting of lists, tuples and dicts; returns tensors in the same way. The training flags of modules that it
            names (itself, its object's attributes, its closure, globals) are constants too.
        optimizer: the one that the function steps; fused (`torch.optim.AdamW(..., fused=True)`), or another that
            keeps all that it counts in tensors.
        warm_up_calls: calls of each shape before it is captured.
        limit: largest number of graphs; later shapes are run as they are.

    Returns:
        a function of the same arguments, whose results are copies without gradients.

    Raises (when called):
        ValueError: an argument requires gradients, arguments are on several devices, or a parameter has a gradient
            before the step.
        RuntimeError: the function cannot be captured; says why. Nothing it wrote stays.
    """
    return _Graphed(function, optimizer, warm_up_calls, limit)


class _Graphed:
    """What `graphed` returns."""

    def __init__(
        self, function: Callable[..., Any], optimizer: torch.optim.Optimizer | None, warm_up_calls: int, limit: int
    ) -> None:
        self._function, self._optimizer = function, optimizer
        self._options: dict[str, Any] = {"warm_up_calls": warm_up_calls, "limit": limit}
        self._run: Graphed | None = None
        self._rates: list[Tensor] = []
        self._held: tuple[Any, Hashable] = (None, ())
        self._modules: list[nn.Module] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        device = self._device(tensors((args, kwargs)))
        with torch.inference_mode(False):
            if self._run is None:
                work = self._forward if self._optimizer is None else self._step
                self._run = Graphed(
                    work,
                    graphs_on(device),
                    optimizer=self._optimizer,
                    failed=self._refuse,
                    kind=self._kind,
                    **self._options,
                )
            self._modules = list(_named_modules(self._function))
            self._forget_replaced()
            if self._optimizer is not None:
                self._prepare(self._optimizer)
            return self._run(*args, **kwargs)

    def _device(self, arguments: list[Tensor]) -> torch.device:
        devices = {each.device for each in arguments}
        if self._optimizer is not None:
            devices |= {each.device for each in _parameters(self._optimizer)}
        if len(devices) != 1:
            raise ValueError(f"graphed: tensors must be on one device; got {sorted(map(str, devices))}")
        if any(each.requires_grad for each in arguments):
            raise ValueError("graphed: an argument requires gradients, which cannot leave a graph; detach it")
        return devices.pop()

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return _checked(self._function(*args, **kwargs))

    def _step(self, *args: Any, **kwargs: Any) -> Any:
        assert self._optimizer is not None
        counted = _counted(self._optimizer)
        try:
            with torch.enable_grad():
                result = _checked(self._function(*args, **kwargs))
        finally:
            self._optimizer.zero_grad(set_to_none=True)
        if _counted(self._optimizer) != counted:
            raise RuntimeError(
                f"{type(self._optimizer).__name__} counts in Python, where a replay does not; use a fused optimizer"
            )
        return result

    def _prepare(self, optimizer: torch.optim.Optimizer) -> None:
        """Learning rates in the tensors that graphs read."""
        if any(each.grad is not None for each in _parameters(optimizer)):
            raise ValueError("graphed: a parameter has a gradient before the step; accumulate within the step")
        groups = optimizer.param_groups
        for group, rate in zip(groups, self._rates, strict=False):
            if group["lr"] is not rate:
                rate.fill_(group["lr"])
                group["lr"] = rate
        for group in groups[len(self._rates) :]:
            device = group["params"][0].device
            exact = torch.float64 if device.type == "cpu" else torch.float32  # which is what CUDA's optimizers read
            rate = torch.tensor(float(group["lr"]), dtype=exact, device=device)
            self._rates.append(rate)
            group["lr"] = rate

    def _forget_replaced(self) -> None:
        """No graph of tensors that the optimizer or a module has no more."""
        state, weights = None, []
        if self._optimizer is not None:
            state, weights = self._optimizer.state, _parameters(self._optimizer)
        for module in self._modules:
            weights = [*weights, *module.parameters(), *module.buffers()]
        places = tuple((each.data_ptr(), each.requires_grad) for each in weights)
        if (state is not self._held[0] or places != self._held[1]) and self._run is not None:
            self._run.reset()
        self._held = state, places

    def _kind(self) -> Hashable:
        flags = tuple(each.training for module in self._modules for each in module.modules())
        autocast = tuple((torch.is_autocast_enabled(each), torch.get_autocast_dtype(each)) for each in ("cpu", "cuda"))
        return (flags, autocast, get_backend(), () if self._optimizer is None else _settings(self._optimizer))

    def _refuse(self, error: RuntimeError) -> NoReturn:
        told = str(error).partition("\n")[0]
        if "reads values" in told and self._optimizer is not None and not self._optimizer.defaults.get("fused"):
            told += f" ({type(self._optimizer).__name__} does, unless it has fused=True)"
        raise RuntimeError(f"graphed: the function cannot be captured: {told}") from error


def _named_modules(function: Any) -> Iterator[nn.Module]:
    """The modules that a function names: itself, its object and that one's attributes, its closure, globals."""
    held: list[Any] = []
    while isinstance(function, functools.partial):
        held += [*function.args, *function.keywords.values()]
        function = function.func
    function = inspect.unwrap(function)
    owner = getattr(function, "__self__", function)
    held += [owner, *getattr(owner, "__dict__", {}).values()]
    if inspect.isfunction(function) or inspect.ismethod(function):
        with suppress(ValueError):  # a variable that has no value yet
            named = inspect.getclosurevars(function)
            held += [*named.nonlocals.values(), *named.globals.values()]
    return (each for each in held if isinstance(each, nn.Module))


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [each for group in optimizer.param_groups for each in group["params"]]


def _settings(optimizer: torch.optim.Optimizer) -> str:
    """What a graph fixes of an optimizer: all that stands in no tensor."""
    kept = [[each for each in group.items() if each[0] != "params"] for group in optimizer.param_groups]
    return str([[each for each in items if not isinstance(each[1], Tensor)] for items in kept])


def _counted(optimizer: torch.optim.Optimizer) -> str:
    """What it keeps in Python."""
    kept = [value for state in optimizer.state.values() for value in state.values()]
    return f"{_settings(optimizer)} {[value for value in kept if isinstance(value, int | float)]}"


def _checked(result: Any) -> Any:
    """The result without gradients.

    Raises:
        TypeError: part of it is neither a tensor nor None.
    """
    for each in pytree.tree_leaves(result):
        if not isinstance(each, Tensor | None):
            raise TypeError(f"graphed: the function must return tensors; got {type(each).__name__}")
    return pytree.tree_map(lambda each: None if each is None else each.detach(), result)
