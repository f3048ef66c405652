"""What one training step computes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from transformer_kernels.training.evaluation import Batch, training_loss
from transformer_kernels.training.sparse_embedding import SparseEmbeddingAdamW

Check = Callable[[str, Tensor], None]


class TrainingStep:
    """Forward, loss, backward, clipping and optimizer, as a function of a batch alone, so that it can be captured.

    Weights, optimizer state and learning rate are changed where they lie, never replaced. Gradients are None before and
    after: the backward pass then writes them once, into memory of its own (of the graph, when it is captured), where
    gradients that stay would be zeroed, read and added to.

    Args:
        loss: a `TrainingLoss`, or a wrapper of one.
        optimizer: AdamW over the loss's parameters.
        scaler: of the loss, for float16.
        dtype: float32, tf32, bfloat16 or float16.
        clip: largest norm of all gradients together; 0 for no clipping.
        check: is shown ("loss", value) and ("gradient norm", value) before anything depends on them.
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
    ) -> None:
        self.loss, self.optimizer, self.scaler = loss, optimizer, scaler
        self.dtype, self.clip, self.check = dtype, clip, check
        self.parameters = [each for group in optimizer.param_groups for each in group["params"]]

    def __call__(self, batch: Batch) -> Tensor:
        """Train on `batch`; returns its loss and its gradient's norm (0 where nobody looks at it), float32 (2,)."""
        self.optimizer.zero_grad(set_to_none=True)
        try:
            loss = training_loss(self.loss, batch, self.dtype)
            self.check("loss", loss)
            self.scaler.scale(loss).backward()
            if isinstance(self.optimizer, SparseEmbeddingAdamW):
                self.optimizer.tokens = batch.inputs[0]
            norm = self._update(loss)
        finally:
            self.optimizer.zero_grad(set_to_none=True)
        return torch.stack([loss.detach(), norm])

    def _update(self, loss: Tensor) -> Tensor:
        """Clip and step; returns the norm of the gradients."""
        norm = torch.zeros_like(loss)
        if self.scaler.is_enabled():
            self._clip_scaled()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        elif not self.clip:
            self.optimizer.step()
        else:
            norm = nn.utils.get_total_norm([each.grad for each in self.parameters if each.grad is not None])
            self.check("gradient norm", norm)
            self._step_divided(norm)
        return norm

    def _clip_scaled(self) -> None:
        """A step whose gradients overflow is left out by the scaler, so their norm alarms nobody."""
        if self.clip:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.parameters, self.clip)

    def _step_divided(self, norm: Tensor) -> None:
        """The step with gradients shrunk to the norm `clip`; the fused AdamW divides them as it reads them."""
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
