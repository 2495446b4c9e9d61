"""Read and write ACEBench's calls, `[name(key='value'), ...]`. Their text is never evaluated."""

from __future__ import annotations

import ast
import json
from collections.abc import Sequence
from typing import Any, cast

from trialogue.errors import ToolError
from trialogue.task import Call

ASK_NOTHING = "Please do not ask me any questions, use the known conditions to solve the problem"
"""Answer to an agent without a user that writes no calls."""
BROKEN = "Error during execution: {str(e)}"
"""The benchmark's answer to any failure in a task with a user. It was meant to contain the error."""
UNBOUND = "cannot access local variable 'func_call_result' where it is not associated with a value"
"""The error of the benchmark's own code for an unknown function."""


class UnreadableCalls(ToolError):
    """A text that contains no calls that the benchmark can read."""


def read_calls(text: str, alone: bool = False) -> list[Call]:
    """The calls in a text. With `alone`, anything else in it makes the whole text unreadable."""
    text = text.removeprefix(" ")
    if not text:
        raise UnreadableCalls("there is nothing to read")
    text = text if text.startswith("[") else f"[{text}"
    text = text if text.endswith("]") else f"{text}]"
    try:
        body = ast.parse(text.strip("[]'"), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UnreadableCalls(f"{type(error).__name__}: {error}") from None
    if isinstance(body, ast.Call):
        return [_to_call(body)]
    if not isinstance(body, ast.Tuple | ast.List):
        return []
    if alone and not all(isinstance(item, ast.Call) for item in body.elts):
        raise UnreadableCalls("ValueError: Element is not a function call")
    return [_to_call(item) for item in body.elts if isinstance(item, ast.Call)]


def _to_call(node: ast.Call) -> Call:
    """The named arguments of a call; the benchmark ignores the others."""
    arguments: dict[str, Any] = {}
    for keyword in node.keywords:
        if keyword.arg is None or isinstance(keyword.value, ast.Dict):
            raise UnreadableCalls("an argument is not a plain value")
        arguments[keyword.arg] = _to_value(keyword.value)
    return Call(name=ast.unparse(node.func), arguments=arguments)


def _to_value(node: ast.expr) -> Any:
    """The value of a literal. A bare word is its own text."""
    match node:
        case ast.Constant(value=value):
            return "..." if value is ... else value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.Name(id=word):
            return word
        case ast.List(elts=items):
            return [_to_value(item) for item in items]
        case ast.Tuple(elts=items):
            return tuple(_to_value(item) for item in items)
        case ast.Dict(keys=keys, values=values) if all(keys):
            pairs = zip(cast("list[ast.expr]", keys), values, strict=True)
            return {_to_value(key): _to_value(value) for key, value in pairs}
        case ast.Subscript():
            return ast.unparse(node)
        case _:
            raise UnreadableCalls(f"an argument is not a plain value but {type(node).__name__}")


def write_calls(calls: Sequence[Call]) -> str:
    """Calls in the benchmark's notation."""
    written = (
        f"{call.name}({', '.join(f'{name}={value!r}' for name, value in call.arguments.items())})"
        for call in calls
    )
    return f"[{', '.join(written)}]"


def to_answer_text(result: Any) -> str:
    """The benchmark's text of one result."""
    if isinstance(result, str):
        return result
    return json.dumps(result) if isinstance(result, dict) else str(result)


def to_seen(texts: Sequence[str]) -> list[Any]:
    """Results as the agent sees them: texts that are JSON are parsed."""
    seen: list[Any] = []
    for text in texts:
        try:
            seen.append(json.loads(text))
        except ValueError:
            seen.append(text)
    return seen
