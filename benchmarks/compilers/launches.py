"""What real launches of Triton kernels ask the compiler for, recorded on a machine without a GPU.

Calls go through Triton's own `JITFunction.run`, with a stand-in for the driver that only answers which device is
current, up to the point where it would compile: a hook there notes signature, constants and options, and stops it.
Nothing runs, so the results of the calls are memory as it was found.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from benchmarks.compilers.machine_code import DEVICES
from transformer_kernels.backends import triton as _triton
from transformer_kernels.backends.triton import Capability


@dataclass(frozen=True)
class Launch:
    """One compilation that a launch asked for.

    `signature`, `constants` and `attributes` are what Triton compiles the kernel with, `options` its num_warps,
    num_stages and the like; `key` is Triton's own, which says whether two launches share a compilation.
    """

    label: str
    kernel: Any
    capability: Capability
    signature: Mapping[str, str]
    constants: Mapping[tuple[int, ...], Any]
    attributes: Mapping[tuple[int, ...], Any]
    options: Mapping[str, Any]
    key: str

    @property
    def kernel_name(self) -> str:
        return self.kernel.__name__

    @property
    def name(self) -> str:
        """The call it was recorded from, and its kernel."""
        return f"{self.label}: {self.kernel_name.removesuffix('_kernel')}"

    def constant(self, name: str) -> Any:
        """The value of a compile-time argument; None where the kernel has none of that name."""
        names = self.kernel.arg_names
        return self.constants.get((names.index(name),)) if name in names else None

    @property
    def target(self) -> Any:
        return _target(self.capability)

    @property
    def source(self) -> Any:
        """What `triton.compile` takes."""
        from triton.compiler import ASTSource

        return ASTSource(self.kernel, dict(self.signature), dict(self.constants), dict(self.attributes))


class _Driver:
    """Answers what a launch asks before it compiles; each capability is a device of its own."""

    def __init__(self, capability: Capability) -> None:
        self.capability = capability

    def get_current_target(self) -> Any:
        return _target(self.capability)

    def get_current_device(self) -> int:
        return 10 * self.capability[0] + self.capability[1]

    def get_current_stream(self, device: int) -> int:
        return 0


def record(calls: Iterable[tuple[str, Callable[[], object]]], capability: Capability) -> list[Launch]:
    """The compilations that labelled calls on CPU tensors ask for, each under the first label that needs it.

    Raises:
        BackendUnavailable: there is no Triton, or one that is too old. RuntimeError: its interpreter is on.
    """
    triton = _triton.load()
    if _triton.interpreting():
        raise RuntimeError("launches: TRITON_INTERPRET is set, and the interpreter has nothing to compile")
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
    """CPU tensors count as a device of `capability`, and the "triton" backend takes them."""
    patched: dict[str, Any] = {
        "INTERPRETED_CAPABILITY": _triton.tiles_of(capability),
        "multiprocessors": lambda device: DEVICES[capability].multiprocessors,
        "_unavailable_on": lambda device_type, index: None,
    }
    drivers = triton.runtime.driver
    active = "_active" if hasattr(drivers, "_active") else "active"  # the latter in Triton 3.4
    with (
        mock.patch.multiple(_triton, **patched),
        mock.patch.object(drivers, active, _Driver(capability)),
    ):
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
