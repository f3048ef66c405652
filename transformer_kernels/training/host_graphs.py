"""A step on the CPU as one list of calls: recorded once, then repeated on the same memory without the Python around it.

What a CUDA graph is to a GPU. Of a small model's step a good part is Python and its memory: checks, routes, autograd's
graph, allocations whose pages the system must first clear. A replay is a loop over kernels of this package, whose
arguments are addresses, and operators of PyTorch, which write where they wrote while they were recorded.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from transformer_kernels._dispatch import OPERATIONS
from transformer_kernels.backends import cpu

ALLOCATIONS = {f"aten::{name}" for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")}
COPIES = {"aten::_to_copy", "aten::clone"}
REFUSED_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}

Work = Callable[[], Tensor]


class HostGraphs:
    """`Graphs` of the CPU: all of them in one memory, which each overwrites. Recording a step also computes it."""

    def __init__(self) -> None:
        self._memory = Memory()
        self._recording: Recording | None = None

    def side_stream(self) -> AbstractContextManager:
        return nullcontext()

    def run(self, work: Work) -> Tensor:
        return work()

    def on_host(self, function: Callable[..., None]) -> Callable[..., None]:
        """The function, for use in a step: it may read values, and a replay calls it again."""

        def called(*arguments: Any) -> None:
            if self._recording is None:
                function(*arguments)
            else:
                self._recording.on_host(function, arguments)

        return called

    def capture(self, work: Work) -> Work:
        """Run the work and record it; the first replay returns this run's result.

        Raises:
            RuntimeError: it reads a value on the host, or the shape of a result depends on values.
        """
        state = torch.get_rng_state()
        recording = self._recording = Recording(self._memory)
        try:
            with cpu.recorded(recording.calls), recording:
                result = work()
        except RuntimeError:
            torch.set_rng_state(state)
            raise
        finally:
            self._recording = None
        computed = True

        def replay() -> Tensor:
            nonlocal computed
            if not computed:
                recording.repeat()
            computed = False
            return result

        return replay


class Memory:
    """Storages of recorded steps, kept for good, so that addresses stay valid; later tensors take those that are free.

    A storage is free when all tensors in it are those that recordings hold: each writes it before it reads it.
    """

    def __init__(self) -> None:
        self.recordings: WeakSet[Recording] = WeakSet()
        self._by_size: dict[int, list[torch.UntypedStorage]] = defaultdict(list)
        self._addresses: set[int] = set()

    def placed(self, tensor: Tensor) -> Tensor:
        """The tensor, which has just been made, with its values moved to a storage that is free if there is one."""
        own = tensor.untyped_storage()
        if own.nbytes() == 0 or own.data_ptr() in self._addresses:
            return tensor
        storages = self._by_size[own.nbytes()]
        free = next((each for each in reversed(storages) if self._is_free(each)), own)
        if free is own:
            self._addresses.add(own.data_ptr())
        else:
            storages.remove(free)
            free.copy_(own)
            tensor.set_(free, tensor.storage_offset(), tensor.shape, tensor.stride())  # type: ignore[arg-type]
        storages.append(free)  # the last one used is the likeliest to be in a cache
        return tensor

    def _is_free(self, storage: torch.UntypedStorage) -> bool:
        held = sum(recording.held[storage.data_ptr()] for recording in self.recordings)
        return torch._C._storage_Use_Count(storage._cdata) == 1 + held


class Recording(TorchDispatchMode):
    """Computes what is called and notes how to repeat it.

    Attributes:
        calls: functions and their arguments, in order; `cpu.recorded` adds the kernels that operations call.
        held: how many tensors it holds in the storage at each address.
    """

    def __init__(self, memory: Memory) -> None:
        super().__init__()
        self.calls: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
        self.held: Counter[int] = Counter()
        self._memory = memory
        memory.recordings.add(self)
        self._kept: list[Any] = []  # memory from elsewhere whose addresses kernels were given

    def repeat(self) -> None:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            for function, arguments in self.calls:
                function(*arguments)

    def on_host(self, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        """Call a function that may read values, unwatched."""
        with torch.utils._python_dispatch._disable_current_modes():
            function(*arguments)
            self.calls.append((function, self._aliases(arguments)))

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function.namespace == "transformer_kernels":
            return self._operation(function._schema.name.partition("::")[2], args)
        name = function._schema.name
        if _depends_on_values(function, args):
            raise RuntimeError(f"{name} reads values on the host")
        with self:  # what an operator is composed of is recorded in its place
            result = function.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        result = function(*args, **kwargs)
        if name in ALLOCATIONS:
            return self._memory.placed(result)
        written = _tensors(result)
        if function._schema.is_mutable:
            self.calls.append((partial(function, **self._aliases(kwargs)), self._aliases(args)))
        elif written and not function.is_view and not _share_memory(written, _tensors((args, kwargs))):
            self._note(function, args, kwargs, written)
        return result

    def _operation(self, name: str, arguments: tuple[Any, ...]) -> Any:
        """One of this package's: its kernels and what else it calls are recorded, not the operation."""
        self._kept.append(self._aliases(arguments))
        with self:
            if name.endswith("_backward"):
                return OPERATIONS[name.removesuffix("_backward")].run_backward(*arguments)
            operation = OPERATIONS[name]
            if operation.check_when_run is not None:
                self.on_host(operation.check_when_run, (operation.call(*arguments[:-1]),))
            outputs = operation.compute(*arguments)
            if isinstance(outputs, Tensor):
                return outputs
            return tuple(each.detach() for each in outputs)  # a tensor of its own for each, which autograd wants

    def _note(self, function: Any, args: Any, kwargs: Any, written: list[Tensor]) -> None:
        """How to compute results again where they are."""
        for each in written:
            self._memory.placed(each)
        results, inputs, options = self._aliases(written), self._aliases(args), self._aliases(kwargs)
        if function._schema.name in COPIES:
            self.calls.append((results[0].copy_, (inputs[0],)))
            return
        into = _into(function, len(results))
        if into is not None:
            writing, names = into
            self.calls.append((partial(writing, **options, **dict(zip(names, results, strict=True))), inputs))
            return

        def again() -> None:
            for old, new in zip(results, _tensors(function(*inputs, **options)), strict=True):
                old.copy_(new)

        self.calls.append((again, ()))

    def _aliases(self, values: Any) -> Any:
        """The values with tensors of its own on the same memory."""
        return pytree.tree_map(lambda value: self._alias(value) if isinstance(value, Tensor) else value, values)

    def _alias(self, tensor: Tensor) -> Tensor:
        self.held[tensor.untyped_storage().data_ptr()] += 1
        return tensor.detach()


