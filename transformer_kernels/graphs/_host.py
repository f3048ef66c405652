"""CPU recordings, the counterpart of CUDA graphs: a step as a list of calls that is replayed on the same memory.

A replay skips validation, dispatch, autograd and allocation. It is a loop over kernels of this package, whose arguments
are addresses, and PyTorch's operators, which write to the memory of the recording.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from transformer_kernels.backends import cpu
from transformer_kernels.backends.dispatch import OPERATIONS
from transformer_kernels.graphs._effects import (
    ANNOTATIONS,
    COLLECTIVES,
    COMPLETED_BY_WAITING,
    Repeated,
    completed,
    host_result,
    is_declared,
    only_views,
    plain,
)
from transformer_kernels.graphs._fsdp import keep_gathered_weights
from transformer_kernels.graphs._fusion import fused
from transformer_kernels.graphs._memory import Held, Memory, address, change, extent, flat, identity, memory_of, tensors

ALLOCATIONS = {f"aten::{name}" for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")}
COPIES = {"aten::_to_copy", "aten::clone"}
ZEROS = {"aten::zeros", "aten::zeros_like", "aten::new_zeros"}
ONES = {"aten::ones", "aten::ones_like", "aten::new_ones"}
REFUSED_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}

EXITS = {Tensor.numpy: "Tensor.numpy", Tensor.__array__: "Tensor.__array__", Tensor.__dlpack__: "Tensor.__dlpack__"}
READERS = {
    **dict.fromkeys(("tolist", "tensor", "as_tensor", "asarray"), 0),
    **dict.fromkeys(("tensor_split", "_pack_padded_sequence", "_pad_packed_sequence"), 1),
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), 1),  # with the batch sizes of a packed sequence
}
"""Functions that read memory without calling the dispatcher, and the index of the argument that they read."""

Work = Callable[[], Any]
"""Returns tensors, in any nesting of lists, tuples and dicts."""

Written = dict[int, tuple[Tensor, Tensor]]
"""Memory that a run has written to, by address, with its initial values."""

_drawing = threading.RLock()
"""Prevents replays in other threads from drawing random numbers during the validation of a recording."""


class HostGraphs:
    """`Graphs` for the CPU. All recordings share one memory. Recording a step also runs it.

    Each recording is validated: after a first run the work is recorded on changed values of its inputs and of the
    tensors it writes. The recording is replayed from these values and from the initial state, on poisoned memory, and
    must reproduce results, weights and random numbers of both runs. A call that is left out shows even if it changed
    nothing in the first run.
    """

    def __init__(self, agreed: Callable[[bool], bool] = bool) -> None:
        """`agreed`: whether the capture succeeded in every process that takes part in the work, given this one."""
        self._memory = Memory()
        self._recording: Recording | None = None
        self._values_are_changed = False
        self._agreed = agreed

    def side_stream(self) -> AbstractContextManager:
        return nullcontext()

    def run(self, work: Work) -> Any:
        return work()

    def on_host(self, function: Callable[..., None]) -> Callable[..., None]:
        """The function in a form that a step may call: it may read values, and each replay calls it."""

        def observe(*arguments: Any) -> None:
            if not self._values_are_changed:
                function(*arguments)

        def called(*arguments: Any) -> None:
            if self._recording is None:
                function(*arguments)
            else:
                self._recording.on_host(observe, arguments)

        return called

    def has_read(self, tensor: Tensor) -> bool:
        """Whether a call of the current recording has this tensor's memory among its arguments."""
        return self._recording is not None and self._recording.references[address(tensor)] > 0

    def capture(self, work: Work, inputs: Sequence[Tensor] = ()) -> Work:
        """Run the work and record it; the first replay returns this run's result.

        Args:
            work: runs twice.
            inputs: private copies of its arguments, whose values are changed meanwhile.

        Raises:
            RuntimeError: the work reads a value on the host, the shape of a result depends on values, or the recording
                does not reproduce it. Its writes are undone.
        """
        with _drawing, keep_gathered_weights():
            replay = self._capture(work, inputs)
        _return_freed_memory()
        return replay

    def _capture(self, work: Work, inputs: Sequence[Tensor]) -> Work:
        validated = False
        recording: Recording | None = None
        try:
            before, outcome, collective = self._first_run(work)
            created = self._memory.disown()
            recording, result = self._recorded(work, before, inputs, collective)
            if not created.isdisjoint(before):
                raise RuntimeError("it writes to memory that its first call has created; run it eagerly before")
            recording.validate(result, outcome)
            validated = True
            if not self._agreed(True):
                raise RuntimeError("another process cannot capture it")
        except RuntimeError:
            if recording is not None:
                recording.undo()
            if not validated:
                self._agreed(False)
            raise
        recording.before = {}
        computed = True

        def replay() -> Any:
            nonlocal computed
            if not computed:
                recording.held.check_before_replay()
                with _drawing if recording.draws else nullcontext():
                    recording.repeat()
            computed = False
            return result

        return replay

    def _first_run(self, work: Work) -> tuple[Written, Outcome, bool]:
        """Run the work and undo it; returns its writes, its outputs, and whether it calls collectives."""
        trial = Recording(self._memory, {})
        try:
            outcome = trial.outcome(self._run(work, trial))
        finally:
            trial.undo()
        return trial.before, outcome, trial.collective

    def _recorded(
        self, work: Work, before: Written, inputs: Sequence[Tensor], collective: bool
    ) -> tuple[Recording, Any]:
        """A recording of the work, validated on changed values, and its result; all values are then as before.

        If the work does not accept the changed values, it is recorded on its own. Not if it calls collectives: other
        processes may have accepted theirs, and must call as many.
        """
        values = [tensor.clone() for tensor in inputs]
        changed = [*inputs, *(tensor for tensor, _ in before.values())]
        recording = Recording(self._memory, before)

        def restore() -> None:
            recording.undo()
            for tensor, value in zip(inputs, values, strict=True):
                tensor.copy_(value)

        self._values_are_changed = True
        try:
            change(changed)
            result = self._run(work, recording)
        except Exception:
            restore()
            if collective:
                raise
        else:
            try:
                expected = recording.outcome(result)
                restore()
                change(changed)
                recording.validate(result, expected)
            finally:
                restore()
            return recording, result
        finally:
            self._values_are_changed = False
        recording = Recording(self._memory, before)
        try:
            return recording, self._run(work, recording)
        finally:
            recording.undo()

    def _run(self, work: Work, recording: Recording) -> Any:
        """Record the work; returns its result."""
        torch.clear_autocast_cache()  # whose casts of weights the recording would lack
        kernels = _recorded_kernels(recording.calls)
        self._recording = recording
        try:
            with kernels, recording, _Exits(recording):
                result = work()
        finally:
            self._recording = None
        recording.complete(result)
        recording.fuse()
        return result


