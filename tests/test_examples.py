"""The examples, and the README's Python, run as they stand."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
SAYS = {
    "drop_in_modules": "same losses",
    "packed_batch": "135 tokens packed",
    "reverse_strings": "of 200 new words are written backwards",
    "your_own_model": "kernels: loss",
}


def run(*arguments: str) -> str:
    result = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=ROOT, timeout=240)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(path: Path) -> None:
    code = f"import runpy, sys; sys.path.insert(0, '.'); runpy.run_path({str(path)!r}, run_name='__main__')"
    assert SAYS[path.stem] in run("-c", code)


def test_the_readme_names_each_example() -> None:
    readme = (ROOT / "README.md").read_text()
    assert EXAMPLES and all(f"examples/{path.name}" in readme for path in EXAMPLES)


def python_blocks() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)


def test_the_readme_has_python() -> None:
    assert python_blocks()


@pytest.mark.parametrize("index", range(len(python_blocks())))
def test_python_of_the_readme(index: int) -> None:
    """Each block stands for itself, and prints something."""
    code = python_blocks()[index]
    if "transformers" in code.replace("transformer_kernels", ""):
        pytest.importorskip("transformers", reason="transformers is not installed")
    assert run("-c", code).strip()
