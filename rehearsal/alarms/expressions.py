"""CloudWatch's metric math, as far as our alarms use it: arithmetic, comparisons, AND, OR, IF.

It evaluates one point in time; None is a missing value. The rules are those of "Using metric math"
in the CloudWatch user guide; anything else in an expression is refused.
"""

import ast
import operator
import re
from collections.abc import Callable, Mapping
from functools import cache

Values = Mapping[str, float | None]

_ARITHMETIC: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_COMPARISONS: dict[type[ast.cmpop], Callable[[float, float], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}


def evaluate(expression: str, values: Values) -> float | None:
    """Return the value of an expression over metric ids, or None if it has no data point."""
    return _value(_parsed(expression), values)


@cache
def _parsed(expression: str) -> ast.expr:
    # AND and OR are Python's operators in capitals; everything else is valid Python.
    python = re.sub(r"\b(AND|OR)\b", lambda word: word[0].lower(), expression)
    return ast.parse(python, mode="eval").body


def _value(node: ast.expr, values: Values) -> float | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return float(node.value)
    if isinstance(node, ast.Name):
        return values[node.id]
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        pair = _pair(node.left, node.right, values)
        if pair is None or (isinstance(node.op, ast.Div) and pair[1] == 0):
            return None
        return _ARITHMETIC[type(node.op)](*pair)
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        pair = _pair(node.left, node.comparators[0], values)
        return None if pair is None else float(_COMPARISONS[type(node.ops[0])](*pair))
    if isinstance(node, ast.BoolOp):
        parts = [_value(each, values) for each in node.values]
        if all(part is None for part in parts):
            return None
        join = all if isinstance(node.op, ast.And) else any
        return float(join(parts))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "IF":
        return _if(node.args, values)
    raise ValueError(f"the rehearsal does not support this metric math: {ast.unparse(node)}")


def _pair(left: ast.expr, right: ast.expr, values: Values) -> tuple[float, float] | None:
    """Return both sides of an operator: "missing values in a time series are treated as 0".

    That holds if the other side is a time series with a value. If neither side has a value, or the
    other side is a number, there is no data point.
    """
    first, second = _value(left, values), _value(right, values)
    series = [
        value
        for node, value in ((left, first), (right, second))
        if not isinstance(node, ast.Constant)
    ]
    if series and all(value is None for value in series):
        return None
    return first or 0.0, second or 0.0


def _if(arguments: list[ast.expr], values: Values) -> float | None:
    """Evaluate IF(condition, then, otherwise); without a condition, None; a missing `then` is 0."""
    condition = _value(arguments[0], values)
    if condition is None:
        return None
    if condition:
        return _value(arguments[1], values) or 0.0
    return _value(arguments[2], values) if len(arguments) > 2 else None
