"""Packages that only training needs, imported where they are used."""

import importlib
from types import ModuleType

PACKAGES = {"sklearn": "scikit-learn", "yaml": "PyYAML", "PIL": "pillow"}  # whose names are not those of their modules


def require(module: str) -> ModuleType:
    """Import `module`, or raise ImportError with the package to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = module.partition(".")[0]
        raise ImportError(f"{name} is needed for this: pip install {PACKAGES.get(name, name)}") from error
