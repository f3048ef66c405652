"""The launches of CUDA calls, recorded without a GPU in the emulation on small tensors.

They supply threads and shared memory per launch, which nvcc's report does not contain.
"""

from __future__ import annotations

import functools
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

import transformer_kernels as tk
from benchmarks.compilers import row_calls
from benchmarks.compilers.cuda import Kernel
from benchmarks.compilers.machine_code import Flow, Loop, in_flight, loops_of, name_of, programs_of
from transformer_kernels.backends import cuda as _extension
from transformer_kernels.ops.attention import _compiled as attention

ARCHITECTURES = {"80": (8, 0), "86": (8, 6), "90a": (9, 0), "100": (10, 0), "120": (12, 0)}
"""The architectures of the record, by nvcc's names, with their capabilities."""

RUN_AS = {"86": "80"}
"""GPUs without code of their own in a release, with the architecture whose code they run."""

WHOLE = ("80", "90a")
ELSEWHERE = r"attention_(short_)?bfloat16 plain D|(softmax|layer_norm) bf16 1024"
"""Launches recorded for architectures other than WHOLE, which have the same sources; all would take minutes."""

ROWS = (
    ("softmax", "", 1024),
    ("softmax", "", 32768),
    ("layer_norm", "", 1024),
    ("layer_norm", "", 32768),
    ("add_layer_norm", " dropout", 1024),
    ("cross_entropy", "", 1024),
    ("cross_entropy", "", 32768),
    ("embedding", " dropout", 1024),
    ("embedding", " norm", 1024),
    ("rms_norm", "", 1024),
    ("gelu", " none", 1024),
    ("bias_gelu", " none", 1024),
    ("swiglu", " packed", 1024),
    ("rotary", "", 64),
)
"""Operation, variant and width of the recorded row kernels."""

FAMILIES = {
    "general": ("attention_bfloat16", 128, (64, 128), tuple(ARCHITECTURES)),
    "short": ("attention_short_bfloat16", 128, (64,), tuple(ARCHITECTURES)),
    "sm90": ("attention_sm90", 256, (64, 128, 256), ("90a",)),
}
"""Families of attention kernels: source, length and head dimensions of the recorded calls, architectures."""

VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "general": {
        "plain": {},
        "with options": {"attn_bias": True, "dropout_p": 0.1},
        "plain, 32 queries a warp": {"heads": 3, "length": 257},
        "with options, 32 queries a warp": {"heads": 3, "length": 257, "dropout_p": 0.1},
    },
    "short": {"plain": {}},
    "sm90": {"plain": {}, "with options": {"softcap": 30.0}, "biased": {"attn_bias": True}},
}
"""Calls that cover all kernels of each family."""

MINOR = ("attention_delta_kernel", "sum_partials_kernel", "sum_losses_kernel")
"""Auxiliary kernels with little memory traffic."""


@dataclass(frozen=True)
class Launch:
    """One kernel launch of a call: template name and arguments, warps and shared memory per block."""

    label: str
    kernel: str
    arguments: str
    num_warps: int
    shared: int


@dataclass(frozen=True)
class Report:
    """nvcc's report on a launch, with the fields of `triton.KernelReport`."""

    name: str
    capability: tuple[int, int]
    registers: int
    spills: int
    shared: int
    programs: int
    in_flight: int
    loops: tuple[Loop, ...]


def run_by(compiled: str) -> list[str]:
    """The architectures of the record that run code compiled for `compiled`."""
    return [architecture for architecture in ARCHITECTURES if RUN_AS.get(architecture, architecture) == compiled]


def sources(architecture: str) -> list[str]:
    """The files of csrc/cuda/launchers with recorded launches."""
    return list(dict.fromkeys(source for source, _, _ in _calls(architecture)))


