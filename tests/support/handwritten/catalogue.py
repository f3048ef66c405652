"""All families, with their traps."""

from __future__ import annotations

from tests.support.handwritten import (
    activation_traps,
    attention_scores,
    attention_writes,
    guard_traps,
    more_traps,
    norm_traps,
)
from tests.support.handwritten.activations import GELU_ERF, GELU_TANH, QUICK_GELU, SWIGLU
from tests.support.handwritten.attention import ATTENTION
from tests.support.handwritten.losses import CROSS_ENTROPY, EMBEDDING, LINEAR
from tests.support.handwritten.more_norms import CHANNEL_NORM, LENGTH_NORM, SCALED_NORM
from tests.support.handwritten.norms import LAYER_NORM, RMS_NORM
from tests.support.handwritten.rotary import ROTARY

REGISTERED_BY = (activation_traps, attention_scores, attention_writes, norm_traps, more_traps, guard_traps)
"""Modules that register traps when they are imported."""
FAMILIES = [
    ATTENTION, LAYER_NORM, RMS_NORM, LENGTH_NORM, CHANNEL_NORM, SCALED_NORM, GELU_TANH, GELU_ERF, QUICK_GELU, SWIGLU,
    ROTARY, CROSS_ENTROPY, EMBEDDING, LINEAR,
]  # fmt: skip

UNFOLDED = "heads are folded into the batch for one of the two products only"
OPEN = dict.fromkeys(("attention: product bmm", "attention: product baddbmm", "attention: values bmm"), UNFOLDED)
"""Spellings that are not recognised, with the reason; one that is must leave this list."""
