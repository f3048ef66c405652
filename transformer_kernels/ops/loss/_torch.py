"""Cross-entropy with PyTorch's kernels, in chunks of rows that fit a cache; no tensor of the logits' size is saved."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from transformer_kernels.ops._kernels import Grads, Wanted
from transformer_kernels.ops._softcap import cap, cap_slope
from transformer_kernels.ops.loss._calls import (
    CrossEntropyCall,
    CrossEntropyResult,
    LossKernels,
    RowLoss,
)

aten = torch.ops.aten

ELEMENTS_AT_ONCE = 1 << 18  # CPU: a chunk of logits and its log-probabilities fit the second-level cache
NO_REDUCTION = 0  # of aten.nll_loss_forward


class Kernels(LossKernels):
    """Cross-entropy through PyTorch's kernels."""

    def forward(self, call: CrossEntropyCall) -> CrossEntropyResult:
        """(loss, None, denominator of a mean); no statistics, backward recomputes softmax."""
        logits, targets, classes, options = call.logits, call.targets, call.logits.shape[-1], call.row_loss()
        losses = self.row_losses(logits.view(-1, classes), _rows_of(targets, classes), options)
        if call.reduction == "none":
            return CrossEntropyResult(losses.view(logits.shape[:-1]), None, None)
        if targets.is_floating_point() and call.reduction == "mean":
            return CrossEntropyResult(losses.mean(), None, losses.new_tensor(float(losses.numel())))
        loss, count = self.reduced(losses, targets, call.ignore_index, call.reduction, options.weights)
        return CrossEntropyResult(loss, None, count)

    def backward(
        self, call: CrossEntropyCall, result: CrossEntropyResult, grads: Grads, wanted: Wanted
    ) -> tuple[Tensor]:
        """dloss * (softmax - smoothed target), divided by the denominator of a mean."""
        (dloss,), logits, count, options = grads, call.logits, result.counted, call.row_loss()
        dlogits = torch.empty_like(logits)
        classes = logits.shape[-1]
        scales = dloss if count is None or call.reduction != "mean" else dloss / count
        scales = scales.expand(logits.shape[:-1]).reshape(-1)
        if not call.targets.is_floating_point():
            scales = scales.masked_fill(call.targets.view(-1) == call.ignore_index, 0.0)
        every = (logits.view(-1, classes), _rows_of(call.targets, classes), scales, dlogits.view(-1, classes))
        for chunk, target, scale, out in _chunks(*every):
            if _is_plain(options, target):
                p = torch.softmax(chunk, dim=-1, dtype=scale.dtype)
                _write_gradient(p, target, scale, options.ignore_index, options.label_smoothing, out)
            else:
                torch.mul(_gradient(_terms(options, chunk, target), options), scale.unsqueeze(1), out=out)
        return (dlogits,)

    @classmethod
    def row_losses(cls, logits: Tensor, targets: Tensor, options: RowLoss, *, in_place: bool = False) -> Tensor:
        """Targets may be probabilities (M, V)."""
        losses = []
        for chunk, target in _chunks(logits, targets):
            if _is_plain(options, targets):
                log_p, plain = _log_softmax(chunk), (options.ignore_index, options.label_smoothing)
                losses.append(_losses(log_p, target, *plain))
                if in_place:
                    _write_gradient(log_p.exp_(), target, torch.ones_like(losses[-1]), *plain, chunk)
            else:
                terms = _terms(options, chunk, target)
                losses.append(_losses_of(terms, options))
                if in_place:
                    chunk.copy_(_gradient(terms, options))
        return losses[0] if len(losses) == 1 else torch.cat(losses)


class _Terms(NamedTuple):
    """Terms of a chunk: capped scores and smoothed, weighted targets (R, V), log-sum-exp and ignored rows (R, 1)."""

    scores: Tensor
    smoothed: Tensor
    lse: Tensor
    ignored: Tensor


def _rows_of(targets: Tensor, classes: int) -> Tensor:
    """Classes (M,), or probabilities (M, V)."""
    return targets.view(-1, classes) if targets.is_floating_point() else targets.view(-1)


def _is_plain(options: RowLoss, targets: Tensor) -> bool:
    """Whether PyTorch's fused operators compute this loss."""
    return options.is_plain() and not targets.is_floating_point()


