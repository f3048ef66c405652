"""Identifies what a class computes by the code of its forward, not by the name of its module.

Two forwards have one fingerprint if their syntax trees agree but for docstrings, annotations, the names of local
variables and decorators that only warn or select kernels. The functions that a forward calls, its own methods and all
but torch's, are a part of its fingerprint. A forward that differs in anything else has another one, and is not
patched. (A numerical probe would accept code that differs for other dtypes, shapes or modes than those probed.)

`python -m tests.support.forms transformers.models.llama.modeling_llama` prints the forms in a module.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import re
import textwrap
import threading
import types
from collections.abc import Iterator
from typing import Any

from torch import nn

TRANSPARENT = ("deprecate_kwarg", "use_kernel_forward_from_hub", "use_kernel_func_from_hub")
"""Decorators that do not change what a function computes."""

INTERFACE = "eager_attention_forward"
"""A name of transformers for the function that `AttentionInterface` replaces."""

LAYOUTS = {"torch.cat((x, x), dim=-1)": "halves", "torch.repeat_interleave(x, 2, dim=-1)": "pairs"}
"""How the tables of rotary positions repeat the angles x."""

SKIPPED = ("annotation", "returns", "ctx", "type_comment", "type_params", "kind", "lineno", "simple")


_pending: set[Any] = set()
_lock = threading.RLock()  # of `_pending`


@functools.cache
def fingerprint(function: Any, owner: type | None = None) -> str | None:
    """The fingerprint of a function, or of a method of `owner`; None without source, or if it is recursive."""
    bare = inspect.unwrap(_function_in(function))
    if not isinstance(bare, types.FunctionType):
        return None
    with _lock:
        tree = None if bare in _pending else syntax_tree(bare)
        if tree is None:
            return None
        parts = [
            tree.args,
            *_statements(tree),
            *(decorator for decorator in tree.decorator_list if not _is_transparent(decorator)),
        ]
        form = _Form(tree)
        text = "".join(form.text(part) for part in parts)
        _pending.add(bare)
        try:
            called = [fingerprint(callee, owner) for callee in _called(bare, tree, owner)]
        finally:
            _pending.remove(bare)
    return hashlib.sha256(repr((text, called)).encode()).hexdigest()[:12]


def _function_in(found: Any) -> Any:
    """The original function inside a layer made by the package `kernels`, unless it was replaced."""
    if not isinstance(found, nn.Module) or type(found).__name__ != "Func" or "forward" in vars(found):
        return found
    return inspect.getclosurevars(type(found).forward).nonlocals.get("func")


def forward_fingerprint(kind: type) -> str | None:
    """The fingerprint of the forward of a class of modules."""
    return fingerprint(kind.forward, kind)  # type: ignore[attr-defined]


@functools.cache
def table_layout(kind: type) -> str | None:
    """How a class that makes the tables of rotary positions repeats its angles: "halves", "pairs", or None if unknown.

    One variable is cat((x, x), dim=-1) or repeat_interleave(x, 2, dim=-1); what follows are its cosine and sine, and
    their products and conversions.
    """
    tree = syntax_tree(kind.forward)  # type: ignore[attr-defined]
    for node in () if tree is None else ast.walk(tree):
        if isinstance(node, ast.Assign) and (layout := _repetition(node)) is not None:
            return layout if _only_cosine_and_sine_follow(tree, node) else None
    return None


def _repetition(assignment: ast.Assign) -> str | None:
    """The layout of the assigned value if it repeats another variable, else None."""
    names = [node.id for node in ast.walk(assignment.value) if isinstance(node, ast.Name) and node.id != "torch"]
    if not names or not isinstance(assignment.targets[0], ast.Name):
        return None
    return LAYOUTS.get(re.sub(rf"\b{names[0]}\b", "x", ast.unparse(assignment.value)))


def _only_cosine_and_sine_follow(tree: Any, assignment: ast.Assign) -> bool:
    later = [node for node in ast.walk(tree) if getattr(node, "lineno", 0) > assignment.lineno]
    called: list[Any] = [node.func for node in later if isinstance(node, ast.Call)]
    if not all(isinstance(call, ast.Attribute) and call.attr in ("cos", "sin", "to") for call in called):
        return False
    angles = {ast.unparse(call.value) for call in called if call.attr != "to"}
    return angles == {ast.unparse(assignment.targets[0])} and not any(isinstance(node, ast.Subscript) for node in later)


def syntax_tree(function: Any) -> ast.FunctionDef | None:
    """The syntax tree of a function under its decorators; None without its source."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function)))).body[0]
    except (OSError, SyntaxError, TypeError):
        return None
    return tree if isinstance(tree, ast.FunctionDef) else None


def _statements(tree: ast.FunctionDef) -> list[ast.stmt]:
    """The body without its docstring."""
    first = tree.body[0]
    documented = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return tree.body[1:] if documented else tree.body


def _is_transparent(decorator: ast.expr) -> bool:
    return isinstance(decorator, ast.Call) and isinstance(decorator.func, ast.Name) and decorator.func.id in TRANSPARENT


def _called(function: types.FunctionType, tree: ast.AST, owner: type | None) -> Iterator[Any]:
    """The functions other than torch's, and the methods of its class, that a function names, in order."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id not in (INTERFACE, *TRANSPARENT):
            found = _function_in(function.__globals__.get(node.id))
            if isinstance(found, types.FunctionType) and not inspect.unwrap(found).__module__.startswith("torch."):
                yield found
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
            method = getattr(owner, node.attr, None)
            if isinstance(method, types.FunctionType) and not hasattr(nn.Module, node.attr):
                yield method


class _Form:
    """The text of syntax trees in which the parameters and variables of one function are numbered."""

    def __init__(self, function: ast.FunctionDef) -> None:
        names = [node.arg for node in ast.walk(function.args) if isinstance(node, ast.arg)]
        stored = (node for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
        self.numbers = {name: str(index) for index, name in enumerate(dict.fromkeys([*names, *(n.id for n in stored)]))}

    def text(self, node: Any) -> str:
        if isinstance(node, list):
            return f"[{','.join(map(self.text, node))}]"
        if isinstance(node, ast.Name | ast.arg):
            name = node.id if isinstance(node, ast.Name) else node.arg
            return self.numbers.get(name, name)
        if isinstance(node, ast.keyword) and isinstance(node.value, ast.Name) and node.arg == node.value.id:
            return f"={self.text(node.value)}"  # handed on under its own name, which may have changed
        if not isinstance(node, ast.AST):
            return repr(node)
        kind = "Assign" if isinstance(node, ast.AnnAssign) else type(node).__name__
        fields = {
            name: value for name, value in ast.iter_fields(node) if name not in SKIPPED and value not in (None, [])
        }
        if isinstance(node, ast.AnnAssign):
            fields["target"] = [fields["target"]]
        return f"{kind}({','.join(map(self.text, fields.values()))})"
