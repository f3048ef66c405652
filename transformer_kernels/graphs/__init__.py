"""Steps that are captured once and replayed: a CUDA graph on a GPU, a recording on a CPU.

    step = tk.graphed(train, optimizer)  # train(tokens, targets): forward, backward, clipping, optimizer.step()
    for tokens, targets in batches:
        loss = step(tokens, targets)

A replay runs the same kernels on the same addresses. Arguments are therefore copied into static buffers, learning rates
are tensors, weights and optimizer state are updated in place, and random numbers come from PyTorch's generators, which
each replay advances as the step would. `_state.py` compares everything else before each replay.

The first calls run eagerly: they load kernels and create the optimizer's state. Results are the same with and without
graphs: the capture of a CUDA graph computes nothing, and a CPU recording returns the result of the recorded call.
"""

from __future__ import annotations

import linecache
import threading
import traceback
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from transformer_kernels.backends import cpu, dispatch
from transformer_kernels.backends.dispatch import get_backend
from transformer_kernels.graphs._cuda import CudaGraphs
from transformer_kernels.graphs._host import HostGraphs, Work, in_one_piece, tensors
from transformer_kernels.graphs._state import State

__all__ = [
    "WARM_UP_CALLS",
    "Graphed",
    "Graphs",
    "Work",
    "dispatched_to_cpu",
    "graphed",
    "graphs_on",
    "in_one_piece",
    "tensors",
]

WARM_UP_CALLS = 3
GRAPH_LIMIT = 8
FRAMES_OF_OURS = tuple(str(Path(path).parent) for path in (torch.__file__, Path(__file__).parent))
WARN_AT = 2  # graphs of one shape dropped before their first replay

_thread = threading.local()
_capture_lock = threading.Lock()  # the validation of a recording resets random number generators


class Graphs(Protocol):
    """Runs work eagerly, or captures it for replay."""

    def side_stream(self) -> AbstractContextManager:
        """The stream for warm-up calls of captured work, including DistributedDataParallel."""
        ...

    def run(self, work: Work) -> Any:
        """Run the work eagerly on the side stream."""
        ...

    def capture(self, work: Work, inputs: Sequence[Tensor] = ()) -> Work:
        """Capture the work; returns its replay, whose result is in static memory. Must be replayed immediately.

        `inputs` are its arguments in static memory.
        """
        ...

    def on_host(self, function: Callable[..., None]) -> Callable[..., None]:
        """The function in a form that captured work may call."""
        ...

    def has_read(self, tensor: Tensor) -> bool:
        """Whether the current capture is known to have read a tensor."""
        ...


def dispatched_to_cpu(backend: str | None, device: torch.device) -> bool:
    """Whether calls of a model with this backend are dispatched to the cpu backend."""
    return (backend or get_backend()) in ("auto", "cpu") and cpu.unavailable(device) is None


def graphs_on(device: torch.device, *, distributed: bool = False, agreed: Callable[[bool], bool] = bool) -> Graphs:
    """The implementation of `Graphs` for a device.

    Args:
        device: of the work.
        distributed: whether NCCL is used.
        agreed: on a CPU, whether a capture succeeded in every process that takes part in the work, given this one.
    """
    return HostGraphs(agreed) if device.type == "cpu" else CudaGraphs(device, distributed=distributed)


@dataclass
class Captured:
    """A graph, the static tensors of its arguments and results, and its state at capture."""

    buffers: list[Tensor]
    replay: Work
    result: Any
    state: State
    replays: int = 0


