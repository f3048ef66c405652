"""AdamW that leaves alone the rows of an embedding that a batch does not have."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class SparseEmbeddingAdamW(torch.optim.AdamW):
    """Fused AdamW, except that of one embedding only the rows in `tokens` are read and written.

    This is another algorithm than AdamW (Loshchilov and Hutter 2019): the moments of an absent row do not decay, and
    the row itself neither moves nor decays until it comes again. Bias correction counts all steps. A step reads weight,
    gradient and moments of the rows that are there, in place of those of the whole embedding.

    Args:
        params: as for AdamW; `embedding` is in one of the groups.
        embedding: (V, E), of which no other part of the model makes a gradient.
        options: as for AdamW.
    """

    def __init__(self, params: Any, embedding: nn.Parameter, **options: Any) -> None:
        super().__init__(params, **options, fused=True)
        self.embedding = embedding
        self.tokens: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update everything else as AdamW does, then the rows `tokens` of the embedding."""
        gradient, self.embedding.grad = self.embedding.grad, None
        try:
            loss = super().step(closure)
        finally:
            self.embedding.grad = gradient
        if gradient is not None:
            self._update_rows(gradient)
        return loss

    def _update_rows(self, gradient: Tensor) -> None:
        """Take the rows out, update them as tensors of their own, and put them back."""
        assert self.tokens is not None
        tokens = row_numbers(self.tokens)  # (N,)
        state, group = self._state(), self._group()
        kept = [self.embedding, state["exp_avg"], state["exp_avg_sq"]]
        weight, exp_avg, exp_avg_sq = rows = [tensor[tokens] for tensor in kept]  # (N, E)
        found_inf = getattr(self, "found_inf", None)
        state["step"].add_(1 if found_inf is None else 1 - found_inf.squeeze())
        torch._fused_adamw_(
            [weight],
            [gradient[tokens]],
            [exp_avg],
            [exp_avg_sq],
            [],
            [state["step"]],
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
            grad_scale=getattr(self, "grad_scale", None),
            found_inf=found_inf,
        )
        for tensor, updated in zip(kept, rows, strict=True):
            tensor.index_copy_(0, tokens, updated)

    def _group(self) -> dict[str, Any]:
        return next(group for group in self.param_groups if any(each is self.embedding for each in group["params"]))

    def _state(self) -> dict[str, Tensor]:
        """The embedding's state, named and shaped as AdamW's, so that checkpoints are the same."""
        state = self.state[self.embedding]
        if not state:
            state["step"] = torch.zeros((), device=self.embedding.device)
            state["exp_avg"] = torch.zeros_like(self.embedding, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(self.embedding, memory_format=torch.preserve_format)
        return state


def row_numbers(tokens: Tensor) -> Tensor:
    """The rows to update, each once on the CPU; on a GPU, where to count them is to wait, as often as they come.

    A row that comes twice is computed twice there, by the same instructions and so with the same result.
    """
    return tokens.unique() if tokens.device.type == "cpu" else tokens.flatten()
