"""How one module is patched: its class becomes a subclass of itself whose `forward` calls the operations.

Nothing else changes: parameters, buffers, hooks and the name of the class are kept, so that state dicts,
`save_pretrained`, `isinstance` and lookups by class keep working, and unpatching is one assignment.
"""

from __future__ import annotations

import functools
import inspect
import math
import types
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, is_grad_enabled, nn

from transformer_kernels.backends.dispatch import BACKENDS, requested
from transformer_kernels.ops._crossovers import is_small, prefers_torch
from transformer_kernels.ops._foreign import SCALARS, UNPATCH, are_plain
from transformer_kernels.ops._plan import dispatch_modes
from transformer_kernels.patching._guard import guarded


class Patched:
    """Mixed into the class of a patched module. `backend` is the requested one; None follows the default."""

    backend: str | None = None
    _mixin: type
    _original: type[nn.Module]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """The class is made at run time: it is pickled and copied as its two base classes."""
        reduced: Any = super().__reduce_ex__(max(int(protocol), 2))
        return _blank, (type(self)._mixin, type(self)._original), *reduced[2:]

    def __prepare_scriptable__(self) -> Any:
        raise RuntimeError(f"torch.jit.script: {type(self).__name__} is patched and cannot be scripted; {UNPATCH}")


