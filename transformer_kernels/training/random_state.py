"""Every random generator that a run may draw from, saved as plain JSON values."""

from __future__ import annotations

import base64
import random
from typing import Any

import numpy
import torch
from torch import Tensor


def capture(device: torch.device) -> dict[str, Any]:
    """The states of Python's, NumPy's and PyTorch's generators, and of the device's own."""
    version, words, gauss = random.getstate()
    numpy_state: Any = numpy.random.get_state(legacy=True)
    _, numpy_words, position, has_gauss, cached = numpy_state
    state = {
        "python": [version, list(words), gauss],
        "numpy": [numpy_words.tolist(), position, has_gauss, cached],
        "torch": _text(torch.get_rng_state()),
    }
    if device.type == "cuda":
        state["cuda"] = _text(torch.cuda.get_rng_state(device))
    return state


def restore(state: dict[str, Any], device: torch.device) -> None:
    """Put every generator back to where `capture` found it."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    numpy_words, position, has_gauss, cached = state["numpy"]
    numpy.random.set_state(("MT19937", numpy.array(numpy_words, dtype=numpy.uint32), position, has_gauss, cached))
    torch.set_rng_state(_tensor(state["torch"]))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(_tensor(state["cuda"]), device)


def _text(tensor: Tensor) -> str:
    return base64.b64encode(tensor.numpy().tobytes()).decode()


def _tensor(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
