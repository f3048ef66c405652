"""The canonical form of a node of Dynamo's graph: one name and order of arguments for all spellings of an operator."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._subclasses import FakeTensor

from transformer_kernels.ops._pattern import Expr

OPAQUE = Expr("opaque", ())
RANDOM = ("opaque", "dropout", "sdpa", "mha")
"""Operations that may have another result for the same arguments."""

NUMBERS = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)
"""Values of nodes that compute with sizes, whose operators have the names of tensors' operators."""

REACH = 3
"""How many nodes an expression may look through."""

FLAT = ("mean_flat", "var_flat", "std_flat")
"""Statistics of rows without the last axis."""

OWNERS = (torch, F, torch._C._nn, torch.functional, torch.special, torch._C._linalg)  # type: ignore[attr-defined]
OPERATORS = {
    operator.add: "add", operator.sub: "sub", operator.mul: "mul", operator.truediv: "div", operator.neg: "neg",
    operator.pow: "pow", operator.matmul: "matmul", operator.getitem: "getitem", operator.eq: "eq", operator.ne: "ne",
    operator.invert: "not", operator.and_: "and", operator.or_: "or", operator.lt: "lt", operator.le: "le",
    operator.gt: "gt", operator.ge: "ge", operator.iadd: "add_", operator.isub: "sub_", operator.imul: "mul_",
    operator.itruediv: "div_", operator.ipow: "pow_", operator.setitem: "setitem_", operator.iand: "and_",
    operator.ior: "or_", getattr: "getattr",
}  # fmt: skip
ALIASES = {
    "bmm": "matmul", "mm": "matmul", "multiply": "mul", "divide": "div", "true_divide": "div", "subtract": "sub",
    "swapaxes": "transpose", "swapdims": "transpose", "t": "transpose", "bitwise_not": "not", "logical_not": "not",
    "logical_and": "and", "logical_or": "or", "bitwise_and": "and", "bitwise_or": "or", "negative": "neg",
    "__matmul__": "matmul", "special_softmax": "softmax", "special_erf": "erf", "float_power": "pow",
    "view_as": "view", "reshape_as": "reshape",
}  # fmt: skip
KEYWORDS = {
    "other": "b", "exponent": "b", "batch1": "a", "batch2": "b", "mat1": "a", "mat2": "b", "tensor1": "a",
    "tensor2": "b", "ord": "p", "split_size": "size", "split_size_or_sections": "size", "dims": "d0",
    "train": "training",
}  # fmt: skip
"""The rules' names of torch's keyword arguments, where they differ."""
_NAMES: dict[Any, str | None] = {}


def name_of(node: fx.Node) -> str | None:
    """The canonical name of a node's operator, with "_" at the end where it writes in place; None if unknown."""
    if node.op == "call_method":
        name = str(node.target)
        return ALIASES.get(name, name)
    if node.op != "call_function":
        return None
    if node.target not in _NAMES:
        _NAMES[node.target] = _function_name(node.target)
    return _NAMES[node.target]


def _function_name(target: Any) -> str | None:
    if target in OPERATORS:
        return OPERATORS[target]
    name = getattr(target, "__name__", None)
    if type(target).__name__ == "numpy_to_tensor_wrapper":  # np.sqrt(64), a tensor without axes
        return {"wrapped_sqrt": "sqrt", "wrapped_square": "square", "wrapped_exp": "exp"}.get(str(name))
    if name is None or not any(getattr(owner, name, None) is target for owner in OWNERS):
        return None
    return ALIASES.get(name, name)


def _is_value(value: Any) -> bool:
    return isinstance(value, (fx.Node, Expr))


def fake(value: Any) -> Any:
    """Dynamo's example value of a node: a fake tensor or a symbolic number."""
    return value.meta.get("example_value") if isinstance(value, fx.Node) else value


def is_plain(value: Any) -> bool:
    """Whether an example value is a tensor of no subclass."""
    return type(value) is FakeTensor


def is_tensor(value: Any) -> bool:
    return isinstance(value, fx.Node) and isinstance(fake(value), Tensor)


def number(value: Any) -> float | int | None:
    """A Python number, else None."""
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def is_same(a: Any, b: Any) -> bool:
    """Whether two sizes are known to be equal; adds no guard."""
    if isinstance(a, torch.SymInt) and isinstance(b, torch.SymInt):
        return bool(a.node.expr == b.node.expr)
    return not isinstance(a, torch.SymInt) and not isinstance(b, torch.SymInt) and a == b


