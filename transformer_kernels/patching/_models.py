"""Patches of whole models of transformers: the attention function, selected by name, and the loss."""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

from transformer_kernels.patching._output import OutputLayer
from transformer_kernels.patching._products import Linear
from transformer_kernels.patching._recognised import RotaryAttention, rotates_by_tables
from transformer_kernels.patching._report import Row
from transformer_kernels.patching._swap import Mixin, Patched, is_plain, original_class, swap
from transformer_kernels.patching._transformers import LOSSES

CONFIGS = "_configs_of_patch"
"""The attribute with the copied and the original configuration of a patched module."""

WEIGHT_OPTIONS = ("return_attention", "output_attentions")


def hand_on_weights(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    """`return_attention` is `output_attentions` of transformers, which not every model passes to its attention."""
    requested = any(kwargs.get(name) for name in WEIGHT_OPTIONS)
    return (args, {**kwargs, **dict.fromkeys(WEIGHT_OPTIONS, True)}) if requested else None


class Attention(Mixin):
    """An attention layer that looks up its function by `config._attn_implementation`; `backend` is read from here."""

    operation = "attention"


def pretrained_models(model: nn.Module) -> list[tuple[str, Any]]:
    """The models of transformers in a module, outermost first, without importing transformers."""
    if sys.modules.get("transformers") is None:
        return []
    from transformers import PreTrainedModel

    return [(name, module) for name, module in model.named_modules() if isinstance(module, PreTrainedModel)]


def patch_models(model: nn.Module, backend: str | None) -> Iterator[Row]:
    """Patch the attention and the loss of each model of transformers in a module."""
    found = pretrained_models(model)
    if not found:
        return
    from transformer_kernels.huggingface import NAME, require_transformers

    require_transformers()
    for name, part in found:
        outermost = not any(other is not part and _holds(other, part) for _, other in found)
        if outermost:
            yield from _patch_attention(name, part, backend, NAME)
        yield from _patch_loss(name, part, backend)
        yield from _patch_output(name, part, backend)
    for _, part in found:
        for layer in [layer for layer in part.modules() if type(layer) is nn.Linear and is_plain(layer, nn.Linear)]:
            swap(layer, Linear, backend)


def unpatch_models(model: nn.Module) -> None:
    """Undo `patch_models`."""
    for _, part in pretrained_models(model):
        if "_attention_before" in vars(part):
            part.config._attn_implementation_internal = vars(part).pop("_attention_before")
        if _is_ours(vars(part).get("_loss_function")):
            del part._loss_function
        for key in [key for key, hook in part._forward_pre_hooks.items() if hook is hand_on_weights]:
            del part._forward_pre_hooks[key], part._forward_pre_hooks_with_kwargs[key]
    _return_configs(model)


def _holds(model: nn.Module, part: nn.Module) -> bool:
    return any(module is part for module in model.modules())


def _patch_attention(name: str, model: Any, backend: str | None, ours: str) -> Iterator[Row]:
    layers = [(path, layer) for path, layer in model.named_modules(prefix=name) if _asks_for_its_function(layer)]
    reason = _why_not(model, [layer for _, layer in layers])
    if reason is None:
        _own_configs(model)
        inside = [part for _, part in pretrained_models(model)]
        for part in inside:
            if part.config._attn_implementation != ours:
                part._attention_before = part.config._attn_implementation
        model.set_attn_implementation(ours)
        for part in inside:
            if hand_on_weights not in part._forward_pre_hooks.values():
                part.register_forward_pre_hook(hand_on_weights, with_kwargs=True)
    for path, layer in layers:
        kind = original_class(layer).__name__
        if reason is not None:
            yield Row(path, kind, None, reason)
            continue
        mixin = RotaryAttention if rotates_by_tables(model, layer) else Attention
        if isinstance(layer, Patched):
            layer.backend = backend
        else:
            swap(layer, mixin, backend)
        yield Row(path, kind, mixin.operation)


def _asks_for_its_function(layer: nn.Module) -> bool:
    code = getattr(inspect.unwrap(original_class(layer).forward), "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


def _why_not(model: Any, layers: list[Any]) -> str | None:
    """Why this model's attention is not patched, or None."""
    if any(getattr(layer, "reorder_and_upcast_attn", False) for layer in layers):
        return "reorder_and_upcast_attn is set"
    if getattr(model.config, "output_attentions", False):
        return "config.output_attentions is set"
    from transformer_kernels.huggingface import REFUSED, constants

    kinds = dict.fromkeys(original_class(layer) for layer in layers)
    for name in {name for kind in kinds for name in constants(kind)} & REFUSED.keys():
        return REFUSED[name]
    return None if model._can_set_attn_implementation() else "the model does not let its attention be chosen"


def _own_configs(model: nn.Module) -> None:
    """Copy the configurations of the model: they store the name of the attention, and models may share them."""
    from transformers import PreTrainedConfig

    copies: dict[int, Any] = {}
    module: Any
    for module in model.modules():
        config = vars(module).get("config")
        if not isinstance(config, PreTrainedConfig) or vars(module).get(CONFIGS, (None,))[0] is config:
            continue
        module.config = copy.deepcopy(config, copies)
        setattr(module, CONFIGS, (module.config, config))


def _return_configs(model: nn.Module) -> None:
    """Undo `_own_configs`: restore the original objects, with later changes except to the attention implementation."""
    from transformers import PreTrainedConfig

    module: Any
    for module in model.modules():
        if CONFIGS not in vars(module):
            continue
        own, before = vars(module).pop(CONFIGS)
        if module.config is not own:  # the configuration was replaced since
            continue
        kept = {"_attn_implementation_internal": before._attn_implementation_internal}
        changed = {name: value for name, value in vars(own).items() if not isinstance(value, PreTrainedConfig)}
        vars(before).update(changed | kept)
        module.config = before


def _patch_output(name: str, model: Any, backend: str | None) -> Iterator[Row]:
    """Patch the output layer if it is a plain linear layer."""
    layer = model.get_output_embeddings()
    for path, module in model.named_modules(prefix=name):
        if module is layer and original_class(layer) is nn.Linear:
            if isinstance(layer, Patched):
                layer.backend = backend
            else:
                swap(layer, OutputLayer, backend)
            yield Row(path, "Linear", OutputLayer.operation)


def _patch_loss(name: str, model: Any, backend: str | None) -> Iterator[Row]:
    code = getattr(inspect.unwrap(original_class(model).forward), "__code__", None)
    if code is None or "loss_function" not in code.co_names:
        return
    path, kind = f"{name}.loss".lstrip("."), original_class(model).__name__
    before = vars(model).get("_loss_function")
    if before is not None and not _is_ours(before):
        yield Row(path, kind, None, "the model has a loss function of its own")
    elif (loss := LOSSES.get(model.loss_type or "ForCausalLM")) is None:  # transformers falls back to that one too
        yield Row(path, kind, None, f"{model.loss_type} is not a loss over tokens")
    else:
        model._loss_function = functools.partial(loss, backend=backend)
        yield Row(path, kind, "cross_entropy")


def _is_ours(loss: Any) -> bool:
    return getattr(loss, "func", None) in LOSSES.values()
