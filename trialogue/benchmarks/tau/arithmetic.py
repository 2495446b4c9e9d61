"""The `calculate` tool of TAU-bench: arithmetic on numbers, without evaluating code.

Error texts are those of Python for the same expression, because the benchmarks show them to the agent.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any

_ALLOWED = frozenset("0123456789+-*/(). ")
_BITS = 100_000
"""Largest size of a power in bits. Larger ones exceed every float and could take too long to compute."""

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda left, right: left / right,
    ast.FloorDiv: lambda left, right: left // right,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


def work_out(expression: str) -> str:
    """The value of an expression, rounded to cents.

    >>> work_out("(3 + 4) * 1.5")
    '10.5'
    """
    if not all(char in _ALLOWED for char in expression):
        raise ValueError("Invalid characters in expression")
    tree = ast.parse(expression.lstrip(" \t"), "<string>", mode="eval")
    return str(round(float(_value(tree.body)), 2))


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left), _value(right))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _BINARY[type(op)](_value(left), _value(right))
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            return _UNARY[type(op)](_value(operand))
        case ast.Tuple(elts=parts):
            return tuple(_value(part) for part in parts)
        case ast.Call(func=function):
            raise TypeError(f"'{type(_value(function)).__name__}' object is not callable")
        case _:
            raise SyntaxError("invalid syntax")


def _power(base: Any, exponent: Any) -> Any:
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * exponent > _BITS:
        raise OverflowError("int too large to convert to float")
    return base**exponent