class Outcome(NamedTuple):
    """Copies of the results of a run and of the memory that it has written, and the states of the generators after it.

    `states` is empty if no random numbers were drawn.
    """

    results: list[Tensor]
    written: list[Tensor]
    states: list[Tensor]


class Recording(TorchDispatchMode):
    """Runs operators and records calls that repeat them.

    Attributes:
        calls: functions and their arguments, in order; `cpu.recorded` appends the kernels that operations call.
        references: number of the recording's tensors that use the storage at each address.
        before: memory outside of the recording that the work has written to, by address, with its initial values.
        fixed: addresses of storages computed from constants only, such as positions: each replay computes the same, so
            they may be read on the host. A storage whose address is requested may be written, so it is removed.
        draws: whether random numbers are drawn.
        collective: whether collectives are called.
        held: the memory of the calls.
    """

    runs_compiled = False  # set once the graph route has compiled a graph

    def __init__(self, memory: Memory, before: Written) -> None:
        super().__init__()
        self.calls: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
        self.references: Counter[int] = Counter()
        self.before = before
        self.collective = False
        self.fixed: set[int] = set()
        self.draws = False
        self.held = Held()
        self._pending: dict[Repeated, list[Tensor]] = {}  # calls that may not have completed, and their tensors
        self._operation_name = ""  # of the operator whose call is being recorded
        self._began: list[tuple[int, int]] = []  # index of the next call, storage of a new tensor
        self._random: dict[torch.Generator, Tensor] = {torch.default_generator: torch.default_generator.get_state()}
        self._memory = memory
        memory.recordings.add(self)
        self._is_validated = False
        self._kept: list[Any] = []  # memory outside of the recording whose addresses kernels use

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Whether what torch.compile has made runs in a capture; else the eager program does, then and afterwards.

        The operators of the graph route can be recorded, Inductor's code cannot: the validation refuses it.
        """
        return cls.runs_compiled

    def complete(self, result: Any) -> None:
        """Wait for collectives at the end of the work.

        Raises:
            RuntimeError: memory that the recording uses has been freed or resized, or a result is no plain tensor.
        """
        self._finish()
        self.held.check()
        self._memory.check()
        self.held.keep(lambda tensor: tensor not in self._memory)
        for operand in tensors(result):
            if hasattr(operand, "__tensor_flatten__"):
                raise RuntimeError(f"it returns a {type(operand).__name__}; return its local tensor")

    def fuse(self) -> None:
        """Fuse calls; results are unchanged."""
        self.calls, replaced = fused(self.calls, self._began, lambda x: self._memory.is_free(x.untyped_storage()))
        self._kept.append(replaced)  # their tensors are counted in `references`
        self._began.clear()

    def repeat(self) -> None:
        with torch.enable_grad(), torch.autocast("cpu", enabled=False):  # nothing here requires a gradient
            for function, arguments in self.calls:
                function(*arguments)

    def undo(self) -> None:
        """Restore written memory and random number generators."""
        for tensor, value in self.before.values():
            if tensor.untyped_storage().nbytes() >= value.untyped_storage().nbytes():  # not freed since
                tensor.copy_(value)
        if self.draws:
            for generator, state in self._random.items():
                generator.set_state(state)

    def outcome(self, result: Any) -> Outcome:
        """The outcome of the run that was recorded, which returned `result`."""
        written = [tensor.clone() for tensor, _ in self.before.values()]
        states = [generator.get_state() for generator in self._random] if self.draws else []
        return Outcome([tensor.clone() for tensor in tensors(result)], written, states)

    def validate(self, result: Any, expected: Outcome) -> None:
        """Replay the work once from the initial state, on poisoned memory.

        Raises:
            RuntimeError: weights, results or random numbers differ from the expected ones.
        """
        results = tensors(result)
        self._memory.poison()
        for made in results:
            if made in self._memory:
                flat(made.untyped_storage(), torch.uint8).fill_(255)
        self._is_validated = True
        try:
            self.repeat()
        except Exception as error:
            raise RuntimeError(f"its recording cannot be replayed: {error}") from error
        finally:
            self._is_validated = False
        if not all(map(torch.equal, expected.states, [generator.get_state() for generator in self._random])):
            raise RuntimeError(
                "its replay draws other random numbers: during a capture that draws some, no other thread may draw from"
                " the same generator, and the function must not seed it"
            )
        written = [tensor for tensor, _ in self.before.values()]
        same = len(results) == len(expected.results) and all(map(_agree, results, expected.results))
        if not (same and all(map(_agree, written, expected.written))):
            raise RuntimeError(
                "its replay computes other values: part of it is neither an operator of PyTorch nor a kernel of the"
                " backend cpu, or its Python does not do the same in each call"
            )

    def on_host(self, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        """Call a function that may read values, and record it as one call."""
        with torch.utils._python_dispatch._disable_current_modes():
            self._finish()
            with _recorded_kernels([]):  # the kernels that it calls are not calls of the recording
                self._drawn(lambda: function(*arguments))
            self.calls.append((function, self._aliases(arguments)))
        self.fixed.difference_update(map(address, tensors(arguments)))

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # the subclass calls operators on the tensors that it consists of
        self._operation_name = function._schema.name
        if self._pending:
            self._finish(set(map(address, tensors((args, kwargs)))))
        if function.namespace == "transformer_kernels":
            return self._operation(function._schema.name.partition("::")[2], args)
        if not is_declared(function):
            return self._undeclared(function, args, kwargs)
        name = function._schema.name
        is_fixed = self.fixed.issuperset(map(address, tensors((args, kwargs))))
        if _depends_on_values(function, args) and not is_fixed:
            raise RuntimeError(f"{name} reads values on the host")
        with self:  # record the operators that it is composed of
            result = function.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        self._remember(function, args, kwargs)
        changes_layout = torch.Tag.inplace_view in function.tags
        resized = args[0].untyped_storage() if changes_layout else None
        before = extent(resized) if resized else (0, 0)
        call = partial(function, *args, **kwargs)
        result = self._drawn(call) if torch.Tag.nondeterministic_seeded in function.tags else call()
        if resized and before[1] and extent(resized) != before:
            raise RuntimeError(f"{name} resizes memory; recordings need memory that stays")
        if name in ALLOCATIONS:
            self.fixed.discard(address(self._placed(result)))
            return result
        written = tensors(result)
        shared = memory_of((args, kwargs)).issuperset(map(identity, written))
        if not (changes_layout or only_views(function)):
            if written and not shared:
                self._note(function, args, kwargs, written)  # batch_norm writes to its arguments too
            else:
                self.calls.append((partial(function, **self._aliases(kwargs)), self._aliases(args)))
        made = map(address, written)
        if is_fixed and torch.Tag.nondeterministic_seeded not in function.tags:
            self.fixed.update(made)
        else:
            self.fixed.difference_update(made)
        return result

    def _undeclared(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator that may write to any of its arguments, and record its call."""
        if function.namespace in ANNOTATIONS or only_views(function):
            return function(*args, **kwargs)
        if kind := host_result(function):
            raise RuntimeError(f"{self._operation_name} reads values on the host: it returns {kind}")
        self._remember(function, args, kwargs, every=True)
        given = tensors((args, kwargs))
        result = self._drawn(partial(function, *args, **kwargs))
        if self._operation_name in COMPLETED_BY_WAITING:
            result = completed(result)
        found, memory = plain(result), memory_of(given)
        is_collective = function.namespace in COLLECTIVES
        self.collective |= is_collective
        new: list[Tensor | None] = [None if identity(tensor) in memory else tensor for tensor in found]
        if not is_collective:
            new = [tensor if tensor is None else self._placed(tensor) for tensor in new]
        self.fixed.difference_update(map(address, found))
        call = Repeated(function, self._aliases(args), self._aliases(kwargs), result, self._aliases(new))
        self.calls.append((call.start, ()))
        self._pending[call] = [*given, *found]
        if not (is_collective and given):
            self._finish()
        return result

    def _finish(self, used: set[int] | None = None) -> None:
        """Record where pending calls, or those that use one of these storages, must have completed."""
        for call, own in list(self._pending.items()):
            if used is None or not used.isdisjoint(map(address, own)):
                call.finish(waited=True)
                self.calls.append((call.finish, ()))
                del self._pending[call]

    def observe(self, function: Callable[..., None], *arguments: Any) -> None:
        """Record a call, without running it now, of a function that reads its arguments and changes nothing."""

        def observed(*arguments: Any) -> None:
            if not self._is_validated:
                function(*arguments)

        self.calls.append((observed, self._aliases(arguments)))

    def _drawn(self, function: Callable[[], Any]) -> Any:
        """The function's result; notes whether it draws random numbers."""
        if self.draws:
            return function()
        before = [generator.get_state() for generator in self._random]
        result = function()
        self.draws = not all(map(torch.equal, before, [generator.get_state() for generator in self._random]))
        return result

    def _remember(self, function: Any, args: Any, kwargs: Any, *, every: bool = False) -> None:
        """Save what an operator may change: memory outside of the recording, random number generators.

        Args:
            every: it may write to all arguments, not only to those that its schema declares.
        """
        for generator in pytree.tree_leaves((args, kwargs)):
            if isinstance(generator, torch.Generator) and generator not in self._random:
                self._random[generator] = generator.get_state()
        if not (function._schema.is_mutable or every):
            return
        for index, argument in enumerate(function._schema.arguments):
            if not every and (argument.alias_info is None or not argument.alias_info.is_write):
                continue
            for tensor in tensors(args[index] if index < len(args) else kwargs.get(argument.name)):
                storage = tensor.untyped_storage()
                self.fixed.discard(storage.data_ptr())
                if tensor not in self._memory and storage.data_ptr() not in self.before:
                    whole = flat(storage, tensor.dtype)
                    self.before[storage.data_ptr()] = whole, whole.clone()

    def _operation(self, name: str, arguments: tuple[Any, ...]) -> Any:
        """Run an operation of this package and record its kernels and operators, not the operation itself."""
        self._kept.append(self._aliases(arguments))
        operation: Any = OPERATIONS[name.removesuffix("_backward")]
        backward = name.endswith("_backward")
        if operation.call.as_run is not None and cpu.unavailable(torch.device("cpu")) is None:
            outputs = self._by_values(operation, backward, arguments)
            if outputs is not None:
                return outputs
        with self:
            if backward:
                return operation.run_backward(*arguments)
            if operation.call.check_when_run is not None:
                self.on_host(operation.call.check_when_run, (operation.nested(arguments[:-1]),))
            outputs = operation.compute(*arguments)
            if isinstance(outputs, Tensor):
                return outputs
            return tuple(output.detach() for output in outputs)  # autograd requires a new tensor for each

    def _by_values(self, operation: Any, backward: bool, arguments: tuple[Any, ...]) -> tuple[Tensor, ...] | None:
        """Run an operation whose masks have a structure, and record it as one call, which reads its masks again."""

        def run(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> None:
            compute = operation.run_backward if backward else operation.compute
            for output, result in zip(outputs, compute(*operation.as_run(backward, arguments)), strict=True):
                output.copy_(result)

        with torch.utils._python_dispatch._disable_current_modes(), _recorded_kernels([]):
            if operation.as_run(backward, arguments) is arguments:
                return None
        with self:
            outputs = operation.empty(backward, arguments)
        self.on_host(run, (arguments, outputs))
        return tuple(output.detach() for output in outputs)  # autograd requires a new tensor for each

    def _note(self, function: Any, args: Any, kwargs: Any, written: list[Tensor]) -> None:
        """Record a call that recomputes the results in place."""
        memory = memory_of((args, kwargs))
        for tensor in written:
            if identity(tensor) not in memory:
                self._placed(tensor)
        if not any(tensor.numel() for tensor in written):
            return
        name, results = function._schema.name, self._aliases(written)
        if name in ZEROS or name in ONES:
            self.calls.append((results[0].fill_, (int(name in ONES),)))
            return
        if not torch.is_grad_enabled() and len(written) < len(function._schema.returns):
            function = torch.no_grad()(function)  # an LSTM layer has an additional result with gradients
        inputs, options = self._aliases(args), self._aliases(kwargs)
        if name in COPIES:
            self.calls.append((results[0].copy_, (inputs[0],)))
            return
        if name == "aten::randint":  # seeds: a step draws many, each in one call without Python
            *bounds, _ = inputs
            own = {"generator": options["generator"]} if "generator" in options else {}
            self.calls.append((partial(results[0].random_, **own), (0, *bounds)[-2:]))
            return
        into = _into(function, len(results)) if isinstance(function, torch._ops.OpOverload) else None
        if into is not None:
            writing, names = into
            self.calls.append((partial(writing, **options, **dict(zip(names, results, strict=True))), inputs))
            return
        self.calls.append((partial(_again, function), (results, inputs, options)))

    def _placed(self, tensor: Tensor) -> Tensor:
        if tensor not in self._memory:
            self._memory.placed(tensor)
            self._began.append((len(self.calls), address(tensor)))
        return tensor

    def _aliases(self, values: Any) -> Any:
        """The values, with new tensors on the same memory."""
        return pytree.tree_map(lambda value: self._alias(value) if isinstance(value, Tensor) else value, values)

    def _alias(self, tensor: Tensor) -> Tensor:
        self.references[address(tensor)] += 1
        alias = tensor.detach()
        self.held.add(alias, self._operation_name)
        return alias


class _Exits(TorchFunctionMode):
    """Rejects functions that read or export a tensor's memory without calling the dispatcher.

    A storage whose address is requested is assumed to be written.
    """

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._fixed = recording.fixed

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in EXITS:
            raise RuntimeError(f"{EXITS[function]} reads values on the host")
        if function is Tensor.data_ptr:
            self._fixed.discard(address(args[0]))
        elif (name := getattr(function, "__name__", "")) in READERS and self._reads(name, args):
            raise RuntimeError(f"{name} reads values on the host")
        return function(*args, **(kwargs or {}))

    def _reads(self, name: str, args: Any) -> bool:
        """Whether a function reads a tensor whose values a replay may change."""
        given = args[READERS[name] : READERS[name] + 1]
        if name.endswith(("tensor", "asarray")) and isinstance(given[0], Tensor):
            return False  # copied
        if name in ("lstm", "gru", "rnn_tanh", "rnn_relu") and getattr(given[0], "dtype", None) is not torch.int64:
            return False
        return not self._fixed.issuperset(map(address, tensors(given)))


def _return_freed_memory() -> None:
    """Return freed memory to the system: a capture copies the state of a step, and glibc keeps fragmented memory."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc
        if trim is not None:
            trim(0)


def _recorded_kernels(calls: list[Any]) -> AbstractContextManager[None]:
    """A context in which the kernels of the CPU that are called are appended to `calls`."""
    return nullcontext() if cpu.unavailable(torch.device("cpu")) else cpu.recorded(calls)


def in_one_piece(function: Callable[..., None], *arguments: Any) -> None:
    """Call a function that writes to its arguments, without gradients, recorded as one call.

    It may read values, and shapes of intermediate results may depend on values.
    """
    modes = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    recording = next((mode for mode in modes if isinstance(mode, Recording)), None)
    if recording is not None:
        recording.on_host(function, arguments)
    else:
        function(*arguments)


def _again(function: Callable[..., Any], results: list[Tensor], inputs: Any, options: Any) -> None:
    """Call an operator that cannot write to given memory, and copy its results there."""
    for old, new in zip(results, tensors(function(*inputs, **options)), strict=True):
        old.copy_(new)


def _depends_on_values(function: Any, args: Any) -> bool:
    """Whether an operator's host result, or the shape of its result, depends on values of tensors."""
    if function._schema.name == "aten::index":  # only for a boolean index
        return any(tensor.dtype in (torch.bool, torch.uint8) for tensor in tensors(args[1]))
    return not REFUSED_TAGS.isdisjoint(function.tags)


def _into(function: Any, results: int) -> tuple[Any, list[str]] | None:
    """The `out` overload of an operator, and the names of its output arguments."""
    wanted = [(argument.name, str(argument.type)) for argument in function._schema.arguments]
    for name in function.overloadpacket.overloads():
        overload = getattr(function.overloadpacket, name)
        arguments = overload._schema.arguments
        names = [argument.name for argument in arguments if argument.is_out and str(argument.type) == "Tensor"]
        if len(names) == results and wanted == [
            (argument.name, str(argument.type)) for argument in arguments if not argument.is_out
        ]:
            return overload, names
    return None


def _agree(found: Tensor, expected: Tensor) -> bool:
    """Bitwise equality, except for the rounding of libraries whose summation order depends on addresses."""
    if found.shape != expected.shape or found.dtype is not expected.dtype:
        return False
    if torch.equal(found, expected) or not (expected.is_floating_point() or expected.is_complex()):
        return torch.equal(found, expected)
    size = expected.abs().nan_to_num(0.0, 0.0, 0.0).max().item()
    return torch.allclose(found, expected, rtol=1e-3, atol=1e-3 * size, equal_nan=True)
