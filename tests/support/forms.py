"""`python -m tests.support.forms transformers.models.llama.modeling_llama` prints the forms in a module."""

import importlib
import sys
import types

from torch import nn

from transformer_kernels.patching._forms import fingerprint, forward_fingerprint


def main():
    """Print the fingerprints of the forwards and functions of modules."""
    for path in sys.argv[1:]:
        module = importlib.import_module(path)
        for name, found in vars(module).items():
            if isinstance(found, type) and issubclass(found, nn.Module) and found.__module__ == path:
                print(forward_fingerprint(found), f"{path}.{name}")
            elif isinstance(found, types.FunctionType) and found.__module__ == path:
                print(fingerprint(found), f"{path}.{name}")


if __name__ == "__main__":
    main()
