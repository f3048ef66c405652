"""Plots of a deep network: activations, gradients, loss landscape; and the error of Performer's random features."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from python_ref import ops
from transformer_kernels.visualization.figures import new_figure, write_figure

WIDTH, EXAMPLES = 16, 64
KEEPS_SIZE = 6**0.5  # of uniform weights under ReLU (He et al., 2015): a deep network without shortcuts still trains
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"ReLU": torch.relu, "GELU": ops.gelu}
FEATURES, DEVIATIONS, PROJECTIONS = (16, 64, 256, 1024), (0.25, 0.5, 1.0), 8
KINDS = {True: "with shortcut connections", False: "without shortcut connections"}


def draw_activations(path: str | Path) -> None:
    """Write a figure of ReLU and GELU and of their derivatives.

    Hendrycks and Gimpel, "Gaussian error linear units (GELUs)", 2016.
    """
    figure, (left, right) = new_figure(10.0, 4.0, columns=2)
    for number, (name, function) in enumerate(ACTIVATIONS.items()):
        x = torch.linspace(-4.0, 4.0, 401, requires_grad=True)
        y = function(x)
        (slope,) = torch.autograd.grad(y.sum(), x)
        style = {"label": name, "color": f"C{number}", "linestyle": ("-", "--")[number]}
        left.plot(x.tolist(), y.tolist(), **style)
        right.plot(x.tolist(), slope.tolist(), **style)
    for axes, title in ((left, "activation"), (right, "derivative")):
        axes.set(xlabel="x", title=title)
        axes.grid(alpha=0.3)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncol=2)
    write_figure(figure, path)


def network(layers: int, gain: float = 1.0) -> list[Tensor]:
    """Weights (layers, 16, 16) of linear layers without bias, uniform as in torch.nn.Linear times `gain`."""
    generator = torch.Generator().manual_seed(0)
    bound = gain * WIDTH**-0.5
    return [torch.empty(WIDTH, WIDTH).uniform_(-bound, bound, generator=generator) for _ in range(layers)]


def loss(weights: list[Tensor], shortcuts: bool, outputs: list[Tensor] | None = None) -> Tensor:
    """The mean squared error of a fixed regression: x <- GELU(x W), plus x with shortcuts; the mean of the last x
    must be the sine of the sum of the first. Weights (..., 16, 16) give losses (...). `outputs` receives each x."""
    x = torch.randn(EXAMPLES, WIDTH, generator=torch.Generator().manual_seed(1))
    target = x.sum(1).sin()
    for weight in weights:
        y = ops.gelu(x @ weight)
        x = x + y if shortcuts else y
        if outputs is not None:
            outputs.append(x)
    return (x.mean(-1) - target).square().mean(-1)


def gradient_sizes(layers: int, shortcuts: bool) -> list[float]:
    """The mean absolute gradient of each layer's output at initialisation, first layer first.

    The gradient of a layer's weights is this times the layer's input. Without shortcuts the inputs shrink from layer
    to layer as much as these gradients grow, so the gradients of all weights are equally small."""
    if layers < 1:
        raise ValueError(f"gradients: layers must be at least 1; got {layers}")
    outputs: list[Tensor] = []
    error = loss([weight.requires_grad_() for weight in network(layers)], shortcuts, outputs)
    return [float(gradient.abs().mean()) for gradient in torch.autograd.grad(error, outputs)]


def draw_gradients(layers: int, path: str | Path) -> dict[bool, list[float]]:
    """Write a figure of `gradient_sizes` with and without shortcut connections; returns them.

    He et al., "Deep residual learning for image recognition", 2015.
    """
    sizes = {shortcuts: gradient_sizes(layers, shortcuts) for shortcuts in KINDS}
    figure, (axes,) = new_figure(8.0, 4.2)
    for (shortcuts, values), style in zip(sizes.items(), ("o-", "s--"), strict=True):
        axes.plot(range(1, layers + 1), values, style, label=KINDS[shortcuts], markersize=4)
    axes.set(xlabel="layer", ylabel="mean |gradient| of the output", yscale="log")
    axes.set_title(f"gradients of {layers} layers of width {WIDTH} at initialisation")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncol=2)
    write_figure(figure, path)
    return sizes


def trained(layers: int, shortcuts: bool, steps: int) -> list[Tensor]:
    """The weights after `steps` of Adam on `loss`, each kind from the initialisation that keeps the size of its x."""
    weights = [weight.requires_grad_() for weight in network(layers, 1.0 if shortcuts else KEEPS_SIZE)]
    optimiser = torch.optim.Adam(weights, lr=3e-3)
    for _ in range(steps):
        optimiser.zero_grad()
        loss(weights, shortcuts).backward()
        optimiser.step()
    return [weight.detach() for weight in weights]


@torch.no_grad()
def landscape(weights: list[Tensor], shortcuts: bool, points: int) -> Tensor:
    """The loss (points, points) at weights + a d1 + b d2 for a and b from -1 to 1.

    The random directions d have the norm of the weights, column by column. Li et al., "Visualizing the loss landscape
    of neural nets", 2018.
    """
    generator = torch.Generator().manual_seed(2)
    directions = []
    for _ in range(2):
        random = [torch.randn(weight.shape, generator=generator) for weight in weights]
        directions.append([d * w.norm(dim=0) / d.norm(dim=0) for d, w in zip(random, weights, strict=True)])
    scale = torch.linspace(-1.0, 1.0, points)
    b, a = torch.meshgrid(scale, scale, indexing="ij")
    moved = [w + a[..., None, None] * d + b[..., None, None] * e for w, d, e in zip(weights, *directions, strict=True)]
    return loss(moved, shortcuts)


def draw_landscape(layers: int, path: str | Path, *, steps: int = 200, points: int = 25) -> dict[bool, float]:
    """Write a figure of the loss around trained weights, with and without shortcuts; returns the trained losses."""
    if layers < 1:
        raise ValueError(f"landscape: layers must be at least 1; got {layers}")
    figure, panels = new_figure(12.0, 4.8, columns=2)
    weights = {shortcuts: trained(layers, shortcuts, steps) for shortcuts in KINDS}
    losses = {shortcuts: float(loss(weight, shortcuts)) for shortcuts, weight in weights.items()}
    grids = {shortcuts: landscape(weight, shortcuts, points).log10() for shortcuts, weight in weights.items()}
    lowest, highest = (float(end) for end in torch.stack([*grids.values()]).aminmax())
    levels = torch.linspace(lowest, highest, 25).tolist()  # of both panels, so that a colour is one loss
    scale = torch.linspace(-1.0, 1.0, points).tolist()
    for axes, (shortcuts, grid) in zip(panels, grids.items(), strict=True):
        image = axes.contourf(scale, scale, grid.numpy(), levels=levels, cmap="viridis")
        axes.plot(0, 0, "w+", markersize=10)
        axes.set(
            xlabel="first direction", ylabel="second direction", aspect="equal", xticks=[-1, 0, 1], yticks=[-1, 0, 1]
        )
        axes.set_title(f"{KINDS[shortcuts]}\nloss {losses[shortcuts]:.3g} at +", fontsize=10)
    figure.colorbar(image, ax=panels, label="log10 of the loss", format="%.1f")
    figure.suptitle(f"loss landscape of {layers} layers after {steps} steps")
    write_figure(figure, path)
    return losses


@torch.no_grad()
def feature_error(features: int, deviation: float) -> float:
    """The error of Performer's random features: RMS, relative to softmax attention, the mean of several projections.

    Queries and keys (4 heads of 128 tokens and 16 columns) are normal with this standard deviation.
    """
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 4, 128, WIDTH, dtype=torch.float64, generator=generator).unbind()
    q, k = deviation * q, deviation * k
    exact = ops.attention_weights(q, k) @ v
    errors = []
    for _ in range(PROJECTIONS):
        projection = ops.orthogonal_projection(features, WIDTH, generator=generator)
        errors.append((ops.performer_attention(q, k, v, projection) - exact).square().mean().sqrt())
    return float(torch.stack(errors).mean() / exact.square().mean().sqrt())


def draw_performer(path: str | Path) -> dict[float, list[float]]:
    """Write a figure of `feature_error` against the number of features; returns the errors by standard deviation.

    Choromanski et al., "Rethinking attention with Performers", 2021.
    """
    errors = {deviation: [feature_error(count, deviation) for count in FEATURES] for deviation in DEVIATIONS}
    figure, (axes,) = new_figure(8.0, 4.2)
    for (deviation, values), style in zip(errors.items(), ("o-", "s--", "^:"), strict=True):
        axes.plot(FEATURES, values, style, label=f"queries and keys of standard deviation {deviation:g}")
    axes.set(xlabel="random features", ylabel="relative RMS error", yscale="log")
    axes.set_xscale("log", base=2)
    axes.minorticks_off()
    for set_ticks, ticks in ((axes.set_xticks, FEATURES), (axes.set_yticks, (0.02, 0.05, 0.1, 0.2, 0.5, 1))):
        set_ticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_title("Performer's estimate of softmax attention")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center")
    write_figure(figure, path)
    return errors
