"""A certificate of a run: rows of its operations' outputs and gradients, recomputed in float64 while it goes on."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import random
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from transformer_kernels._version import __version__
from transformer_kernels.backends import dispatch
from transformer_kernels.ops._kernels import Grads, Kernels, Wanted
from transformer_kernels.ops._operation import saved_hooks
from transformer_kernels.verification.budget import Errors
from transformer_kernels.verification.layers import Layers
from transformer_kernels.verification.memory import BetweenSteps, current_recording, sum_of_bits
from transformer_kernels.verification.nonfinite import NonFinite, first_non_finite
from transformer_kernels.verification.recompute import PARTS, Checked, Observed, check, non_finite_row

SHARE, CHECKS, BETWEEN_STEPS = 0.03, 0.5, 0.1
"""Of the time, for a certificate; of that, for checks, and for memory between steps. The rest is for counting passes,
and for additions that a recorded step whose gradients are observed does not fuse."""
SKIPPED = 64
"""At most so many calls pass before the next one that may be checked: its position in a step is random."""
WHOLE = 4
"""One in so many checks of large passes is of all rows, and of the gradients that sum over them."""
SMALL = 1 << 16
"""Elements of a result below which every check is of all rows."""
GRACE = 1.0
"""Seconds that first checks of operations may take in any run, however short."""
FIRST_CHECK, PER_ELEMENT = 0.02, 1e-7
"""Seconds that the first check of an operation is expected to take, at least, and more for each element."""
MAX_FINDINGS = 20
NO_ERRORS = Errors(0.0, 0.0, 0.0, 0.0, 0.0)
LOSSES = ("cross_entropy", "linear_cross_entropy")


@dataclass
class Tally:
    """The checks of one operation in one direction, and the seconds that the next check is expected to take."""

    calls: int = 0
    samples: int = 0
    largest_share: float = 0.0
    expected: float = 0.0


@dataclass(frozen=True)
class Finding:
    """A sample beyond its budget.

    Attributes:
        operation, backend, direction, layer: where.
        what: the output or the gradient. shape: of it.
        share: of the budget; infinite for a result that is not finite where PyTorch's is, and for changed memory.
        error, limit: the largest error, and the budget of it.
        file: its inputs and outputs, for `transformer-kernels verify-device --sample FILE`; "" for changed gradients,
            and for an optimizer or "graphed", which is named as the operation, with the direction "step".
    """

    operation: str
    backend: str
    direction: str
    layer: str
    what: str
    shape: tuple[int, ...]
    share: float
    error: float
    limit: float
    file: str

    def __str__(self) -> str:
        where = f" in {self.layer}" if self.layer else ""
        if not self.file:
            backward = ", backward" if self.direction == "backward" else ""
            return f"{self.operation}{backward}{where}: {self.what} {self.shape}"
        return (
            f"{self.operation} ({self.backend}), {self.direction}{where}: {self.what} {self.shape}: {self.share:.3g} of"
            f" the budget; replay: transformer-kernels verify-device --sample {self.file}"
        )


@dataclass(eq=False)
class Certificate:
    """The samples of a run. Its str is one line, with further lines for errors; see `certify`.

    Attributes:
        operations: a `Tally` by operation and direction.
        layers: modules with a sample.
        findings: samples beyond the budget, the first 20.
        beyond: their number.
        unchecked: operations and directions whose recomputation failed, and why.
        non_finite: the first value seen that is not finite.
        seconds, checking: of the run, and of the checks in it.
    """

    file: Path | None
    share: float
    operations: dict[str, Tally] = field(default_factory=dict)
    layers: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)
    beyond: int = 0
    unchecked: dict[str, str] = field(default_factory=dict)
    non_finite: NonFinite | None = None
    seconds: float = 0.0
    checking: float = 0.0

    def __post_init__(self) -> None:
        self._random, self._skip = random.Random(0), 0
        self._layers, self._began, self._was_forward = Layers(), 0.0, True
        self._memory: dict[tuple[int, int], tuple[int, int]] = {}  # by address and size: version and sum of bits
        share = 1.0 if self.share >= 1.0 else BETWEEN_STEPS * self.share
        self._between = BetweenSteps(self._report, self._layers.path_of, share)

    @property
    def samples(self) -> int:
        """The number of checked outputs and gradients."""
        return sum(tally.samples for tally in self.operations.values())

    @property
    def largest_share(self) -> float:
        """The largest share of a budget."""
        return max((tally.largest_share for tally in self.operations.values()), default=0.0)

    @property
    def without_sample(self) -> list[str]:
        """Operations and directions that ran and had no sample, since a check would have taken more than its share."""
        return sorted(name for name, tally in self.operations.items() if not tally.samples)

    def line(self) -> str:
        """The certificate on one line."""
        names = {name.partition(" ")[0] for name in self.operations}
        took = self.checking / self.seconds if self.seconds else 0.0
        passes = f", {len(self.without_sample)} of {len(self.operations)} passes without a sample"
        return (
            f"{self.largest_share:.2g} of the budget; {self.beyond} of {self.samples:,} samples beyond it; "
            f"{len(names)} operations{passes if self.without_sample else ''}, {len(self.layers)} layers, "
            f"{took:.1%} of {self.seconds:.0f} s"
        )

    def __str__(self) -> str:
        lines = [self.line(), *map(str, self.findings)]
        lines += [f"not checked: {name}: {reason}" for name, reason in self.unchecked.items()]
        if self.without_sample:
            lines.append(f"no sample, for lack of time: {', '.join(self.without_sample)}")
        return "\n".join(lines if self.non_finite is None else [*lines, str(self.non_finite)])

    def record(self) -> dict[str, Any]:
        """The certificate as JSON has it."""
        return {
            "line": self.line(),
            "largest_share": self.largest_share,
            "samples": self.samples,
            "beyond": self.beyond,
            "operations": {name: asdict(tally) for name, tally in sorted(self.operations.items())},
            "without_sample": self.without_sample,
            "layers": dict(sorted(self.layers.items())),
            "unchecked": self.unchecked,
            "findings": [asdict(finding) for finding in self.findings],
            "non_finite": None if self.non_finite is None else asdict(self.non_finite),
            "seconds": self.seconds,
            "checking": self.checking,
            "processor": _processor(),
            "versions": {
                "transformer_kernels": __version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
            "commit": _commit(),
        }

    def find_non_finite(self, step: Callable[[], Any]) -> NonFinite | None:
        """Run a step once more and name the operator, of PyTorch's too, that makes the first non-finite value.

        Args:
            step: forward and backward, on the same inputs; its writes are not undone.
        """
        before = dispatch.observer
        dispatch.observe(None)
        try:
            found = first_non_finite(step, self._layers)
        finally:
            dispatch.observe(before)
        self.non_finite = found or self.non_finite
        return found

    def name(self, model: nn.Module) -> None:
        """Name layers by their paths in this model instead of their paths in the outermost called module."""
        self._layers.name(model)

    # Called by `Watched`

    def watched(self, operation: Any, kernels: Any) -> Watched:
        """The kernels, observed."""
        return Watched(self, operation, kernels)

    def see(self, observed: Observed, backend: str) -> None:
        """Observe a pass now, or, where a step is recorded, in each replay."""
        name = f"{observed.operation.name} {observed.direction}"
        tally = self.operations.get(name)
        if tally is None:
            elements = sum(x.numel() for x in observed.tensors())
            tally = self.operations[name] = Tally(expected=FIRST_CHECK + PER_ELEMENT * elements)
        if (recording := current_recording()) is None:
            is_loss = self._is_loss(observed)
            if not self._passes(tally, observed.grads is None, is_loss):
                self._observe(name, lambda *_: observed, is_loss, backend, None)
            return
        layer, _ = self._layers.current()
        tensors, layout = pytree.tree_flatten(tuple(observed)[1:])
        # Without `observed`: autograd copies gradients that something refers to.
        operation, is_forward, is_loss = observed.operation, observed.grads is None, self._is_loss(observed)
        drawn: list[Tensor] = []

        def seen(*values: Any) -> Observed:
            return Observed(operation, *pytree.tree_unflatten(list(values), layout))

        def again(*values: Any) -> None:
            if not self._passes(tally, is_forward, is_loss):
                self._observe(name, seen, is_loss, backend, layer, values, drawn)

        recording.observe(again, *tensors)

    def _is_loss(self, observed: Observed) -> bool:
        return observed.grads is None and observed.operation.name in LOSSES

    def _passes(self, tally: Tally, is_forward: bool, is_loss: bool) -> bool:
        """Count a pass; returns whether it is skipped, before anything is computed for it."""
        tally.calls += 1
        if is_forward and not self._was_forward:  # the next step: an optimizer may write without a new version
            self._memory.clear()
            self._between.forget_gradients()
        self._was_forward = is_forward
        self._skip -= 1
        return not (self._skip <= 0 or is_loss or self._memory or not tally.samples)

    def _observe(
        self,
        name: str,
        seen: Callable[..., Observed],
        is_loss: bool,
        backend: str,
        layer: str | None,
        given: Any = (),
        drawn: list[Tensor] | None = None,
    ) -> None:
        """Check the pass `seen(*given)` if a check is due.

        Args:
            layer: None: the current one.
            drawn: for a replay, the seed of the sample before and the state of the random numbers after it.
        """
        started, tally = time.perf_counter(), self.operations[name]
        due, is_loss = self._is_due(tally, started), is_loss and self.non_finite is None
        if due or is_loss or self._memory:
            layer = self._layers.current()[0] if layer is None else layer
            try:
                with _disable_current_modes():
                    self._look(tally, seen(*given), backend, layer, due, is_loss, drawn)
            except Exception as error:  # the run goes on
                self.unchecked[name] = f"{type(error).__name__}: {error}"
        took = time.perf_counter() - started
        self.checking += took
        if due:
            tally.expected = max(took, 0.7 * tally.expected)

    def _is_due(self, tally: Tally, now: float) -> bool:
        """Whether there is time for a check of a pass: for the first one, or at random positions for the others, which
        leave half of the time to passes without a sample."""
        if self.share >= 1.0:
            return True
        spent, limit = self.checking + tally.expected, CHECKS * self.share * (now - self._began)
        if tally.samples == 0:
            limit = max(limit, GRACE)
        else:
            if self._skip > 0:
                return False
            self._skip = self._random.randrange(1, SKIPPED)
            if any(not other.samples for other in self.operations.values()):
                spent *= 2.0
        return spent <= limit

    def _look(
        self,
        tally: Tally,
        whole: Observed,
        backend: str,
        layer: str,
        due: bool,
        is_loss: bool,
        drawn: list[Tensor] | None = None,
    ) -> None:
        """Look for values that are not finite, for rounding beyond the budget, and for memory that has changed."""
        if (due or is_loss) and self.non_finite is None:
            came_out = [x for _, x, _ in whole.named()]
            self._find_non_finite(whole, layer, came_out if due else came_out[:1])
        found = self._compare_memory(whole, due)
        if due:
            if drawn is not None and whole.grads is None and getattr(whole.call, "seed", None) is not None:
                found += _compare_seed(whole.call.seed, drawn)
            observed = whole if self.share >= 1.0 else self._sampled(whole, tally.samples == 0)
            checked = check(observed)
            if observed is not whole and not all(share <= 1.0 for _, _, share in checked):
                checked = check(whole)  # the budget is that of a whole tensor, whose largest elements a part may lack
            for name, x in whole.of_parameters():
                self._between.keep(whole.operation.name, layer, name, x)
            found += checked  # memory that has changed is the reason of wrong gradients
        for name, errors, share in found:
            self._count(tally, layer, share)
            if not share <= 1.0 and len(self.findings) < MAX_FINDINGS:
                shape = next((tuple(x.shape) for field, x, _ in whole.checked() if field == name), ())
                file = self._saved(whole, backend)
                where = whole.operation.name, backend, whole.direction, layer
                self.findings.append(Finding(*where, name, shape, share, errors.error, errors.budget, file))

    def _count(self, tally: Tally, layer: str, share: float) -> None:
        tally.samples += 1
        tally.largest_share = max(tally.largest_share, share)
        self.layers[layer] += 1
        self.beyond += not share <= 1.0

    def _report(self, operation: str, direction: str, layer: str, what: str, shape: torch.Size) -> None:
        """Report a fault that no check of a pass has found."""
        self._count(self.operations.setdefault(f"{operation} {direction}", Tally()), layer, torch.inf)
        if len(self.findings) < MAX_FINDINGS:
            where = operation, "", direction, layer
            self.findings.append(Finding(*where, what, tuple(shape), torch.inf, 0.0, 0.0, ""))

    def _compare_memory(self, observed: Observed, due: bool) -> list[Checked]:
        """What this backward pass reads and what has changed, without an operator's writing to it, since a forward pass
        that was checked."""
        changed = []
        for name, x in observed.kept() if due or self._memory else ():
            address = x.data_ptr(), x.numel()
            before = self._memory.pop(address, None)
            if observed.direction == "forward":
                if due and not observed.copied:
                    self._memory[address] = x._version, sum_of_bits(x)
            elif before is not None and before[0] == x._version and before[1] != sum_of_bits(x):
                changed.append(Checked(f"{name} changed in memory after forward", NO_ERRORS, torch.inf))
        return changed

    def _sampled(self, whole: Observed, first: bool) -> Observed:
        """Some rows of a large pass, the first ones where dropout counts them; of a linear layer also some columns."""
        named = list(whole.named())
        largest = max((x for _, x, _ in named if x.dim() > 1), key=Tensor.numel, default=None)
        if largest is None or largest.numel() < SMALL:
            return whole
        layer = whole.operation.name == "linear"
        if layer and self._random.randrange(2):
            return whole.columns(*self._range(whole.call.weight.shape[0]))
        if not layer and not first and not self._random.randrange(WHOLE):
            return whole
        drops = getattr(whole.call, "seed", None) is not None
        start, stop = self._range(largest.shape[0])
        part = whole.part(*(0, stop - start) if drops else (start, stop))
        return part if part is not None and any(True for _ in part.named()) else whole

    def _range(self, length: int) -> tuple[int, int]:
        size = max(1, length // PARTS)
        start = self._random.randrange(length - size + 1)
        return start, start + size

    def _find_non_finite(self, observed: Observed, layer: str, came_out: list[Tensor]) -> None:
        if (row := non_finite_row(came_out)) is None:
            return
        finite = non_finite_row(observed.tensors()) is None
        name, direction = observed.operation.name, observed.direction
        self.non_finite = NonFinite(f"transformer_kernels::{name}", layer, direction, row, finite)

    def _saved(self, observed: Observed, backend: str) -> str:
        """The file with what went in and came out."""
        folder = Path(tempfile.mkdtemp(prefix="certificate-")) if self.file is None else self.file.parent
        stem = "sample" if self.file is None else self.file.stem
        path = folder / f"{stem}-{len(self.findings)}.pt"
        operation, result = observed.operation, observed.result
        values = {
            "operation": operation.name,
            "backend": backend,
            "call": list(operation.flat(observed.call)),
            "result": [result] if operation.result is None else list(result),
            "grads": None if observed.grads is None else list(observed.grads),
            "wanted": None if observed.wanted is None else list(observed.wanted),
            "gradients": None if observed.gradients is None else list(observed.gradients),
        }
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(pytree.tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, values), path)
        return str(path)


def _compare_seed(seed: Tensor, drawn: list[Tensor]) -> list[Checked]:
    """A finding if a replay has the seed of the sample before, although random numbers have been drawn since."""
    before, drawn[:] = drawn[:], [seed.clone(), torch.get_rng_state()]
    if before and torch.equal(before[0], seed) and not torch.equal(before[1], drawn[1]):
        return [Checked("seed, which is that of an earlier step,", NO_ERRORS, torch.inf)]
    return []


class Watched(Kernels):
    """A backend's kernels, whose passes a certificate observes."""

    def __init__(self, certificate: Certificate, operation: Any, kernels: Any) -> None:
        self.certificate, self.operation, self.inner = certificate, operation, kernels
        self.backend = dispatch.backend_of(operation, kernels)
        self.below, self.composed = kernels.below, kernels.composed
        if kernels.forward_with_gradient is not None:
            self.forward_with_gradient, self.scale_gradient = self._ahead, self._scale
            self.below = None if kernels.below is None else self._below

    def forward(self, call: Any) -> Any:
        return self._forward(call, self.inner.forward(call))

    def forward_recorded(self, call: Any) -> Any:
        return self._forward(call, self.inner.forward_recorded(call))

    def forward_alone(self, call: Any) -> Any:
        return self._forward(call, self.inner.forward_alone(call))

    def backward(self, call: Any, result: Any, grads: Grads, wanted: Wanted) -> Any:
        gradients = self.inner.backward(call, result, grads, wanted)
        self._see(Observed(self.operation, call, result, grads, wanted, gradients))
        return gradients

    def _forward(self, call: Any, result: Any) -> Any:
        self._see(Observed(self.operation, call, result, copied=bool(saved_hooks(True))))
        return result

    def _ahead(self, call: Any) -> Any:
        made = self.inner.forward_with_gradient(call)
        if made is not None:
            self._see(Observed(self.operation, call, made[0]))
            if self.inner.below is None:
                one = torch.ones((), dtype=made[0][0].dtype, device=made[0][0].device)
                self._see(Observed(self.operation, call, made[0], (one,), (True,), (made[1],)))
        return made

    def _scale(self, gradient: Tensor, dloss: Tensor) -> None:
        self._dloss = dloss
        self.inner.scale_gradient(gradient, dloss)

    def _below(self, call: Any, gradient: Tensor, wanted: Wanted) -> Any:
        gradients = self.inner.below(call, gradient, wanted)
        absent = self.operation.result(*(None,) * self.operation.results)
        self._see(Observed(self.operation, call, absent, (self._dloss,), wanted, gradients))
        return gradients

    def _see(self, observed: Observed) -> None:
        self.certificate.see(observed, self.backend)


