"""The training step, its precision, and evaluation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from transformer_kernels import ops
from transformer_kernels.backends import cpu

IGNORED = -100  # a target that is excluded from loss and accuracy

Check = Callable[[str, Tensor], None]


class Batch(NamedTuple):
    """The input of a step: `model(*inputs)` returns logits (..., classes) for `targets` (...).

    `tokens` is the number of real tokens; `positions`, padding included, defaults to the size of the first input.
    """

    inputs: tuple[Tensor, ...]
    targets: Tensor
    tokens: int
    positions: int | None = None

    @property
    def size(self) -> int:
        """Number of positions that the model computes."""
        return self.inputs[0].numel() if self.positions is None else self.positions


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on `device`; to a GPU asynchronously, through pinned memory."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


class Totals(NamedTuple):
    """Sums over targets, which are additive over processes."""

    loss: float
    correct: float
    targets: float


def choose_dtype(name: str, device: torch.device) -> str:
    """The dtype called `name`; "auto" is bfloat16 where the device multiplies matrices of it, else float32."""
    if name != "auto":
        return name
    if device.type == "cuda":
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"
    return "bfloat16" if device.type == "cpu" and cpu.has_bfloat16_products() else "float32"


def autocast(device_type: str, dtype: str) -> AbstractContextManager:
    """Autocast for bfloat16 and float16, no-op for float32 and tf32; weights and statistics are always float32."""
    return torch.autocast(device_type, getattr(torch, dtype)) if dtype in ("bfloat16", "float16") else nullcontext()


@contextmanager
def matrix_products(dtype: str) -> Iterator[None]:
    """A context in which "tf32" allows TF32 in float32 matrix products; the previous setting is restored on exit."""
    if dtype != "tf32":
        yield
        return
    choose, allowed = torch.set_float32_matmul_precision, "high"
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:  # torch.backends' fp32_precision was set, which cannot be mixed with the older setting
        products, allowed = torch.backends.cuda.matmul, "tf32"
        before, choose = products.fp32_precision, functools.partial(setattr, products, "fp32_precision")
    choose(allowed)
    try:
        yield
    finally:
        choose(before)


class TrainingLoss(nn.Module):
    """A model whose forward returns its loss, so that wrappers of forward (DDP, torch.compile) include the loss.

    Args:
        model: provides the parameters.
        loss: `loss(model, inputs, targets)`, the mean over the targets, from the recipe.
    """

    def __init__(self, model: nn.Module, loss: Callable[[Any, tuple[Tensor, ...], Tensor], Tensor]) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, inputs: tuple[Tensor, ...], targets: Tensor) -> Tensor:
        return self.loss(self.model, inputs, targets)


class TrainingStep:
    """Forward, loss, backward, clipping and optimizer step as a function of the batch, so that it can be captured.

    Weights, optimizer state and learning rate are updated in place. Gradients are None before and after a step:
    backward then writes them once to newly allocated memory (the graph's pool when captured). Persistent gradients
    would have to be zeroed, read and accumulated into.

    Args:
        loss: a `TrainingLoss`, or a wrapper of one.
        optimizer: AdamW over the parameters of `loss`.
        scaler: loss scaler for float16.
        dtype: float32, tf32, bfloat16 or float16.
        clip: maximum norm of all gradients; 0 disables clipping.
        check: called with ("loss", value) and ("gradient norm", value) before either is used.
        exchange: whether the number of targets differs between processes, so that their losses are weighted by it.
    """

    def __init__(
        self,
        loss: nn.Module,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler,
        *,
        dtype: str,
        clip: float,
        check: Check,
        exchange: Callable[[], bool] = bool,
    ) -> None:
        self.exchange = exchange
        self.loss, self.optimizer, self.scaler = loss, optimizer, scaler
        self.dtype, self.clip, self.check = dtype, clip, check
        self.parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def __call__(self, *parts: Batch) -> Tensor:
        """Train on a batch, given in parts; returns loss and gradient norm (0 where it is not computed), float32 (2,).

        The mean of the losses of several processes is that over all targets.
        """
        self.optimizer.zero_grad(set_to_none=True)
        try:
            shares = self._shares(parts)
            losses = []
            for part, share in zip(parts, shares, strict=True):
                with nullcontext() if part is parts[-1] else self._local():
                    losses.append(self._backward(part, share))
            loss = functools.reduce(torch.add, losses)
            if hasattr(self.optimizer, "tokens"):  # SparseEmbeddingAdamW, which updates the rows of the batch
                self.optimizer.tokens = torch.cat([part.inputs[0].flatten() for part in parts])
            norm = self._update(loss)
        finally:
            self.optimizer.zero_grad(set_to_none=True)
        return torch.stack([loss, norm])

    def _backward(self, part: Batch, share: Tensor | None) -> Tensor:
        """Accumulate the gradients of a part; returns its share of the loss."""
        with autocast(part.targets.device.type, self.dtype):
            loss = self.loss(part.inputs, part.targets)
        self.check("loss", loss)
        if share is not None:
            loss = loss * share
        self.scaler.scale(loss).backward()
        return loss.detach()

    def _shares(self, parts: Sequence[Batch]) -> list[Tensor | None]:
        """The share of each part in the targets of the batch, times the processes, whose gradients are averaged."""
        exchange = self.exchange()
        if len(parts) == 1 and not exchange:
            return [None]
        counts = [(part.targets != IGNORED).sum().float() for part in parts]
        total = functools.reduce(torch.add, counts)
        if exchange:
            total = total.clone()
            dist.all_reduce(total)
            total = total / dist.get_world_size()
        return [count / total.clamp(min=1.0) for count in counts]

    def _local(self) -> AbstractContextManager:
        """A context in which gradients are not exchanged: later parts are added to them."""
        loss: Any = getattr(self.loss, "_orig_mod", self.loss)  # without torch.compile's wrapper
        return loss.no_sync() if isinstance(loss, nn.parallel.DistributedDataParallel) else nullcontext()

    def _update(self, loss: Tensor) -> Tensor:
        """Clip and step; returns the gradient norm."""
        norm = torch.zeros_like(loss)
        if self.scaler.is_enabled():
            if self.clip:  # the scaler skips a step whose gradients overflow, so their norm is not checked
                self.scaler.unscale_(self.optimizer)
                nn.utils.clip_grad_norm_(self.parameters, self.clip)
            self.scaler.step(self.optimizer)
            self.scaler.update()
        elif not self.clip:
            self.optimizer.step()
        else:
            norm = nn.utils.get_total_norm(
                [parameter.grad for parameter in self.parameters if parameter.grad is not None]
            )
            self.check("gradient norm", norm)
            self._step_divided(norm)
        return norm

    def _step_divided(self, norm: Tensor) -> None:
        """Step with gradients clipped to the norm `clip`; the fused AdamW divides them as it reads them."""
        optimizer: torch.optim.Optimizer = self.optimizer
        if not optimizer.defaults["fused"]:
            nn.utils.clip_grads_with_norm_(self.parameters, self.clip, norm)
            optimizer.step()
            return
        optimizer.grad_scale = (norm / self.clip).clamp(min=1.0)  # type: ignore[attr-defined]
        try:
            optimizer.step()
        finally:
            del optimizer.grad_scale  # type: ignore[attr-defined]


def batch_loss(model: nn.Module, batch: Batch, dtype: str = "float32") -> tuple[Tensor, Tensor, Tensor]:
    """The mean cross-entropy in float32, the number of correct predictions, and the number of targets that count."""
    with autocast(batch.targets.device.type, dtype):
        logits = model(*batch.inputs)
    logits, targets = logits.float().flatten(0, -2), batch.targets.flatten()
    cross_entropy: Any = ops.cross_entropy if cpu.is_reproducible() else F.cross_entropy
    loss = cross_entropy(logits, targets, ignore_index=IGNORED)
    return loss, (logits.argmax(-1) == targets).sum(), (targets != IGNORED).sum()


@torch.no_grad()
def evaluation_totals(
    model: nn.Module, batches: Iterable[Batch], dtype: str = "float32", cancelled: Callable[[], bool] = lambda: False
) -> Totals:
    """Sums over `batches` with dropout off, or over the batches before `cancelled()` became true.

    Results are read after the last batch, because reading each would synchronise the device.
    """
    was_training = model.training
    model.eval()
    results: list[tuple[Tensor, Tensor, Tensor]] = []
    for batch in batches:
        if cancelled():
            break
        with matrix_products(dtype):
            results.append(batch_loss(model, batch, dtype))
    model.train(was_training)
    if not results:
        return Totals(0.0, 0.0, 0.0)
    losses, correct, counts = (torch.stack(column).tolist() for column in zip(*results, strict=True))
    loss_sum = sum(loss * count for loss, count in zip(losses, counts, strict=True) if count)
    return Totals(loss_sum, float(sum(correct)), float(sum(counts)))