def launches(source: str, architecture: str) -> list[Launch]:
    """The launches of the kernels in csrc/cuda/launchers/<source>.cu; empty if none is recorded."""
    found: dict[tuple[str, str], Launch] = {}
    emulated = {"TRANSFORMER_KERNELS_EMULATE": "1", "TRANSFORMER_KERNELS_EMULATE_ARCH": architecture.rstrip("a")}
    with mock.patch.dict(os.environ, emulated):
        for served, label, call in _calls(architecture):
            if served == source:
                _extension.load().reset_counters()
                call()
                for name, (threads, shared) in _extension.load().launches().items():
                    kernel, arguments = template(name)
                    if kernel not in MINOR:
                        launch = Launch(label, kernel, arguments, threads // 32, shared)
                        found.setdefault((kernel, arguments), launch)
    return list(found.values())


def reports(source: str, architecture: str, kernels: Iterable[Kernel]) -> list[Report]:
    """Reports of the recorded launches of a source, from its compiled `kernels` and their machine code."""
    compiled = {(kernel.name, plain(kernel.arguments)): kernel for kernel in kernels}
    capability, launched = ARCHITECTURES[architecture], launches(source, architecture)
    instances = Counter((launch.label, launch.kernel) for launch in launched)
    return [
        _report(
            launch, instances[launch.label, launch.kernel] > 1, capability, compiled[launch.kernel, launch.arguments]
        )
        for launch in launched
    ]


def _report(launch: Launch, one_of_several: bool, capability: tuple[int, int], kernel: Kernel) -> Report:
    flow, shared = Flow(kernel.code), launch.shared + kernel.static_shared
    programs = programs_of(kernel.registers, shared, launch.num_warps, capability)
    own = " " + re.sub(r"RowLayout<[^>]*>,|<[^>]*>", "", launch.arguments) if one_of_several else ""
    return Report(
        name=f"{launch.label}: {launch.kernel.removesuffix('_kernel')}{own}",
        capability=capability,
        registers=kernel.registers,
        spills=sum(name_of(text).startswith(("LDL", "STL")) for _, text in kernel.code),
        shared=shared,
        programs=programs,
        in_flight=in_flight(flow, shared, launch.num_warps, programs),
        loops=tuple(loops_of(flow, capability, launch.num_warps)),
    )


def _calls(architecture: str) -> Iterator[tuple[str, str, Callable[[], object]]]:
    """The recorded calls of an architecture."""
    for source, label, call in _all_calls(architecture):
        if architecture in WHOLE or re.match(ELSEWHERE, label):
            yield source, label, call


def _all_calls(architecture: str) -> Iterator[tuple[str, str, Callable[[], object]]]:
    """For each call its source, label, and the call itself, forward and backward."""
    for family, (source, length, head_dims, served) in FAMILIES.items():
        for variant, options in VARIANTS[family].items():
            for head_dim in head_dims if architecture in served else ():
                label = f"{source} {variant} D {head_dim}"
                yield source, label, functools.partial(_attention, family, head_dim, **{"length": length, **options})
    for operation, variant, width in ROWS:
        make = row_calls.CALLS[operation][0]
        arguments = make(torch.bfloat16, row_calls.ROWS, width)[variant]
        call = functools.partial(row_calls.run, operation, make, arguments, backend="cuda")
        yield operation, f"{operation}{variant} bf16 {width}", call


def _attention(
    family: str, head_dim: int, *, length: int, attn_bias: bool = False, heads: int = 1, **options: Any
) -> None:
    """Forward and, if the family has one, backward."""
    backward = family != "sm90" and heads == 1
    q, k, v = (torch.zeros(1, heads, length, head_dim, dtype=torch.bfloat16, requires_grad=backward) for _ in range(3))
    bias = torch.zeros(1, 1, length, length, requires_grad=backward) if attn_bias else None
    with mock.patch.object(attention, "path", family):
        out = tk.attention(q, k, v, attn_bias=bias, **options, backend="cuda")
        if backward:
            assert isinstance(out, torch.Tensor)
            out.sum().backward()


def template(function: str) -> tuple[str, str]:
    """Kernel name and arguments, from a host compiler's name of `launch_typed`."""
    found = re.search(r"KERNEL = (?:&)?(.*?);", function)
    assert found, function
    name, _, arguments = plain(found[1]).partition("<")
    return name, arguments.removesuffix(">")


def plain(text: str) -> str:
    """A type name normalised between both compilers."""
    text = (
        re.sub(r"(\w+|\(anonymous namespace\)|\{anonymous\})::", "", text)
        .replace("__nv_bfloat16", "bfloat16")
        .replace("__half", "float16")
    )
    return re.sub(r"\s|\(\w+\)", "", text)