@contextlib.contextmanager
def certify(file: str | os.PathLike[str] | None = None, *, share: float = SHARE) -> Iterator[Certificate]:
    """Check the operations of this package in a run while it goes on: `with tk.certify() as certificate:`.

    Calls of each operation, forward and backward, are recomputed in float64 by the backend "torch" and held against the
    error budget of this package's tests (docs/numbers.md): the first ones, for a second in all, then operations without
    a sample and others at random positions, for a share of the time. Operations without a sample are named. Of large
    tensors most checks are of a sixteenth of the rows, or of a linear layer's columns. Calls that "auto" leaves to
    PyTorch's own function are not checked. On a CPU one or two bits of some weights and of an optimizer's state that
    change between two of its steps without a write are named, so are bits of checked gradients before its step. Within
    the block a recorded step (`graphed`) is captured anew; a replay is checked as an eager step is, and named if it
    reads other arguments than those of the call or an old seed, except on a GPU, where a graph runs no Python: there
    only the eager steps are.

    One block at a time, in one process; results, seeds and random numbers equal a run without it.

    Args:
        file: where the certificate is written at the end, as JSON, with the inputs of samples beyond the budget beside
            it; None: it is not written, and those inputs are in a temporary folder.
        share: of the time, for the certificate after the first second of checks; 1.0 checks every call, whatever time
            that takes.

    Returns:
        a context manager that gives a `Certificate`; print it.

    Raises:
        ValueError: share is not in (0, 1], or the file is a folder.
        RuntimeError: a certificate is being made already.

    Examples:
        >>> with certify() as certificate:
        ...     y = tk.bias_gelu(torch.randn(64, 32), torch.zeros(32), backend="torch")
        >>> certificate.samples, certificate.beyond
        (1, 0)
    """
    if not 0.0 < share <= 1.0:
        raise ValueError(f"certify: share must be in (0, 1]; got {share!r}")
    if dispatch.observer is not None:
        raise RuntimeError("certify: a certificate is being made already")
    certificate = Certificate(None if file is None else Path(file), share)
    if certificate.file is not None:  # before the run, not after it
        certificate.file.parent.mkdir(parents=True, exist_ok=True)
        if certificate.file.is_dir():
            raise ValueError(f"certify: {file} is a folder; pass the name of a file")
    certificate._began = time.perf_counter()
    dispatch.observe(certificate.watched, certificate._between.compare_arguments)
    try:
        with certificate._layers, certificate._between:
            yield certificate
    finally:
        dispatch.observe(None)
        certificate.seconds = time.perf_counter() - certificate._began
        certificate.checking += certificate._between.seconds
        if certificate.file is not None:
            certificate.file.write_text(json.dumps(certificate.record(), indent=1) + "\n", "utf-8")