def same_shape(a: Any, b: Any) -> bool:
    return len(a) == len(b) and all(is_same(x, y) for x, y in zip(a, b, strict=True))


def hint(size: Any) -> int:
    """The value of a size in the call that is compiled; adds no guard."""
    if isinstance(size, torch.SymInt):
        return int(size.node.hint) if size.node.has_hint() else 64
    return int(size)


class Canonical:
    """The canonical expressions of a graph's nodes, computed when first asked for.

    Args:
        constant: node -> the number that a tensor of one element always holds, or None.
        rules: names of the parameters, and the function that makes the expression, by canonical name.
        overrides: the parameters of functions whose parameters differ from the method's.
    """

    def __init__(
        self,
        constant: Callable[[fx.Node], float | None],
        rules: dict[str, Rule],
        overrides: dict[Any, tuple[str, ...]],
    ) -> None:
        self._constant, self._known = constant, dict[fx.Node, Expr]()
        self._rules, self._overrides = rules, overrides
        self._replaced: dict[Any, fx.Node] = {}
        self._given: set[fx.Node] = set()

    def of(self, node: Any) -> Expr:
        """The expression of a node or of an expression; of any other value OPAQUE."""
        if not isinstance(node, fx.Node):
            return node if isinstance(node, Expr) else OPAQUE
        if node not in self._known:
            self._known[node] = OPAQUE
            self._known[node] = self._expression(node)
        known = self._known[node]
        if self._replaced and any(
            value in self._replaced or isinstance(value, Expr) for value in known.args if _is_value(value)
        ):
            known = self._known[node] = self._current(known)
        return known

    def replace(self, old: fx.Node, new: fx.Node, expression: Expr) -> None:
        """Every expression of `old` is one of `new`, which computes `expression`."""
        self._replaced[old] = new
        self.forget_users(new)
        self._known[new] = expression
        self._given.add(new)

    def forget_users(self, node: fx.Node, depth: int = REACH) -> None:
        """Drop cached expressions of the nodes that use a node, which may contain its old expression."""
        for user in node.users:
            if depth and user not in self._given:
                self._known.pop(user, None)
                self.forget_users(user, depth - 1)

    def _current(self, value: Any) -> Any:
        if isinstance(value, Expr):
            return Expr(value.op, tuple(self._current(argument) for argument in value.args), value.via)
        while isinstance(value, fx.Node) and value in self._replaced:
            value = self._replaced[value]
        return value

    def _expression(self, node: fx.Node) -> Expr:
        name = name_of(node)
        rule = self._rules.get(name) if name is not None else None
        if rule is None or not (node.args or node.kwargs) or isinstance(fake(node), NUMBERS):
            return OPAQUE
        parameters = rule[0]
        if node.op == "call_function" and node.target in self._overrides:
            parameters = self._overrides[node.target]
        if len(node.args) > len(parameters):
            return OPAQUE
        given = dict(zip(parameters, node.args, strict=False))
        given |= {word if word in parameters else KEYWORDS.get(word, word): x for word, x in node.kwargs.items()}
        if given.pop("inplace", False):
            return OPAQUE
        try:
            return rule[1](self, node, **given) or OPAQUE
        except TypeError:  # an argument that the rule does not know, such as out
            return OPAQUE

    def is_same_value(self, a: Any, b: Any) -> bool:
        """Whether two values are the same operation of the same values."""
        known = self.of(a)
        return a is b or (known.op not in RANDOM and known == self.of(b))

    def number(self, value: Any) -> float | int | None:
        """The number that a value always is, or None."""
        if isinstance(value, fx.Node) and isinstance(fake(value), Tensor) and fake(value).dim() == 0:
            return self._constant(value)
        symbol = fake(value)
        if isinstance(value, fx.Node) and isinstance(symbol, torch.SymFloat) and symbol.node.has_hint():
            return float(symbol)  # a number of the model's configuration, which is guarded
        return number(value)


Rule = tuple[tuple[str, ...], Callable[..., Expr | None]]
"""Names of the parameters, and (canonical, node, **arguments) -> the expression."""
