"""The public names, the one-way imports, and what an import costs."""

import ast
import pydoc
import re
from pathlib import Path

import transformer_kernels as tk
from tests.support import fresh
from transformer_kernels.backends.dispatch import OPERATIONS

ROOT = Path(__file__).parents[1]


def imports(path):
    """Absolute names of the modules that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def test_public_names():
    assert len(tk.__all__) == len(set(tk.__all__))
    assert set(tk.__all__) == {
        "BACKENDS",
        "BackendUnavailable",
        "UnsupportedByBackend",
        "__version__",
        "accelerate",
        "bind",
        "build",
        "certify",
        "compare",
        "compile",
        "explain",
        "export_pretrained",
        "flex_attention",
        "get_backend",
        "graphed",
        "load_pretrained",
        "patch",
        "reproducible",
        "set_backend",
        "unpatch",
        "use_backend",
        *OPERATIONS,
    }
    assert all(hasattr(tk, name) for name in tk.__all__)
    assert tk.ops.__all__ == sorted(OPERATIONS)


def test_dir_and_help_show_the_public_names():
    """In help(tk) before the modules of the package."""
    assert dir(tk) == sorted([*tk.__all__, "nn"])
    overview = pydoc.render_doc(tk, renderer=pydoc.plaintext).partition("PACKAGE CONTENTS")[0]
    missing = [name for name in tk.__all__ if not re.search(rf"\b{name}\b", overview)]
    assert missing == ["__version__"]


def test_the_reference_imports_nothing_of_the_package():
    for path in (ROOT / "python_ref").rglob("*.py"):
        assert not any(name.startswith("transformer_kernels") for name in imports(path)), path


def test_backends_never_import_each_other():
    for path in (ROOT / "transformer_kernels" / "ops").rglob("_*.py"):
        backend = next((name for name in tk.BACKENDS if path.stem.startswith(f"_{name}")), None)
        others = [f"_{name}" for name in tk.BACKENDS if backend and name != backend]
        modules = {part for name in imports(path) if ".ops." in name for part in name.split(".")}
        assert not modules & set(others), path


def test_an_import_brings_nothing_that_is_not_needed():
    code = (
        "import torch, sys; before, gelu = {*sys.modules}, torch.nn.functional.gelu\n"
        "import transformer_kernels as tk, transformer_kernels.nn; brought = {*sys.modules} - before\n"
        "tk.patch(torch.nn.LayerNorm(4)); brought |= {*sys.modules} & {'transformers'}\n"
        "assert torch.nn.functional.gelu is gelu; print(*brought)"
    )
    brought = set(fresh.checked(code).split())
    assert "transformer_kernels.backends.dispatch" in brought
    unwanted = {"triton", "tiktoken", "sklearn", "yaml", "matplotlib", "python_ref", "transformer_kernels._kernels"}
    assert not brought & (unwanted | {"transformers"})


def test_the_package_works_without_triton_and_transformers():
    code = (
        "import sys; sys.modules['triton'] = sys.modules['transformers'] = None\n"
        "import torch, transformer_kernels as tk\n"
        "from transformer_kernels.backends import triton\n"
        "x = torch.randn(3, 8)\n"
        "tk.layer_norm(x, torch.ones(8))\n"
        "print(tk.patch(torch.nn.TransformerEncoderLayer(12, 2)))\n"
        "print(triton.unavailable(torch.device('cpu')))\n"
        "try: tk.gelu(x, backend='triton')\n"
        "except tk.BackendUnavailable as error: print(error)\n"
        "try: import transformer_kernels.huggingface\n"
        "except ImportError as error: print(error)"
    )
    printed = fresh.checked(code)
    assert "modules patched, 0 not patched; the default backend" in printed
    assert "cannot be imported" in printed and "pip install triton" in printed
    assert "gelu: backend 'triton' is not available" in printed
    assert "needs transformers 5.10 or newer, and it is not installed: pip install -U transformers" in printed
