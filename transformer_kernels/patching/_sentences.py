"""Encoders of sentence-transformers: a batch of texts is packed into one row instead of padded.

sentence-transformers implements packing, and uses it if FlashAttention is selected.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

from transformer_kernels.patching._report import Row
from transformer_kernels.patching._swap import class_path

CLASS = "sentence_transformers.base.modules.transformer.Transformer"
BOUNDS = {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"}
CHANGED = (
    "can_flatten_inputs",
    "data_collator",
    "model_forward_params",
    "_flatten_position_offset",
    "_should_flatten_inputs",
)
BEFORE = "_attributes_before_patch"


def pack_inputs(model: nn.Module) -> Iterator[Row]:
    """Let each module that tokenises and encodes pack its texts."""
    for name, module in model.named_modules():
        if class_path(module) != CLASS:
            continue
        reason = _why_not(module)
        if reason is None and BEFORE not in vars(module):
            _pack(module)
        yield Row(name, "Transformer", "packed inputs" if reason is None else None, reason)


def pad_inputs(model: nn.Module) -> None:
    """Undo `pack_inputs`."""
    for module in model.modules():
        if (before := vars(module).pop(BEFORE, None)) is not None:
            for name in CHANGED:
                vars(module).pop(name, None)
            vars(module).update(before)


def _why_not(module: Any) -> str | None:
    """Why texts are padded; None if the positions and the bounds of packed texts reach a patched attention."""
    huggingface = sys.modules.get("transformer_kernels.huggingface")
    config = getattr(module.model, "config", None)
    if huggingface is None or getattr(config, "_attn_implementation", None) != huggingface.NAME:
        return "the attention of its model is not patched"
    if not all(hasattr(module, name) for name in ("can_flatten_inputs", "_infer_flatten_position_offset")):
        return "this release of sentence-transformers does not pack texts"
    if module.unpad_inputs is False:
        return "unpad_inputs is False"
    if module.transformer_task not in ("feature-extraction", "fill-mask") or "text" not in module.modality_config:
        return "its task is not the encoding of texts"
    if any(method["method"] != "forward" for method in module.modality_config.values()):
        return "it calls other methods than forward"
    if "position_ids" not in inspect.signature(module.model.forward).parameters:
        return "its model takes no positions"
    return None


def _pack(module: Any) -> None:
    from transformers import DataCollatorWithFlattening

    setattr(module, BEFORE, {name: vars(module)[name] for name in CHANGED if name in vars(module)})
    module.can_flatten_inputs = True
    module.data_collator = DataCollatorWithFlattening(
        return_position_ids=True, return_flash_attn_kwargs=True, return_seq_idx=True
    )
    if module.model_forward_params is not None:
        module.model_forward_params = module.model_forward_params | BOUNDS
    module._flatten_position_offset = module._infer_flatten_position_offset()
    module._should_flatten_inputs = functools.partial(_packs, module)


def _packs(module: Any, modality: Any, inputs: dict[str, Any], **kwargs: Any) -> bool:
    """Whether a batch is packed; one text has no padding."""
    several = any(len(texts) > 1 for texts in inputs.values() if isinstance(texts, list))
    return several and type(module)._should_flatten_inputs(module, modality, inputs, **kwargs)