def _terms(options: RowLoss, logits: Tensor, targets: Tensor) -> _Terms:
    wide = torch.promote_types(logits.dtype, torch.float32)
    scores = cap(logits.to(wide, copy=options.softcap is not None), options.softcap)
    if targets.is_floating_point():
        ignored = torch.zeros_like(scores[:, :1], dtype=torch.bool)
        smoothed = targets.to(scores.dtype) * (1.0 - options.label_smoothing)
    else:
        ignored = (targets == options.ignore_index).unsqueeze(1)
        column = targets.clamp(0, scores.shape[1] - 1).unsqueeze(1)
        kept = torch.full_like(scores[:, :1], 1.0 - options.label_smoothing)
        kept.masked_fill_(_outside(targets, scores.shape[1], options.ignore_index).unsqueeze(1), torch.nan)
        smoothed = torch.zeros_like(scores).scatter_(1, column, kept)
    smoothed.add_(options.label_smoothing / scores.shape[1])
    if options.weights is not None:
        smoothed.mul_(options.weights[:-1])
    return _Terms(scores, smoothed.masked_fill_(ignored, 0.0), torch.logsumexp(scores, dim=-1, keepdim=True), ignored)


def _losses_of(terms: _Terms, options: RowLoss) -> Tensor:
    """sum of targets * (lse - scores) + z lse^2 of each row; a class with target 0 may have a score of -inf."""
    scores, smoothed, lse, ignored = terms
    terms_of_classes = (lse - scores).masked_fill_(smoothed == 0.0, 0.0).mul_(smoothed)
    z_losses = lse.square().mul_(options.z_loss).masked_fill_(ignored, 0.0)
    return terms_of_classes.sum(dim=-1).add_(z_losses.squeeze(1))


def _gradient(terms: _Terms, options: RowLoss) -> Tensor:
    """d loss / d logits of each row: (sum of targets + 2 z lse) p - targets, through the cap."""
    scores, smoothed, lse, ignored = terms
    share = smoothed.sum(dim=-1, keepdim=True).add_(lse, alpha=2.0 * options.z_loss)
    gradient = torch.exp(scores - lse).mul_(share).sub_(smoothed)
    if options.softcap is not None:
        gradient.mul_(cap_slope(scores, options.softcap))
    return gradient.masked_fill_(ignored, 0.0)


def _chunks(logits: Tensor, *others: Tensor) -> zip:  # type: ignore[type-arg]
    """Corresponding chunks of rows of each tensor; a single chunk except on the CPU."""
    rows = max(1, ELEMENTS_AT_ONCE // logits.shape[1]) if logits.device.type == "cpu" else max(1, logits.shape[0])
    return zip(*(tensor.split(rows) for tensor in (logits, *others)), strict=True)


def _log_softmax(logits: Tensor) -> Tensor:
    return torch.log_softmax(logits, dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))


def _outside(targets: Tensor, classes: int, ignore_index: int) -> Tensor:
    """Which targets are out of range: on a GPU their row becomes NaN; on the CPU they were rejected before."""
    return ((targets < 0) | (targets >= classes)) & (targets != ignore_index)


def _losses(log_p: Tensor, targets: Tensor, ignore_index: int, label_smoothing: float) -> Tensor:
    """(R, V), (R,) -> (R,)."""
    outside = None if log_p.device.type == "cpu" else _outside(targets, log_p.shape[1], ignore_index)
    safe = targets if outside is None else targets.masked_fill(outside, ignore_index)
    losses = aten.nll_loss_forward.default(log_p, safe, None, NO_REDUCTION, ignore_index)[0]
    if label_smoothing > 0.0:
        smooth = log_p.mean(dim=-1).mul_(-label_smoothing).masked_fill_(safe == ignore_index, 0.0)
        losses = smooth.add_(losses, alpha=1.0 - label_smoothing)
    return losses if outside is None else losses.masked_fill_(outside, torch.nan)


def _write_gradient(
    p: Tensor, targets: Tensor, scale: Tensor, ignore_index: int, label_smoothing: float, out: Tensor
) -> None:
    """out = scale * (p - smoothed target), 0 in ignored rows; p (R, V) is overwritten, scale (R,)."""
    ignored = targets == ignore_index
    if p.device.type != "cpu":
        scale = scale.masked_fill(_outside(targets, p.shape[1], ignore_index), torch.nan)
    if label_smoothing > 0.0:
        p.sub_(label_smoothing / p.shape[1])
    column = targets.clamp(0, p.shape[1] - 1).unsqueeze(1)  # (R, 1)
    p.scatter_(1, column, p.gather(1, column).sub_(1.0 - label_smoothing))
    torch.mul(p, scale.unsqueeze(1), out=out)
    out.masked_fill_(ignored.unsqueeze(1), 0.0)  # 0 * NaN is NaN
