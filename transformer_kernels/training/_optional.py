"""Packages that only training needs, imported where they are used."""

import importlib
from types import ModuleType


def require(module: str, extra: str = "train") -> ModuleType:
    """Import `module`, or say which extra of this package brings it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ImportError(f"{package} is needed for this: pip install 'transformer_kernels[{extra}]'") from error
