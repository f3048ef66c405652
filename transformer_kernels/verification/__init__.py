"""Smoke cases of every kernel on a device, each in float64 beside it, and the verdicts that are kept per device.

A kernel that was tested on one device can be wrong on another: another compiler, another driver. A smoke case runs one
operation in one dtype once, forward and backward, and compares it with the backend "torch" in float64. Cases run in a
process of their own with a time limit, so a kernel that hangs or poisons its process costs only its own verdict.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from transformer_kernels.backends import dispatch
from transformer_kernels.backends.errors import BackendUnavailable, UnsupportedByBackend
from transformer_kernels.verification.budget import RELATIVE_RMS, rms_of
from transformer_kernels.verification.examples import EXAMPLES, Tensors, normal

VARIABLE = "TRANSFORMER_KERNELS_VERIFY"
"""0: "auto" uses kernels without verifying them on a device first (verification/trust.py)."""
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
MIN_GRADIENT = 1e-3
"""A gradient far smaller than the largest of a call is the difference of larger terms: this share of it counts."""
SIZES = {"rows": ((12, 64), (5, 1030), (3, 9000)), "attention": ((33, 64), (300, 64), (130, 128), (70, 40))}
"""Rows and columns of the cases: a warp per row, a block per row, a row in several passes; short and long sequences."""
PASSED, WRONG, FAILED, HUNG, FAULTED, UNSUPPORTED = "passed", "wrong", "failed", "hung", "faulted", "unsupported"
BAD = (WRONG, FAILED, HUNG, FAULTED)
PASSES = ("forward", "backward")
OWN_GROUP: dict[str, Any] = {"process_group": 0} if sys.version_info >= (3, 11) else {"start_new_session": True}
"""How a process starts that is ended with all that it starts: in the same session where Python can do that, so that it
does not outlive a session that is killed, and keep the device."""


@dataclass(frozen=True)
class Case:
    """One call: an operation with its example at a size, or with these tensors and options instead."""

    op: str
    dtype: str
    rows: int
    columns: int
    variant: str = ""

    @property
    def name(self) -> str:
        """For example `attention[decode]/bfloat16/3x64`."""
        variant = f"[{self.variant}]" if self.variant else ""
        return f"{self.op}{variant}/{self.dtype}/{self.rows}x{self.columns}"

    @property
    def family(self) -> str:
        return dispatch.OPERATIONS[self.op].folder.rpartition(".")[2]

    def arguments(self, device: torch.device) -> tuple[Tensors, dict[str, Any]]:
        """The tensors, in the dtype of the case, and the options."""
        example = EXAMPLES[self.op]
        tensors = example.make(self.rows, self.columns, DTYPES[self.dtype], device)
        if not self.variant:
            return tensors, dict(example.options)
        changed, options = VARIANTS[self.variant](tensors)
        return tensors | changed, options


def _decode(tensors: Tensors) -> tuple[Tensors, dict[str, Any]]:
    return {"q": tensors["q"][:, :, -1:].detach().requires_grad_()}, {"causal": True}


def _padded(tensors: Tensors) -> tuple[Tensors, dict[str, Any]]:
    k = tensors["k"]
    lengths = torch.tensor([k.shape[2], max(1, k.shape[2] // 2)], device=k.device)
    return {"key_padding_mask": torch.arange(k.shape[2], device=k.device) < lengths[:, None]}, {"dropout_p": 0.1}


def _biased(tensors: Tensors) -> tuple[Tensors, dict[str, Any]]:
    q, k = tensors["q"], tensors["k"]
    bias = normal(1, q.shape[1], q.shape[2], k.shape[2], dtype=q.dtype, device=q.device, seed=7)
    return {"attn_bias": bias}, {"window": (40, 3), "softcap": 20.0}


VARIANTS: dict[str, Callable[[Tensors], tuple[Tensors, dict[str, Any]]]] = {
    "decode": _decode,
    "padded": _padded,
    "biased": _biased,
}
"""Calls of attention that other kernels or branches compute: the changed tensors, and the options."""


@dataclass(frozen=True)
class Verdict:
    """The outcome of one pass of a case: PASSED, WRONG, FAILED, HUNG, FAULTED or UNSUPPORTED."""

    op: str
    backend: str
    dtype: str
    direction: str
    case: str
    outcome: str
    why: str = ""


def cases(operations: Iterable[str] | None = None, dtypes: Iterable[str] = tuple(DTYPES)) -> list[Case]:
    """The cases of these operations, of all unless given; small ones of each dtype first."""
    chosen = tuple(EXAMPLES) if operations is None else tuple(operations)
    if unknown := [op for op in chosen if op not in EXAMPLES]:
        raise ValueError(f"unknown operations {', '.join(unknown)}; known: {', '.join(EXAMPLES)}")
    listed = []
    for op in chosen:
        sizes = SIZES["attention" if "attention" in op or op == "rotary" else "rows"]
        for rows, columns in sizes:
            listed += [Case(op, dtype, rows, columns) for dtype in dtypes]
        if op == "attention":
            listed += [Case(op, dtype, 300, 64, variant) for variant in VARIANTS for dtype in dtypes]
    return listed


def run_case(case: Case, backend: str, device: torch.device) -> Iterator[Verdict]:
    """Run one case, forward and then backward; a verdict after each pass.

    Args:
        case: the call.
        backend: "cpu", "triton", "cuda" or "torch".
        device: where its tensors are.
    """
    named = {"op": case.op, "backend": backend, "dtype": case.dtype, "case": case.name}
    function = _public(case.op)
    tensors, options = case.arguments(device)
    exact = {name: _double(value) for name, value in tensors.items()}
    try:
        torch.manual_seed(0)
        outputs = _outputs(function(**tensors, **options, backend=backend))
        synchronize(device)
    except (BackendUnavailable, UnsupportedByBackend) as error:
        yield from (Verdict(**named, direction=direction, outcome=UNSUPPORTED, why=str(error)) for direction in PASSES)
        return
    torch.manual_seed(0)
    wanted = _outputs(function(**exact, **options, backend="torch"))
    limit = RELATIVE_RMS[DTYPES[case.dtype]]
    why = _beyond(limit, [(f"output {i}", *pair) for i, pair in enumerate(zip(outputs, wanted, strict=True))])
    yield Verdict(**named, direction="forward", outcome=WRONG if why else PASSED, why=why)
    names = [name for name, value in tensors.items() if value.requires_grad]
    cotangents = [torch.ones_like(output) if output.dim() == 0 else _cotangent(output) for output in outputs]
    gradients = torch.autograd.grad(outputs, [tensors[name] for name in names], cotangents)
    synchronize(device)
    doubles = [cotangent.double() for cotangent in cotangents]
    exact_gradients = torch.autograd.grad(wanted, [exact[name] for name in names], doubles)
    why = _beyond(limit, list(zip(names, gradients, exact_gradients, strict=True)), MIN_GRADIENT)
    yield Verdict(**named, direction="backward", outcome=WRONG if why else PASSED, why=why)


def _public(op: str) -> Callable[..., Any]:
    from transformer_kernels import ops

    function: Callable[..., Any] = getattr(ops, op)
    return function


def _double(value: Any) -> Any:
    if not value.is_floating_point():
        return value
    return value.detach().double().requires_grad_(value.requires_grad)


def _outputs(result: Any) -> list[Tensor]:
    return list(result) if isinstance(result, tuple) else [result]


def _cotangent(output: Tensor) -> Tensor:
    return normal(*output.shape, dtype=output.dtype, device=output.device, seed=11).detach()


def synchronize(device: torch.device) -> None:
    """Wait for the kernels of a device; raises the error of one that failed."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _beyond(limit: float, pairs: Sequence[tuple[str, Tensor, Tensor]], share: float = 0.0) -> str:
    """The first result whose relative RMS error exceeds the limit, as a sentence; "" if there is none."""
    largest = max((rms_of(want) for _, _, want in pairs), default=0.0)
    for name, got, want in pairs:
        error = rms_of(got.detach().double() - want.detach()) / max(rms_of(want), share * largest, 1e-30)
        if not error <= limit:
            return f"{name}: relative RMS error {error:.2e} exceeds {limit:.1e}"
    return ""