def _depends_on_values(function: Any, args: Any) -> bool:
    """Whether what an operator returns to the host, or the shape of its result, depends on values of tensors."""
    if function._schema.name == "aten::index":  # by numbers it does not, by masks it does
        return any(each.dtype in (torch.bool, torch.uint8) for each in _tensors(args[1]))
    return not REFUSED_TAGS.isdisjoint(function.tags)


def _tensors(values: Any) -> list[Tensor]:
    return [each for each in pytree.tree_leaves(values) if isinstance(each, Tensor)]


def _share_memory(results: list[Tensor], inputs: list[Tensor]) -> bool:
    """Whether the results only look at what the inputs hold."""
    addresses = {each.untyped_storage().data_ptr() for each in inputs}
    return all(each.untyped_storage().data_ptr() in addresses for each in results)


def _into(function: Any, results: int) -> tuple[Any, list[str]] | None:
    """The overload of an operator that writes its results into given tensors, and the names of these arguments."""
    wanted = [(each.name, str(each.type)) for each in function._schema.arguments]
    for name in function.overloadpacket.overloads():
        overload = getattr(function.overloadpacket, name)
        arguments = overload._schema.arguments
        names = [each.name for each in arguments if each.is_out]
        if len(names) == results and wanted == [(each.name, str(each.type)) for each in arguments if not each.is_out]:
            return overload, names
    return None
