"""Layers for the package `kernels`, from this installation, without a download.

    from kernels import Mode, kernelize, use_kernel_mapping
    from transformer_kernels import kernel_layers

    kernel_layers.name_layers()
    with use_kernel_mapping(kernel_layers.mapping()):
        model = kernelize(model, mode=Mode.TRAINING | Mode.TORCH_COMPILE)

`kernelize` replaces the forward of single layers. `transformer_kernels.patch` also fuses adjacent layers and does not
require that package. The default backend is used at each call (`set_backend`, `use_backend`).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from transformer_kernels import nn as ours
from transformer_kernels import ops
from transformer_kernels.patching import _recognised
from transformer_kernels.patching._recognised import has_plain_silu, rms_norm_of

__all__ = ["InstalledLayer", "mapping", "name_layers"]


class _Layer(nn.Module):
    """A stateless layer: its forward is called on the kernelized module."""

    can_torch_compile = True
    has_backward = True


class LayerNorm(_Layer):
    def forward(self: Any, input: Tensor) -> Tensor:
        return ours.layer_norm_of(self, input, None)


class RMSNorm(_Layer):
    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        return rms_norm_of(self, hidden_states, None)


class GELU(_Layer):
    def forward(self: Any, input: Tensor) -> Tensor:
        return ops.gelu(input, approximate=getattr(self, "approximate", "none"))


class GELUTanh(_Layer):
    def forward(self: Any, input: Tensor) -> Tensor:
        return ops.gelu(input, approximate="tanh")


class GatedMLP(_Layer):
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.down_proj(ops.swiglu(self.gate_proj(x), self.up_proj(x)))


LAYERS: dict[str, type[nn.Module]] = {
    "LayerNorm": LayerNorm,
    "RMSNorm": RMSNorm,
    "GeLU": GELU,
    **dict.fromkeys(("GeluTanh", "NewGELU", "FastGELU"), GELUTanh),
    "SwiGLUMLP": GatedMLP,
}
DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class InstalledLayer:
    """A layer repository as defined by `kernels`: `load()` returns the layer of this name from this installation."""

    layer_name: str

    def load(self) -> type[nn.Module]:
        return LAYERS[self.layer_name]

    def __str__(self) -> str:
        return f"transformer_kernels (layer `{self.layer_name}`)"


def mapping() -> dict[str, dict[str, InstalledLayer]]:
    """For `kernels.use_kernel_mapping` or `register_kernel_mapping`: layers by the names of those they replace.

    The names are the names in transformers for RMSNorms and activations ("RMSNorm", "GeLU", "GeluTanh", "NewGELU",
    "FastGELU"), "LayerNorm", and "SwiGLUMLP" for down(silu(gate(x)) * up(x)); each for every mode on CPU and CUDA.
    """
    return {name: dict.fromkeys(DEVICES, InstalledLayer(name)) for name in LAYERS}


def name_layers() -> None:
    """Register these layer names with `kernelize` for classes that have none yet, in this process.

    The classes are torch.nn's LayerNorm, RMSNorm and GELU (exact classes: a subclass may compute something else), and,
    if transformers is imported, its activations and, in the models that are imported by then, each RMSNorm and gated
    feed-forward network with the same code as Llama's. `kernelize` does not replace an RMSNorm over several axes or a
    gate that is not SiLU.

    Raises:
        ImportError: the package `kernels` is missing.
    """
    try:
        from kernels import replace_kernel_forward_from_hub
    except ImportError as error:
        raise ImportError("name_layers needs the package kernels: pip install kernels") from error
    for kind, name in _known_classes():
        if "kernel_layer_name" not in vars(kind):
            replace_kernel_forward_from_hub(kind, name, functools.partial(_is_ours_to_replace, kind))


def _known_classes() -> Iterator[tuple[Any, str]]:
    """The classes that this package has a layer for, each with the name of that layer."""
    yield from ((nn.LayerNorm, "LayerNorm"), (nn.RMSNorm, "RMSNorm"), (nn.GELU, "GeLU"))
    activations = {"GELUActivation": "GeLU", "GELUTanh": "GeluTanh", "NewGELUActivation": "NewGELU"}
    activations |= {"FastGELUActivation": "FastGELU"}
    if (module := sys.modules.get("transformers.activations")) is not None:
        yield from ((getattr(module, kind), name) for kind, name in activations.items())
    models = [module for path, module in sys.modules.items() if path.startswith("transformers.models.")]
    for kind in {kind for module in models for kind in vars(module).values() if _is_layer_of(kind, module)}:
        if (name := NAMES.get(_recognised.replacement_of(kind))) is not None:
            yield kind, name


NAMES: dict[type, str] = {_recognised.RMSNorm: "RMSNorm", _recognised.GatedMLP: "SwiGLUMLP"}


def _is_layer_of(kind: Any, module: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, nn.Module) and kind.__module__ == module.__name__


def _is_ours_to_replace(kind: Any, module: Any) -> bool:
    if type(module) is not kind:
        return False
    if kind is nn.RMSNorm:
        return len(module.normalized_shape) == 1
    return has_plain_silu(module) if hasattr(module, "act_fn") else True