def replay(path: str) -> bool:
    """Check a saved sample, as it was and computed again by the same backend; prints both, true if both are within."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path}: no such file; expected the saved sample of a certificate")
    try:
        values = torch.load(path, weights_only=True)
    except Exception as error:  # of every kind, for damaged bytes
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{path}: not the sample of a certificate: {reason}") from error
    try:
        stored, again = _replayed(values)
    except (AttributeError, LookupError, TypeError) as error:
        raise ValueError(f"{path}: not the sample of a certificate: {error!r}") from error
    operation, within = stored.operation, True
    for label, observed in (("as stored", stored), ("computed again", again)):
        for name, errors, share in check(observed):
            within &= share <= 1.0
            print(f"{operation.name} {observed.direction}, {name}, {label}: {share:.3g} of the budget ({errors})")
    return within


def _replayed(values: dict[str, Any]) -> tuple[Observed, Observed]:
    """A saved pass, and the same one computed now."""
    operation: Any = dispatch.OPERATIONS[values["operation"]]
    call, given = operation.nested(values["call"]), values["result"]
    result = given[0] if operation.result is None else operation.result(*given)
    if values["grads"] is None:
        stored = Observed(operation, call, result)
        kernels = dispatch.select(operation, values["backend"], call).of(call)
        return stored, stored._replace(result=kernels.forward(call))
    grads, wanted = tuple(values["grads"]), tuple(values["wanted"])
    stored = Observed(operation, call, result, grads, wanted, tuple(values["gradients"]))
    shaped = operation._with_shapes(call, result)
    kernels = dispatch.select(operation, values["backend"], shaped).of(shaped)
    return stored, stored._replace(gradients=kernels.backward(call, result, grads, wanted))


def _processor() -> str:
    """The name of the processor, its instruction set, and the instruction set of the CPU kernels."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}"


def _commit() -> str | None:
    """The commit of the checkout that the package is imported from; None for an installed wheel."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["git", "-C", str(root), "rev-parse", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    return None
