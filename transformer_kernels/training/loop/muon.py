"""Muon: momentum, orthogonalised, as the update of a matrix."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

# Polar Express (Amsel et al. 2025) from 0.01: three polynomials map singular values in [0.01, 1] to [0.73, 1.27].
COEFFICIENTS = (8.0934, -23.6196, 17.4460), (3.6374, -2.7218, 0.5372), (2.6610, -1.9766, 0.4528)
RMS = 0.176  # 0.2 as of AdamW's updates (Liu et al. 2025), times 0.88, the mean singular value of Jordan's iterations


def hidden_matrices(model: nn.Module) -> list[Tensor]:
    """The weights of the linear layers in the model's blocks: not embeddings, outputs, norms, biases and experts."""
    return [
        module.weight
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and "blocks." in name and module.weight.requires_grad
    ]


def orthogonalised(matrices: Tensor) -> Tensor:
    """The nearest semi-orthogonal matrices, approximately, by Newton-Schulz iterations: (N, R, C) -> (N, R, C).

    X <- (a + b X X^T + c (X X^T)^2) X from X / sqrt(|X X^T|) moves all singular values towards 1. The result
    does not depend on the scale of `matrices`. The iterations multiply matrices of (R, R), R <= C, only: X X^T and the
    polynomials. The products have the dtype of `matrices`.
    """
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    gram = torch.bmm(x, x.mT)  # (N, R, R)
    largest = gram.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-14)  # at least the largest eigenvalue
    gram /= largest
    first, *others = COEFFICIENTS
    polynomial = product = _polynomial(gram, *first)
    for other in others:
        gram = torch.bmm(torch.bmm(polynomial, gram), polynomial)
        polynomial = _polynomial(gram, *other)
        product = torch.bmm(polynomial, product)
    x = torch.bmm(product * largest.rsqrt(), x)
    return x.mT if tall else x


def _polynomial(gram: Tensor, a: float, b: float, c: float) -> Tensor:
    """a + b G + c G^2, (N, R, R)."""
    result = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
    result.diagonal(dim1=-2, dim2=-1).add_(a)
    return result


class Muon(torch.optim.AdamW):
    """Muon for matrices and fused AdamW for the other parameters, with one learning rate and one weight decay.

    M <- mu M + (1 - mu) G;  W <- W - lr (weight_decay W + 0.176 sqrt(max(R, C)) orthogonalised((1 - mu) G + mu M))

    for a matrix W (R, C) with gradient G. The factor gives updates about the root mean square of AdamW's (Liu et al.
    2025, equation 4). `torch.optim.Muon` reads the learning rate on the host, which a captured step cannot repeat, and
    orthogonalises one matrix at a time; here all matrices of a shape are one batch.

    Args:
        params: as for AdamW; the first group contains `matrices`.
        matrices: two-dimensional parameters.
        momentum: mu.
        products: dtype of the Newton-Schulz iterations.
        options: as for AdamW.
    """

    def __init__(
        self,
        params: Any,
        matrices: Iterable[Tensor],
        *,
        momentum: float = 0.95,
        products: torch.dtype = torch.float32,
        **options: Any,
    ) -> None:
        super().__init__(params, **options, fused=True)
        self.momentum, self.products = momentum, products
        self.shapes: dict[torch.Size, list[Tensor]] = defaultdict(list)
        for matrix in matrices:
            self.shapes[matrix.shape].append(matrix)

    def __setstate__(self, state: dict[str, Any]) -> None:
        torch.optim.Optimizer.__setstate__(self, state)  # AdamW's reads the step of each parameter

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update the matrices, then all other parameters with AdamW."""
        matrices = [matrix for shape in self.shapes.values() for matrix in shape if matrix.grad is not None]
        gradients = [m.grad for m in matrices]
        for shape in self.shapes.values():
            self._update([matrix for matrix in shape if matrix.grad is not None])
        for matrix in matrices:
            matrix.grad = None
        try:
            return super().step(closure)
        finally:
            for matrix, gradient in zip(matrices, gradients, strict=True):
                matrix.grad = gradient

    def _update(self, matrices: list[Tensor]) -> None:
        """Update matrices of one shape."""
        if not matrices:
            return
        group, scale = self.param_groups[0], getattr(self, "grad_scale", None)
        gradients = [m.grad for m in matrices if m.grad is not None]
        if scale is not None:
            torch._foreach_div_(gradients, scale)  # in place, as by the fused AdamW
        momenta = [self._momentum(m) for m in matrices]
        torch._foreach_lerp_(momenta, gradients, 1 - self.momentum)
        mixed = torch.empty(len(matrices), *matrices[0].shape, dtype=self.products, device=matrices[0].device)
        for gradient, momentum, mixture in zip(gradients, momenta, mixed, strict=True):  # divided by 1 - mu
            torch.add(gradient, momentum, alpha=self.momentum / (1 - self.momentum), out=mixture)
        updates = orthogonalised(mixed)
        updates *= -RMS * math.sqrt(max(mixed.shape[1:])) * group["lr"]
        decay = torch.as_tensor(1 - group["lr"] * group["weight_decay"])
        for matrix, update in zip(matrices, updates, strict=True):
            torch.addcmul(update, matrix, decay, out=matrix)

    def _momentum(self, matrix: Tensor) -> Tensor:
        state = self.state[matrix]
        if not state:
            state["momentum"] = torch.zeros_like(matrix, memory_format=torch.preserve_format)
        return state["momentum"]