class Mixin(nn.Module):
    """The changed behaviour of a patched module of transformers; submodules are named as in the original class."""

    operation: str
    small_below = ""
    """The row of the table of crossovers with the sizes of the first argument for which the original forward runs on a
    CPU; "" where the operations of the forward decide themselves."""
    backend: str | None
    repeatable = False
    """Whether a call that raised has changed nothing: no submodule was called."""
    guards_itself = False
    """Whether its methods are right for any tensors and under any transform, so that `guarded` is not needed."""
    _arguments: tuple[str, ...]
    """The names of the parameters of the original forward after `self`, in order."""

    def by_name(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a call by the names of the original forward."""
        return {**dict(zip(self._arguments, args, strict=False)), **kwargs}

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


CHOICES = (None, "auto", *BACKENDS)
"""The valid values of a patched module's `backend`."""


class ByBackend(Mixin):
    """A copy of the original forward for each backend, which a subclass makes in `content`."""

    _by_backend: dict[str | None, Any]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.backend not in self._by_backend:
            requested(self.backend)  # raises ValueError
        return self._by_backend[self.backend](self, *args, **kwargs)


def _blank(mixin: Any, original: Any) -> nn.Module:
    made = patched_class(mixin, original)
    return made.__new__(made)


@functools.cache
def patched_class(mixin: Any, original: Any) -> type[nn.Module]:
    """The subclass of `original` that behaves as `mixin`, under the same name."""
    bases = (Patched, mixin) if issubclass(mixin, original) else (Patched, mixin, original)
    content = {"_mixin": mixin, "_original": original, "__module__": original.__module__, "__doc__": original.__doc__}
    if hasattr(mixin, "content"):
        content |= mixin.content(original)
    content["_arguments"] = tuple(inspect.signature(original.forward).parameters)[1:]
    forward, before = mixin.forward, original.forward
    if forward not in (before, nn.Module.forward):
        if not getattr(mixin, "guards_itself", False):
            repeatable = getattr(mixin, "repeatable", False)
            forward = guarded(_renamed(forward, before), getattr(mixin, "original_forward", before), repeatable)
        if mixin.small_below:
            forward = _left_if_small(forward, before, mixin)
        content["forward"] = _with_signature(forward, before)
    return cast(Any, type(original.__name__, bases, content))


def _renamed(ours: Any, original: Any) -> Any:
    """Our method, which takes the keywords of the original one."""
    mine, theirs = (list(inspect.signature(method).parameters.values()) for method in (ours, original))
    named = [parameter.name for parameter in mine if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    names = {given.name: name for name, given in zip(named, theirs, strict=False) if given.name != name}
    if not names:
        return ours

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return ours(self, *args, **{names.get(name, name): value for name, value in kwargs.items()})

    return forward


def _with_signature(function: Any, original: Any) -> Any:
    """A copy of the function with the signature of another, which trainers inspect to select columns of their data."""
    copied: Any = types.FunctionType(
        function.__code__, function.__globals__, original.__name__, function.__defaults__, function.__closure__
    )
    copied.__kwdefaults__, copied.__qualname__ = function.__kwdefaults__, original.__qualname__
    copied.__doc__, copied.__signature__ = original.__doc__, inspect.signature(original)
    return copied


def with_global(function: Any, name: str, value: Any) -> Any:
    """A copy of a function, under its decorators, in which one global name has another value."""
    inner = getattr(function, "__wrapped__", None)
    scope, closure = function.__globals__, function.__closure__
    if inner is None:
        scope = {key: found for key, found in scope.items() if key != "__name__"} | {name: value}  # it is no module's
    else:
        changed = with_global(inner, name, value)
        cells = (changed if cell.cell_contents is inner else cell.cell_contents for cell in closure or ())
        closure = tuple(types.CellType(content) for content in cells)
    copied: Any = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__, closure)
    copied.__kwdefaults__, copied.__module__ = function.__kwdefaults__, function.__module__
    if inner is not None:
        copied.__wrapped__ = changed
    return copied


def _left_if_small(ours: Any, original: Any, mixin: Any) -> Any:
    """The patched forward, or the original one for sizes that are PyTorch's by the row `mixin.small_below`, or by the
    one that `mixin.small_row` chooses for a call.

    A call in which a dropout draws random numbers counts as one with gradients, in which activation checkpointing
    repeats it.
    """
    argument = getattr(mixin, "small_argument", 0)
    row_of = getattr(mixin, "small_row", lambda self, args, kwargs: mixin.small_below)
    masked_row, tensors = getattr(mixin, "small_masked", None), getattr(mixin, "small_tensors", 0)
    as_before = getattr(mixin, "as_before", original)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        x: Any = args[argument] if len(args) > argument else next(iter(kwargs.values()), None)
        recorded = self.training or is_grad_enabled()
        for module in self._modules.values():
            recorded = recorded or (module is not None and module.training)
        if not is_small(row_of(self, args, kwargs), x, self.backend, recorded):
            return ours(self, *args, **kwargs)
        if masked_row is None or SCALARS.issuperset(map(type, (*args[tensors:], *kwargs.values()))):
            return as_before(self, *args, **kwargs)
        rows = x.numel() // x.shape[-1]
        if dispatch_modes() or not prefers_torch(masked_row, rows, x.dtype.itemsize, recorded=recorded):
            return ours(self, *args, **kwargs)  # a step that is recorded does not read values
        result = as_before(self, *args, **kwargs)
        out = result[0] if isinstance(result, tuple) else result
        return ours(self, *args, **kwargs) if math.isnan(out.detach().sum()) else result

    return forward


def parameters(module: Any) -> tuple[Any, Any]:
    """weight and bias of a module, in a tenth of the time of its attributes; those if it is parametrized."""
    found = module._parameters
    try:
        return found["weight"], found["bias"]
    except KeyError:
        return module.weight, module.bias


def flattened(module: Any, parts: bool = False) -> Any:
    """A module of the original class for one call of its forward, and of its patched `parts` that have no hooks.

    Its parameters and submodules are attributes of the instance, which are read in a tenth of the time.
    """
    flat: Any = object.__new__(vars(type(module)).get("_original", type(module)))
    own = vars(flat)
    own.update(vars(module), **module._parameters, **module._modules)
    own.update(getattr(type(module), "before", ()))
    for name, part in module._modules.items() if parts else ():
        if "_original" in vars(type(part)) and part.backend == module.backend and not has_hooks(part):
            own[name] = flattened(part)
    return flat


def swap(module: Any, mixin: type, backend: str | None) -> None:
    """Patch one module."""
    kind: Any = type(module)
    module.__class__ = patched_class(mixin, kind)
    module.backend = backend
    if hasattr(mixin, "_adopt"):
        module._adopt()


def restore(module: Any) -> None:
    """Undo `swap`."""
    if hasattr(module, "_release"):
        module._release()
    module.__class__ = type(module)._original
    del module.backend


def original_class(module: Any) -> Any:
    """The class of a module as it was before it was patched."""
    return getattr(type(module), "_original", type(module))


def replaced_method(module: Any) -> str | None:
    """A method of the module's class that this instance overrides."""
    return next((name for name in vars(module) if callable(vars(original_class(module)).get(name))), None)


def class_path(module: Any) -> str:
    kind = original_class(module)
    return f"{kind.__module__}.{kind.__qualname__}"


def is_plain(module: Any, *kinds: type) -> bool:
    """Whether a module behaves as its class, so that its computation may be fused elsewhere.

    Adapters replace modules, quantisation and sharding their class or their parameters, and offloading their `forward`;
    hooks must be called. All of these are called unchanged.
    """
    if original_class(module) not in kinds or "forward" in vars(module) or not are_plain(module._parameters.values()):
        return False
    return not has_hooks(module)


def has_hooks(module: Any) -> bool:
    """Whether a module has hooks, which must be called with it."""
    forward = module._forward_hooks or module._forward_pre_hooks
    return bool(forward or module._backward_hooks or module._backward_pre_hooks)


class MovedDropout(nn.Dropout):
    """Dropout that the enclosing block applies, in one pass with the residual addition and the LayerNorm."""

    guards_itself = True
    small_below = ""

    def forward(self, x: Tensor) -> Tensor:
        return x
