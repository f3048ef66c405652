"""Your own model on these kernels, in one line: `print(transformer_kernels.patch(model))`."""

from __future__ import annotations

import itertools
from typing import Any

from torch import nn

from transformer_kernels.backends.dispatch import requested, unavailable
from transformer_kernels.backends.errors import BackendUnavailable
from transformer_kernels.patching import _recognised, _rerouted, _torch, _transformers
from transformer_kernels.patching._accelerate import Acceleration, accelerate
from transformer_kernels.patching._code import calls_of
from transformer_kernels.patching._left import left_modules, remedy
from transformer_kernels.patching._models import patch_models, unpatch_models
from transformer_kernels.patching._report import CallReport, CallRow, PatchReport, Row
from transformer_kernels.patching._sentences import pack_inputs, pad_inputs
from transformer_kernels.patching._swap import Patched, class_path, original_class, replaced_method, restore, swap
from transformer_kernels.patching._unpadding import unpad_encoders
from transformer_kernels.patching.graph import compile

__all__ = ["Acceleration", "CallReport", "CallRow", "PatchReport", "Row", "accelerate", "compile", "patch", "unpatch"]


def patch(model: nn.Module, backend: str | None = None, *, unpad: bool = False) -> PatchReport:
    """Run the modules of a model of transformers or torch.nn by this package's operations, in place.

    Replaced anywhere in the model: torch.nn's LayerNorm, RMSNorm, GELU, Softmax, MultiheadAttention,
    TransformerEncoderLayer and TransformerDecoderLayer.

    In models of transformers (5.10 or newer): attention dispatched through `AttentionInterface`, and the loss over
    tokens. RMSNorms, gated MLPs, decoder layers and rotary positions are recognised by the code of their forwards; this
    covers Llama, Mistral, Qwen, Gemma, Phi-3, OLMo 2, SmolLM3, Granite, Cohere, GLM, GPT-NeoX, T5 and every model with
    the same code; code that differs is not patched. In BERT, RoBERTa, DistilBERT and GPT-2 also the residual
    additions with their dropout and LayerNorm, and the products of Conv1D (GPT-2). GELU of transformers.activations.
    Encoders of sentence-transformers 6.2 pack texts instead of padding them. On a CPU, float32 products of linear
    layers, where this package's are faster.

    In modules of other packages, such as timm's attention and norms: the calls F.scaled_dot_product_attention,
    F.layer_norm and F.rms_norm in their own forwards, by the rules of `accelerate`; also timm's Mlp.

    With "auto" on a CPU, the original modules compute what is too small for these kernels to be faster: inference
    (evaluation mode, no gradients), and training of norms, GELU and softmax.

    With `unpad`, hidden states at padding are zeros and batches padded on the right are packed inside the encoder:
    BERT, RoBERTa, XLM-RoBERTa, CamemBERT, ELECTRA, DistilBERT and ModernBERT with a mask of tokens (B, L), and
    `TransformerEncoder` with a bool `src_key_padding_mask` and no other mask. Real tokens, pooled outputs and their
    losses and gradients equal the padded model's; a loss that reads padding does not, and dropout drops other
    elements. Hooks inside the encoder receive the packed row (1, T, E). Calls for other results (all hidden states,
    attention weights, caches, tuples) or with other masks (left padding, holes) are the padded model's. Little padding
    is computed, as is all in compiled, traced and recorded code. In inference without gradients `TransformerEncoder`
    does all this without being asked, where torch's makes nested tensors.

    Parameters, state dict, class names and hooks stay.
    Only this instance changes, and it can be patched again with another backend.

    A query without visible keys gives zeros before the output projection of torch.nn.MultiheadAttention, not NaN.

    A module that was modified (an adapter, a quantised or sharded layer, one with hooks) is called unchanged and not
    fused with its neighbours. Attention, norms, activations, MLPs and losses that are not patched are
    rows of the report, with the reason.

    Args:
        model: any module.
        backend: "torch", "cpu", "triton", "cuda", "auto", or None to follow `set_backend`, `use_backend` and the
            environment at each call. A named backend never falls back.
        unpad: leave out padding inside encoders. Their outputs at padding become zeros.

    Returns:
        a `PatchReport`; print it.

    Raises:
        TypeError: not a module.
        ImportError: the model is one of transformers, which is older than 5.10; nothing is changed.
        ValueError: the name of the backend is unknown.
        BackendUnavailable: the named backend cannot run on the model's device.

    Examples:
        >>> model = torch.nn.TransformerEncoderLayer(64, 4, batch_first=True)
        >>> report = patch(model)
        >>> len(report.patched)
        4
        >>> unpatch(model)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"patch: model must be a torch.nn.Module; got {type(model).__name__}")
    _check_backend(model, backend)
    rows = list(patch_models(model, backend))
    patched = {row.name for row in rows}
    for name, module in list(model.named_modules()):
        if name not in patched and (row := _patch_module(name, module, backend)) is not None:
            rows.append(row)
    rows.extend(pack_inputs(model))
    rows.extend(unpad_encoders(model, backend, unpad))
    rows.extend(left_modules(model, {row.name for row in rows}))
    order = {name: index for index, (name, _) in enumerate(model.named_modules())}
    return PatchReport(backend, tuple(sorted(rows, key=lambda row: order.get(row.name, -1))))


def unpatch(model: nn.Module) -> None:
    """Undo `patch`: every module has its original class, configuration and computation again.

    Args:
        model: a module; one that was never patched is not changed.

    Raises:
        RuntimeError: the class of a module was changed after patching (parametrization, sharding); undo that first.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.LayerNorm(64))
        >>> report = patch(model)
        >>> unpatch(model)
        >>> type(model[0]) is torch.nn.LayerNorm
        True
    """
    patched = [(name, module) for name, module in model.named_modules() if isinstance(module, Patched)]
    for name, module in patched:
        if "_original" not in vars(type(module)):
            name = name or "the model"
            raise RuntimeError(f"unpatch: {name} became a {type(module).__name__} after patch; undo that first")
    unpatch_models(model)
    pad_inputs(model)
    for _, module in patched:
        restore(module)


def _check_backend(model: nn.Module, backend: str | None) -> None:
    if backend is None or requested(backend) == "auto":
        return
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        if tensor.device.type != "meta" and (reason := unavailable(backend, tensor.device)) is not None:
            raise BackendUnavailable(f"patch: backend {backend!r} is not available: {reason}")


def _patch_module(name: str, module: Any, backend: str | None) -> Row | None:
    """Patch one module if it is known; None if there is nothing to report of it."""
    if isinstance(module, Patched):
        module.backend = backend
    kind = original_class(module).__name__
    mixin = _mixin_of(module)
    if mixin is None:
        known = next((known for known in _torch.REPLACEMENTS if isinstance(module, known)), None)
        if known is None or known is nn.TransformerEncoder or type(module).__module__ == "transformer_kernels.nn":
            return None
        calls = calls_of(original_class(module)) or ()
        return Row(name, kind, None, f"a subclass of torch.nn.{known.__name__} with its own code{remedy(calls)}")
    if not isinstance(module, Patched):
        if (method := replaced_method(module)) is not None:
            return Row(name, kind, None, f"its method {method} is replaced on this instance")
        if (reason := getattr(mixin, "refuses", lambda _: None)(module)) is not None:
            return Row(name, kind, None, reason)
        swap(module, mixin, backend)
    return Row(name, kind, mixin.operation) if hasattr(mixin, "operation") else None


def _mixin_of(module: nn.Module) -> Any:
    """The replacement of a module of exactly this class."""
    if (by_class := _torch.REPLACEMENTS.get(original_class(module))) is not None:
        return by_class
    path = class_path(module)
    known = _transformers.REPLACEMENTS.get(path) or _recognised.replacement_for(module)
    return known or _rerouted.mixin_of(original_class(module))
