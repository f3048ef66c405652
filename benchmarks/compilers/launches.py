"""The compilations requested by launches of Triton kernels, recorded without a GPU.

Calls run Triton's `JITFunction.run` with a mock driver up to compilation, where a hook records signature, constants and
options and returns. No kernel runs, so results of the calls are uninitialised.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from benchmarks.compilers.machine_code import DEVICES
from transformer_kernels.backends import dispatch
from transformer_kernels.backends import triton as _triton
from transformer_kernels.backends.triton import Capability


@dataclass(frozen=True)
class Launch:
    """One compilation that a launch requests.

    `signature`, `constants` and `attributes` are the inputs of Triton's compiler, `options` num_warps, num_stages etc.;
    launches with the same `key` share a compilation.
    """

    label: str
    kernel: Any
    capability: Capability
    signature: Mapping[str, Any]
    constants: Mapping[tuple[int, ...], Any]
    attributes: Mapping[tuple[int, ...], Any]
    options: Mapping[str, Any]
    key: str

    @property
    def kernel_name(self) -> str:
        return self.kernel.__name__

    @property
    def name(self) -> str:
        """Label of the call, and kernel."""
        return f"{self.label}: {self.kernel_name.removesuffix('_kernel')}"

    def constant(self, name: str) -> Any:
        """The value of a compile-time argument; None if the kernel has no such argument."""
        names = self.kernel.arg_names
        return self.constants.get((names.index(name),)) if name in names else None

    @property
    def target(self) -> Any:
        return _target(self.capability)

    @property
    def source(self) -> Any:
        """The source argument of `triton.compile`."""
        from triton.compiler import ASTSource

        return ASTSource(self.kernel, dict(self.signature), dict(self.constants), dict(self.attributes))


class _Driver:
    """A mock driver for the queries of a launch before compilation; each capability is a separate device."""

    def __init__(self, capability: Capability) -> None:
        self.capability = capability

    def get_current_target(self) -> Any:
        return _target(self.capability)

    def get_current_device(self) -> int:
        return 10 * self.capability[0] + self.capability[1]

    def get_current_stream(self, device: int) -> int:
        return 0


def record(calls: Iterable[tuple[str, Callable[[], object]]], capability: Capability) -> list[Launch]:
    """The compilations requested by labelled calls on CPU tensors, each under its first label.

    Raises:
        BackendUnavailable: Triton is missing or unsupported. RuntimeError: its interpreter is enabled.
    """
    triton = _triton.load()
    if _triton.interpreting():
        raise RuntimeError("launches: TRITON_INTERPRET is set, and the interpreter compiles nothing")
    found: dict[tuple[str, str], Launch] = {}
    label = ""

    def note(*, key: str, fn: Any, compile: dict[str, Any], **_: object) -> bool:
        launch = _launch(label, fn.jit_function, capability, key, compile)
        found.setdefault((fn.name, key), launch)
        return True

    with _standing_in(triton, capability), mock.patch.object(triton.knobs.runtime, "jit_cache_hook", note):
        for label, call in calls:  # noqa: B007 (note reads it)
            call()
    return list(found.values())


@contextmanager
def _standing_in(triton: Any, capability: Capability) -> Iterator[None]:
    """Within this context the "triton" backend accepts CPU tensors as a device of `capability`."""
    patched: dict[str, Any] = {
        "INTERPRETED_CAPABILITY": _triton.tiles_of(capability),
        "multiprocessors": lambda device: DEVICES[capability].multiprocessors,
        "_unavailable_on": lambda device_type, index: None,
    }
    drivers = triton.runtime.driver
    active = "_active" if hasattr(drivers, "_active") else "active"  # the latter in Triton 3.4
    with ExitStack() as stack:
        stack.enter_context(mock.patch.multiple(_triton, **patched))
        stack.enter_context(mock.patch.object(drivers, active, _Driver(capability)))
        for operation in dispatch.OPERATIONS.values():  # whose plans keep the launches of a layout
            stack.enter_context(mock.patch.object(operation, "plans", {}))
        yield


def _launch(label: str, kernel: Any, capability: Capability, key: str, compile: Mapping[str, Any]) -> Launch:
    options = json.loads(compile["specialization_data"])["options"]
    known = ("num_warps", "num_ctas", "num_stages", "maxnreg", "enable_fp_fusion")
    return Launch(
        label=label,
        kernel=kernel,
        capability=capability,
        signature=compile["signature"],
        constants=compile["constants"],
        attributes=compile["configs"][0],
        options={name: options[name] for name in known},
        key=key,
    )


def _target(capability: Capability) -> Any:
    from triton.backends.compiler import GPUTarget

    return GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