class Graphed:
    """A function of tensors, captured for each frequent shape of its arguments and replayed. See `graphed`.

    Args:
        function: the function.
        optimizer: the optimizer that it steps, if any.
        graphs: the implementation; by default the one for the arguments' device.
        warm_up_calls: eager calls of each shape before it is captured.
        limit: maximum number of graphs; further shapes run eagerly.
        failed: called with the error of a failed capture. If it returns, capturing is disabled.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        optimizer: torch.optim.Optimizer | None = None,
        *,
        graphs: Graphs | None = None,
        warm_up_calls: int = WARM_UP_CALLS,
        limit: int = GRAPH_LIMIT,
        failed: Callable[[RuntimeError], None] | None = None,
    ) -> None:
        self._function, self._optimizer, self._graphs = function, optimizer, graphs
        self._warm_up_calls, self._limit = warm_up_calls, limit
        self._failed, self._gave_up = failed or _refuse, False
        self._eager_calls: Counter[Hashable] = Counter()
        self._unused: Counter[Hashable] = Counter()
        self._captured: defaultdict[Hashable, list[Captured]] = defaultdict(list)
        self._rates: dict[int, Tensor] = {}
        self._given: list[Tensor] = []  # the arguments of the current replay
        self._lock = threading.RLock()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The function's result, by replay if there is a graph for these arguments."""
        if getattr(_thread, "captures", False):  # called by another graphed function
            return self._work(*args, **kwargs)
        leaves, layout = pytree.tree_flatten((args, kwargs))
        with self._lock, torch.inference_mode(False):
            self._prepare_rates()
            key = (str(layout), _surroundings(), *map(_fixed, leaves))
            graph = self._matching(key, leaves)
            if graph is not None:
                self._given = tensors(leaves)
                for buffer, tensor in zip(graph.buffers, self._given, strict=True):
                    buffer.copy_(tensor, non_blocking=True)
                graph.replay()
                self._given = []
                graph.replays += 1
            else:
                graphs = self._checked_graphs(leaves)
                graph = self._captured_now(graphs, key, leaves, layout) if self._is_due(key) else None
            if graph is None:
                self._eager_calls[key] += 1
                return graphs.run(lambda: self._work(*args, **kwargs))
            return pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, graph.result)

    def _checked_graphs(self, leaves: list[Any]) -> Graphs:
        """The implementation; raises ValueError for arguments that no graph supports."""
        arguments = tensors(leaves)
        devices = {argument.device for argument in (*arguments, *self._parameters())}
        if len(devices) != 1:
            raise ValueError(f"graphed: tensors must be on one device; got {sorted(map(str, devices))}")
        if any(argument.requires_grad for argument in arguments):
            raise ValueError("graphed: an argument requires gradients, which cannot leave a graph; detach it")
        if self._graphs is None:
            self._graphs = graphs_on(devices.pop())
        return self._graphs

    def _work(self, *args: Any, **kwargs: Any) -> Any:
        if self._optimizer is None:
            try:
                with torch.no_grad():
                    return _checked(self._function(*args, **kwargs))
            except RuntimeError as error:
                if "does not require grad" not in str(error):
                    raise
                remedy = "without an optimizer the function runs without gradients: pass graphed(step, optimizer)"
                raise RuntimeError(f"graphed: {remedy}") from error
        try:
            with torch.enable_grad():
                return _checked(self._function(*args, **kwargs))
        finally:
            self._optimizer.zero_grad(set_to_none=True)

    def _parameters(self) -> list[Tensor]:
        groups = [] if self._optimizer is None else self._optimizer.param_groups
        return [parameter for group in groups for parameter in group["params"]]

    def _prepare_rates(self) -> None:
        """Copy learning rates into the tensors that graphs read; a rate that is already a tensor is kept."""
        if self._optimizer is None:
            return
        if any(parameter.grad is not None for parameter in self._parameters()):
            raise ValueError("graphed: a parameter has a gradient before the step; accumulate within the step")
        for number, group in enumerate(self._optimizer.param_groups):
            given, rate = group["lr"], self._rates.get(number)
            if given is rate or not group["params"]:
                continue
            device = group["params"][0].device
            exact = torch.float64 if device.type == "cpu" else torch.float32  # the dtype that CUDA's optimizers read
            if rate is None or (rate.dtype is not exact and not isinstance(given, Tensor)):
                keep = isinstance(given, Tensor) and given.device == device
                rate = given if keep else torch.tensor(float(given), dtype=exact, device=device)
                self._rates[number] = rate
            elif isinstance(given, Tensor):
                rate.copy_(given)
            else:
                rate.fill_(given)
            group["lr"] = rate

    def _state(self, leaves: list[Any]) -> State:
        roots = {f"argument {number}": leaf for number, leaf in enumerate(leaves) if not isinstance(leaf, Tensor)}
        return State({_name(self._function): self._function, **roots}, self._optimizer)

    def _matching(self, key: Hashable, leaves: list[Any]) -> Captured | None:
        """The graph for these arguments in the current state; other graphs are dropped unless of another mode."""
        graphs = self._captured.get(key, [])
        for graph in graphs:
            if graph.state.holds():
                return graph
        if not graphs:
            return None
        now = self._state(leaves)
        for graph in graphs[:]:
            changes = graph.state.changes(now)
            if not changes:
                now.written = graph.state.written
                graph.state = now
                return graph
            if not all(path.endswith(".training") for path in changes):
                graphs.remove(graph)
                self._eager_calls[key] = 0
                self._unused[key] += graph.replays == 0
                if graph.replays == 0 and self._unused[key] == WARN_AT:
                    what = graph.state.describe(changes[0], now)
                    warnings.warn(
                        f"graphed: graphs are dropped before they are replayed, because {what}; while that goes on,"
                        " more and more calls run eagerly",
                        stacklevel=3,
                    )
        return None

    def _is_due(self, key: Hashable) -> bool:
        wanted = self._warm_up_calls + 2 ** self._unused[key] - 1
        room = not self._gave_up and sum(map(len, self._captured.values())) < self._limit
        return room and self._eager_calls[key] >= wanted

    def _captured_now(self, graphs: Graphs, key: Hashable, leaves: list[Any], layout: Any) -> Captured | None:
        """A new graph for these arguments, replayed once; None if the capture failed and `failed` returned."""
        kept = [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(kept, layout)
        written: tuple[str, ...] = ()

        def work() -> Any:
            nonlocal written
            versions = [tensor._version for tensor in tensors(kept)]
            if dispatch.arguments_observer is not None:
                dispatch.arguments_observer(tensors(kept), lambda: self._given)
            result = self._work(*args, **kwargs)
            if versions != [tensor._version for tensor in tensors(kept)]:
                raise RuntimeError("it writes to an argument")
            written = _written(before, self._state(leaves), graphs)
            return result

        try:
            with _capturing(self._optimizer):
                before = self._state(leaves)
                replay = graphs.capture(work, tensors(kept))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self._failed(self._explained(error))
            self._gave_up = True
            return None
        result = replay()
        graph = Captured(tensors(kept), replay, result, self._state(leaves))
        graph.state.written = written
        self._eager_calls[key] = 0
        self._captured[key].append(graph)
        return graph

    def _explained(self, error: RuntimeError) -> RuntimeError:
        """The first line of an error, with its line of Python and the remedy."""
        reason = str(error).partition("\n")[0]
        if "reads values" in reason and self._optimizer is not None and not self._optimizer.defaults.get("fused"):
            reason += f" ({type(self._optimizer).__name__} does, unless it has fused=True)"
        explained = RuntimeError(reason + _line_of(error.__traceback__))
        explained.__cause__ = error
        return explained


def _written(before: State, after: State, graphs: Graphs) -> tuple[str, ...]:
    """Prefixes of the paths that captured work has written, which are not compared from then on.

    Raises:
        RuntimeError: the next call depends on them, and a replay would not write them.
    """
    changes = before.changes(after)
    for path in changes:
        what = before.describe(path, after)
        if path.startswith("optimizer.state") and path not in before.tokens:
            raise RuntimeError(f"{what}: the optimizer's state must exist; warm_up_calls must be at least 1")
        if path.startswith("optimizer.state"):
            raise RuntimeError(f"the optimizer counts in Python, where a replay does not ({what}); use a fused one")
        if path in before.tensors and graphs.has_read(before.tensors[path]):
            raise RuntimeError(f"it reads {path} and then replaces it; write to it in place, with copy_")
    return tuple(f"{path}{end}" for path in changes for end in ".[")


def _refuse(error: RuntimeError) -> NoReturn:
    raise RuntimeError(f"graphed: the function cannot be captured: {error}") from error.__cause__


def _line_of(trace: TracebackType | None) -> str:
    """The line of the user's code at which captured work raised an error: the innermost outside of PyTorch."""
    found, inside = "", False
    for frame, line in traceback.walk_tb(trace):
        file = frame.f_code.co_filename
        inside = inside or frame.f_code is Graphed._work.__code__
        if inside and not file.startswith(FRAMES_OF_OURS):
            source = linecache.getline(file, line).strip()
            found = f", at {file}:{line} in {frame.f_code.co_name}" + (f": {source}" if source else "")
    return found


def _surroundings() -> Hashable:
    """Settings of PyTorch and of this package that are constant in a graph."""
    autocast = tuple(
        (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in ("cpu", "cuda")
    )
    try:
        precision = torch.get_float32_matmul_precision()
    except RuntimeError:  # torch.backends' fp32_precision was set instead
        precision = torch.backends.cuda.matmul.fp32_precision
    modes = torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(), precision
    return autocast, get_backend(), dispatch.observer, cpu.is_reproducible(), modes


def _fixed(leaf: Any) -> Hashable:
    """The properties of an argument that are constant in a graph; distinguishes 0.0 from -0.0."""
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype, leaf.device, leaf.requires_grad
    return type(leaf), repr(leaf) if isinstance(leaf, float | complex) else leaf


@contextmanager
def _capturing(optimizer: torch.optim.Optimizer | None) -> Iterator[None]:
    """One capture at a time, without autocast's cache of weight casts.

    On a GPU the optimizer is marked as capturable: a fused one is, but PyTorch checks the flag.
    """
    groups = [] if optimizer is None else optimizer.param_groups
    groups = [
        group for group in groups if "capturable" in group and any(parameter.is_cuda for parameter in group["params"])
    ]
    before = [group["capturable"] for group in groups]
    with _capture_lock:
        for group in groups:
            group["capturable"] = True
        torch.clear_autocast_cache()
        _thread.captures = True
        try:
            yield
        finally:
            _thread.captures = False
            torch.clear_autocast_cache()
            for group, value in zip(groups, before, strict=True):
                group["capturable"] = value


def _checked(result: Any) -> Any:
    """The result without gradients.

    Raises:
        TypeError: part of it is neither a tensor nor None.
    """
    for leaf in pytree.tree_leaves(result):
        if not isinstance(leaf, Tensor | None):
            name = type(leaf).__name__
            remedy = "; a cache of keys and values cannot be replayed: pass use_cache=False" if "Cache" in name else ""
            raise TypeError(f"graphed: the function must return tensors; got {name}{remedy}")
    return pytree.tree_map(lambda leaf: None if leaf is None else leaf.detach(), result)


def graphed(
    function: Callable[..., Any],
    optimizer: torch.optim.Optimizer | None = None,
    *,
    warm_up_calls: int = WARM_UP_CALLS,
    limit: int = GRAPH_LIMIT,
) -> Callable[..., Any]:
    """The function, captured for each shape of its arguments and then replayed without running its Python code.

    On a GPU a call is one CUDA graph, on a CPU a list of the kernels and operators that it called, in memory of
    its own. The first `warm_up_calls` calls with arguments of a shape run eagerly. On a CPU the next call runs the
    function twice, the second time on changed values of its arguments and of the tensors it writes; the recording
    must reproduce weights and outputs of both. That call needs memory for three copies of what the function writes.

    With an optimizer the function is a training step: forward, one or more backward passes, clipping,
    `optimizer.step()`. Gradients are None before and after each call. Learning rates become tensors; each call uses
    the current values of `param_groups`. Without an optimizer the function runs under `torch.no_grad()`.

    The Python of the function runs only in eager calls: it must not count, print, or read values (`.item()`,
    `if tensor > 0`); return tensors and read them after the call.

    Before each replay, the state that the function reads besides its arguments is compared with the capture:

    - modules, wherever they are reached (closure, globals, default arguments, attributes, lists and dicts): layers,
      parameters, buffers, hooks, mode, class, `forward`, and attributes such as eps or a dropout's p;
    - the optimizer's groups, state and hooks; the backend, autocast, the default dtype and the precision of products;
    - variables of the closure, globals, attributes of objects, classes and Python modules that are named in its code
      or in the code of your functions that it calls; elements of lists, tuples, dicts and sets of up to 1,000.

    Values of tensors may change in place. After any other change, the function runs eagerly and is captured again
    after `warm_up_calls` calls; graphs of another mode (`eval()`) are kept. Not detected are: contents of NumPy
    arrays, of objects with `__slots__` or of extension types, and of PyTorch's own objects other than tensors,
    modules and optimizers; state read by functions of installed packages; files, time and environment; values read by
    address (pickle, ctypes); and on a GPU an attribute whose tensor the function itself replaces.

    Calls from several threads are serialised. During a capture of a function that draws random numbers, other threads
    must not draw from the same generator.

    On a CPU, collectives (`torch.distributed`) and operators of other libraries are recorded as calls, since their
    schemas do not declare all effects. Memory that the function uses must stay: a function that frees or resizes
    storages is rejected, except FSDP2, whose gathered weights stay allocated from the first capture on. With several
    processes all of them must capture the same call.

    Args:
        function: takes tensors of one device, and hashable constants, each of which has separate graphs, in any
            nesting of lists, tuples and dicts; returns tensors in the same way (a ModelOutput of transformers, too).
        optimizer: the optimizer that the function steps; fused (`torch.optim.AdamW(..., fused=True)`), or another
            whose step counters are tensors.
        warm_up_calls: eager calls of each shape before it is captured.
        limit: maximum number of graphs; further shapes run eagerly.

    Returns:
        a function of the same arguments, whose results are copies without gradients.

    Raises:
        ValueError: when called: an argument requires gradients, arguments are on several devices, or a parameter has a
            gradient before the step.
        TypeError: when called: part of the result is neither a tensor nor None.
        RuntimeError: when called: the function cannot be captured; the message has the reason and the line of
            Python. What it wrote to tensors is undone.

    Examples:
        >>> model = tk.build("char_gpt", layers=1, width=32, heads=2).eval()
        >>> predict = graphed(model)
        >>> predict(torch.randint(65, (1, 8))).shape
        torch.Size([1, 8, 65])
    """
    return Graphed(function, optimizer, warm_up_calls=warm_up_calls, limit=limit)


def _name(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)
