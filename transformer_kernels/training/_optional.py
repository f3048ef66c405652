"""Optional dependencies of training, imported on first use."""

import importlib
from types import ModuleType

PACKAGES = {"sklearn": "scikit-learn", "yaml": "PyYAML", "PIL": "pillow"}  # module -> package, where the names differ


def require(module: str) -> ModuleType:
    """Import `module`, or raise ImportError with the package to install, or with the error of an installed one."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = module.partition(".")[0]
        if (error.name or "").partition(".")[0] == name and isinstance(error, ModuleNotFoundError):
            raise ImportError(f"{name} is needed for this: pip install {PACKAGES.get(name, name)}") from error
        raise ImportError(f"{name} is installed, but its import failed: {error}") from error
