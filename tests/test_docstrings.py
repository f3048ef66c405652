"""The docstrings of the public functions: all their sections, and examples that run."""

from __future__ import annotations

import doctest
import inspect
import re
import tempfile

import pytest
import torch

import transformer_kernels as tk
from transformer_kernels import ops

MODELS = ("patch", "unpatch", "accelerate", "graphed", "build", "compare", "certify", "load_pretrained", "explain")
FUNCTIONS = (*ops.__all__, *MODELS)
PAPER = re.compile(r'".+", \d{4}')


@pytest.mark.parametrize("name", FUNCTIONS)
def test_sections(name):
    """Each argument is documented by its name; the site shows sections only after an empty line."""
    function = getattr(tk, name)
    text = inspect.getdoc(function) or ""
    for section in ("Args", "Returns", "Raises", "Examples"):
        if section != "Returns" or inspect.signature(function).return_annotation != "None":
            assert f"\n\n{section}:\n" in text, section
    if name not in ("packed_attention", "attention_weights"):  # "as in `attention`"
        documented = re.findall(r"^    \**(\w+): ", text[text.index("Args:") :], re.MULTILINE)
        assert [each for each in inspect.signature(function).parameters if each not in documented] == []
    if name in ops.__all__:
        assert PAPER.search(text.replace("\n", " ")), "no paper"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_examples(name):
    text = getattr(tk, name).__doc__
    known = {each: getattr(tk, each) for each in tk.__all__} | {"tk": tk, "torch": torch, "tempfile": tempfile}
    example = doctest.DocTestParser().get_doctest(inspect.cleandoc(text), known, name, None, 0)
    assert example.examples
    printed: list[str] = []
    assert doctest.DocTestRunner().run(example, out=printed.append).failed == 0, "".join(printed)
