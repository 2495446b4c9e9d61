"""Execute calls on instances of the benchmark's classes.

Text is parsed into a plain call and never evaluated.
"""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, cast

from trialogue.errors import ToolError
from trialogue.world.values import copy_value

STATELESS = frozenset({"MathAPI"})
FORBIDDEN = frozenset({"kill", "exit", "quit", "remove", "unlink", "popen", "Popen", "run"})


class PlainCall(NamedTuple):
    """A function's name with literal arguments."""

    name: str
    positional: tuple[Any, ...]
    named: dict[str, Any]


@lru_cache(maxsize=65536)
def parse_call(text: str) -> PlainCall:
    """Read `name(1, key='value')`. The arguments are shared between calls: copy before handing them out."""
    try:
        body = ast.parse(text.strip(), mode="eval").body
        match body:
            case ast.Call(func=ast.Name(id=name), args=positional, keywords=named) if all(
                keyword.arg is not None for keyword in named
            ):
                return PlainCall(
                    name,
                    tuple(ast.literal_eval(item) for item in positional),
                    {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in named},
                )
            case _:
                raise ToolError("it is not a plain call of one function")
    except (SyntaxError, ValueError, TypeError, ArithmeticError, RecursionError, MemoryError) as error:
        raise ToolError(f"its arguments are not plain values: {error}") from None


@lru_cache(maxsize=256)
def find_functions(kind: type[Any]) -> tuple[str, ...]:
    """The public methods of a class."""
    return tuple(name for name, _ in inspect.getmembers(kind, inspect.isfunction) if not name.startswith("_"))


class Instances:
    """Fresh instances of the classes an entry involves, and the calls made on them."""

    __slots__ = ("classes", "owners")

    def __init__(
        self, classes: Mapping[str, type[Any]], config: Mapping[str, Any], long_context: bool = False
    ) -> None:
        self.classes: dict[str, Any] = {}
        self.owners: dict[str, Any] = {}
        """Function → instance. If two classes have a function, the later class wins."""
        for name, kind in classes.items():
            instance = self.classes[name] = kind()
            if name not in STATELESS:
                instance._load_scenario(copy_value(config.get(name, {})), long_context=long_context)
            for function in find_functions(kind):
                self.owners[function] = instance

    def run_text(self, text: str) -> str:
        """Execute one call written as text."""
        try:
            call = parse_call(text)
        except ToolError as error:
            return f"Error during execution: {error}"
        return self.run(call.name, copy_value(call.named), copy_value(list(call.positional)))

    def run(self, name: str, named: Mapping[str, Any], positional: Sequence[Any] = ()) -> str:
        """Execute one call. An error is returned as its answer."""
        if name in FORBIDDEN:
            return f"Error during execution: Function call {name} is not allowed."
        owner = self.owners.get(name)
        if owner is None:
            return f"Error during execution: name '{name}' is not defined"
        try:
            result: Any = getattr(owner, name)(*positional, **named)
        except Exception as error:  # noqa: BLE001 - the benchmark's code may raise anything
            return f"Error during execution: {error}"
        return _to_text(result)

    def to_state(self) -> dict[str, dict[str, Any]]:
        """The public attributes of every instance. They are not copied."""
        state: dict[str, dict[str, Any]] = {}
        for name, instance in self.classes.items():
            held = cast("dict[str, Any]", vars(instance))
            state[name] = {key: value for key, value in held.items() if not key.startswith("_")}
        return state


def _to_text(result: Any) -> str:
    """The text of a result."""
    if result.__class__ is dict:
        try:
            return json.dumps(result)
        except (TypeError, ValueError):  # some functions return an object in it
            return str(result)
    return str(result)
