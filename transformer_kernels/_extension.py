"""The compiled extension: loaded once, and remembered why not."""

from __future__ import annotations

import torch


def unavailable(device: torch.device) -> str | None:
    """The reason, with its remedy, why CUDA kernels cannot run on `device`; None where they can."""
    return "the extension is not built; install with nvcc on the PATH or CUDA_HOME set"