# Processes


def verify(
    backend: str,
    device: torch.device,
    listed: Sequence[Case],
    seconds: float = 60.0,
    case_seconds: float = 10.0,
    found: Callable[[Verdict], None] = lambda verdict: None,
) -> list[Verdict]:
    """Run cases in processes of their own; a case that hangs or ends its process gets that verdict, and the other cases
    continue.

    The other cases of a kernel that hung are not run in that dtype, and get the same verdict.

    Args:
        backend: the backend to verify.
        device: where the tensors are.
        listed: the cases.
        seconds: the limit of all of them together; cases that it does not reach have no verdict.
        case_seconds: the limit of one case, compilation included.
        found: called with each verdict as it is known.

    Returns:
        the verdicts, two per finished case.
    """
    deadline, left, verdicts = time.monotonic() + seconds, list(listed), []
    while left and time.monotonic() < deadline:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "verdicts.jsonl"
            reason = _run_process(backend, device, left, path, deadline, case_seconds)
            lines = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
        news = [Verdict(**line) for line in lines if "started" not in line]
        started = [line["started"] for line in lines if "started" in line]
        if reason is not None and not started:
            raise RuntimeError(f"verification of {backend} did not start: {reason[1]}")
        current = next((case for case in left if started and case.name == started[-1]), None)
        if reason is not None and current is not None:
            known = {(verdict.case, verdict.direction) for verdict in news}
            ended = [current]
            if reason[0] == HUNG:  # each of the kernel's other cases would cost as much
                ended += [case for case in left if (case.op, case.dtype) == (current.op, current.dtype)]
            news += [
                Verdict(case.op, backend, case.dtype, direction, case.name, *reason)
                for case in dict.fromkeys(ended)
                for direction in PASSES
                if (case.name, direction) not in known
            ]
        for verdict in news:
            found(verdict)
        verdicts += news
        done = {verdict.case for verdict in news}
        left = [case for case in left if case.name not in done]
        if reason is None:
            break
    return verdicts


def _run_process(
    backend: str, device: torch.device, listed: Sequence[Case], path: Path, deadline: float, case_seconds: float
) -> tuple[str, str] | None:
    """One process over the cases; the outcome of the case that ended it and why, or None if it ended by itself."""
    command = [sys.executable, "-m", __name__, backend, str(device), str(path)]
    with tempfile.TemporaryFile("w+") as errors, tempfile.TemporaryFile("w+") as given:
        json.dump([asdict(case) for case in listed], given)
        given.seek(0)
        process = subprocess.Popen(
            command,
            stdin=given,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env={**os.environ, VARIABLE: "0"},
            **OWN_GROUP,
        )
        try:
            while process.poll() is None:
                time.sleep(0.02)
                if time.monotonic() > deadline:
                    return None
                if path.is_file() and time.time() - path.stat().st_mtime > case_seconds:
                    return HUNG, f"a case had no result after {case_seconds:.0f} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, 9)
            process.wait()
        if process.returncode == 0:
            return None
        errors.seek(0)
        lines = errors.read().strip().splitlines()
    return FAULTED, f"its process ended with status {process.returncode}" + (f": {lines[-1][:200]}" if lines else "")
