"""The copy-on-touch database against a naive one that deep-copies everything before each call."""

from __future__ import annotations

import copy
import json
from datetime import date
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trialogue import Change, Database, DomainError, Record, RecordNotFound, Table, ToolError, tool
from trialogue.world.tools import Tool


class Line(Record):
    name: str
    price: float
    tags: list[str] = []


class Order(Record):
    status: Literal["open", "shut"] = "open"
    owner: str
    lines: list[Line] = []
    notes: dict[str, Any] = {}
    days: dict[date, int] = {}
    marks: set[str] = set()
    best: Line | None = None


class Clock(Record):
    hour: int
    alarms: list[int] = []


class Shelf(Database):
    """Its methods use nothing but what plain dictionaries of records offer too, so both worlds share them."""

    orders: Table[Order]
    labels: Table[str]
    clock: Clock
    counter: int
    bag: list[dict[str, Any]]

    @tool(writes=True)
    def set_status(self, key: str, status: Literal["open", "shut"], fail: bool) -> Order:
        """Change a field."""
        order = self.orders[key]
        order.status = status
        if fail:
            raise ToolError("changed my mind")
        return order

    @tool(writes=True)
    def add_line(self, key: str, name: str, price: float, fail: bool) -> Order:
        """Change what is nested."""
        order = self.orders[key]
        order.lines.append(Line(name=name, price=price))
        order.lines[0].tags.append(name)
        order.notes.setdefault("names", []).append({"name": name})
        order.days[date(2024, 1, len(order.lines) % 28 + 1)] = len(name)
        order.marks.add(name)
        order.best = order.lines[-1]
        self.counter += 1
        if fail:
            raise ToolError("changed my mind")
        order.best.tags.append("best")
        return order

    @tool(writes=True)
    def add(self, key: str, owner: str, fail: bool) -> str:
        """Add or replace a record."""
        self.orders[key] = Order(owner=owner, lines=[Line(name="first", price=1)])
        self.labels[key] = owner
        if fail:
            raise ToolError("changed my mind")
        return f"{len(self.orders)} orders"

    @tool(writes=True)
    def remove(self, key: str, again: bool, fail: bool) -> list[str]:
        """Remove a record, and perhaps put it back."""
        order = self.orders[key]
        del self.orders[key]
        if again:
            self.orders[key] = order
            order.notes["again"] = True
        if fail:
            raise ToolError("changed my mind")
        return list(self.orders)

    @tool(writes=True)
    def tick(self, hours: int, fail: bool) -> Clock:
        """Change the fields of which there is one."""
        self.clock.hour += hours
        self.clock.alarms.append(self.clock.hour)
        self.counter += hours
        self.bag.append({"hours": [hours]})
        self.bag[0]["seen"] = self.counter
        if fail:
            raise ToolError("changed my mind")
        return self.clock

    @tool
    def look(self, owner: str, status: str) -> dict[str, Any]:
        """Read in every way there is."""
        return {
            "keys": list(self.orders),
            "number": [len(self.orders), len(self.labels)],
            "all": [[key, order.status] for key, order in self.orders.items()],
            "owners": [order.owner for order in self.orders.values()],
            "where": self.find_where(owner, status),
            "one": [order.owner for order in self.find_where(owner, None)],
            "find": [order.owner for order in self.find_rich()],
            "labels": list(self.labels.values()),
            "known": owner in self.labels,
            "hour": self.clock.hour,
        }

    def find_where(self, owner: str, status: str | None) -> list[Order]:
        fields = {"owner": owner} if status is None else {"owner": owner, "status": status}
        return self.orders.where(**fields)

    def find_rich(self) -> list[Order]:
        return self.orders.find(lambda order: len(order.lines) > 1)


class NaiveShelf:
    """Plain dictionaries; every call works on a deep copy of everything."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.orders = {key: Order.model_validate(value) for key, value in data["orders"].items()}
        self.labels = dict(data["labels"])
        self.clock = Clock.model_validate(data["clock"])
        self.counter: int = data["counter"]
        self.bag: list[dict[str, Any]] = copy.deepcopy(data["bag"])

    def call(self, name: str, arguments: dict[str, Any]) -> tuple[str, bool]:
        before = {key: copy.deepcopy(value) for key, value in vars(self).items()}
        try:
            return to_text(getattr(NaiveShelf, name)(self, **arguments)), False
        except KeyError as error:
            vars(self).update(before)
            return f"orders has no '{error.args[0]}'", True
        except ToolError as error:
            vars(self).update(before)
            return str(error), True
        finally:
            # Records are values: what a call leaves in two places are two things for the next call.
            data = [vars(self)[key] for key in ("orders", "labels")]
            for table in data:
                table.update({key: copy.deepcopy(value) for key, value in table.items()})

    def find_where(self, owner: str, status: str | None) -> list[Order]:
        return [
            order
            for order in self.orders.values()
            if order.owner == owner and (status is None or order.status == status)
        ]

    def find_rich(self) -> list[Order]:
        return [order for order in self.orders.values() if len(order.lines) > 1]

    def to_data(self) -> dict[str, Any]:
        return {name: plain(value) for name, value in vars(self).items()}


for _name in ("set_status", "add_line", "add", "remove", "tick", "look"):
    setattr(NaiveShelf, _name, getattr(Shelf, _name))


def plain(value: Any) -> Any:
    if isinstance(value, Record):
        return plain(dict(value))
    if isinstance(value, dict):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [plain(inner) for inner in value]
    return sorted(value) if isinstance(value, set) else value


def to_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(plain(value), separators=(",", ":"))


def naive_difference(before: Any, after: Any, path: str = "") -> list[tuple[str, Any, Any]]:
    if isinstance(before, dict) and isinstance(after, dict):
        keys = dict.fromkeys([*before, *after])
        return [
            change
            for key in keys
            for change in naive_difference(before.get(key), after.get(key), f"{path}.{key}".strip("."))
        ]
    return [] if json.dumps(before) == json.dumps(after) else [(path, before, after)]


KEYS = ("a", "b", "c", "d", "e")
keys, flags = st.sampled_from(KEYS), st.booleans()
calls = st.one_of(
    st.tuples(
        st.just("set_status"),
        st.fixed_dictionaries({"key": keys, "status": st.sampled_from(["open", "shut"]), "fail": flags}),
    ),
    st.tuples(
        st.just("add_line"),
        st.fixed_dictionaries({"key": keys, "name": keys, "price": st.sampled_from([1, 2.5]), "fail": flags}),
    ),
    st.tuples(st.just("add"), st.fixed_dictionaries({"key": keys, "owner": keys, "fail": flags})),
    st.tuples(st.just("remove"), st.fixed_dictionaries({"key": keys, "again": flags, "fail": flags})),
    st.tuples(st.just("tick"), st.fixed_dictionaries({"hours": st.integers(0, 2), "fail": flags})),
    st.tuples(
        st.just("look"), st.fixed_dictionaries({"owner": keys, "status": st.sampled_from(["open", "shut"])})
    ),
)
BASE: dict[str, Any] = {
    "orders": {
        "a": {
            "owner": "a",
            "lines": [{"name": "x", "price": 1.5, "tags": ["t"]}],
            "notes": {"deep": [{"n": 1}]},
        },
        "b": {"owner": "b", "lines": [{"name": "y", "price": 2}], "marks": ["m"], "days": {"2024-01-01": 1}},
        "c": {"owner": "a", "status": "shut", "lines": [{"name": "z", "price": 3}]},
    },
    "labels": {"a": "one", "c": "two"},
    "clock": {"hour": 1, "alarms": [0]},
    "counter": 0,
    "bag": [{"first": [1, {"two": 2}]}],
}
overlays = st.sampled_from(
    [
        {},
        {"orders": {"b": {"status": "shut", "notes": {"new": [1]}}}},
        {"orders": {"d": {"owner": "a", "lines": [{"name": "n", "price": 0}]}}, "labels": {"b": "three"}},
        {"clock": {"hour": 5}, "counter": 7},
    ]
)


def carry_out(database: Database, tool: Tool, arguments: dict[str, Any]) -> Any:
    """Run one tool as an environment does."""
    return database.transact(lambda: tool.run(database, arguments), tool.writes, f"tool '{tool.name}'")


def run(database: Shelf, name: str, arguments: dict[str, Any]) -> tuple[str, bool]:
    try:
        return to_text(carry_out(database, Shelf.tools[name], dict(arguments))), False
    except ToolError as error:
        return str(error), True


def lay(data: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = copy.deepcopy(data)
    for key, value in over.items():
        merged[key] = lay(merged[key], value) if key in merged and isinstance(value, dict) else value
    return merged


@settings(deadline=None, max_examples=100)
@given(overlay=overlays, before=st.lists(calls, max_size=6), steps=st.lists(calls, min_size=1, max_size=12))
def test_it_behaves_like_plain_dictionaries(
    overlay: dict[str, Any], before: list[tuple[str, dict[str, Any]]], steps: list[tuple[str, dict[str, Any]]]
) -> None:
    base = Shelf.load(BASE)
    untouched, base_digest = base.to_data(), base.digest()
    nested = base.fork()
    nested.update(overlay)
    naive = NaiveShelf(lay(BASE, overlay))
    for name, arguments in before:
        assert run(nested, name, arguments) == naive.call(name, arguments)
    database, sibling = nested.fork(), nested.fork()
    opened, opened_digest = naive.to_data(), nested.digest()
    assert database.digest() == opened_digest
    for name, arguments in steps:
        last, last_digest, last_difference = database.to_data(), database.digest(), database.difference()
        result = run(database, name, arguments)
        assert result == naive.call(name, arguments)
        now = database.to_data()
        assert now == naive.to_data()
        assert [list(now[table]) for table in ("orders", "labels")] == [
            list(naive.orders),
            list(naive.labels),
        ]
        assert (database.digest() == last_digest) == (now == last)
        assert (database.digest() == opened_digest) == (now == opened)
        assert Shelf.load(now).digest() == database.digest()
        found = [tuple(change) for change in database.difference()]
        assert sorted(map(repr, found)) == sorted(map(repr, naive_difference(opened, now)))
        if result[1]:
            assert (now, database.digest(), database.difference()) == (last, last_digest, last_difference)
        assert len(database.orders) == len(naive.orders)
        assert [key for key in KEYS if key in database.orders] == [key for key in KEYS if key in naive.orders]
    assert sibling.to_data() == nested.to_data() == opened
    assert base.to_data() == untouched
    assert base.digest() == base_digest == Shelf.load(BASE).digest()


def test_two_conversations_are_compared_with_each_other() -> None:
    base = Shelf.load(BASE)
    one, two = base.fork(), base.fork()
    run(one, "set_status", {"key": "a", "status": "shut", "fail": False})
    run(two, "remove", {"key": "b", "again": False, "fail": False})
    assert [change.path for change in one.difference(two)] == ["orders.a.status", "orders.b"]
    assert one.difference(two)[0] == Change("orders.a.status", "open", "shut")
    assert one.difference(two)[1].before is None
    with pytest.raises(ValueError, match="same store"):
        one.difference(Shelf.load(BASE))


def test_the_digest_does_not_depend_on_the_way() -> None:
    base = Shelf.load(BASE)
    one, two = base.fork(), base.fork()
    for database, order in ((one, "ab"), (two, "ba")):
        for key in order:
            run(database, "set_status", {"key": key, "status": "shut", "fail": False})
    assert one.digest() == two.digest() != base.digest()
    run(one, "set_status", {"key": "a", "status": "open", "fail": False})
    run(one, "set_status", {"key": "b", "status": "open", "fail": False})
    assert one.digest() == base.digest()
    assert one.difference() == []


def test_the_data_given_to_load_stays_the_callers() -> None:
    data = copy.deepcopy(BASE)
    base = Shelf.load(data)
    digest = base.digest()
    data["bag"][0]["first"].append("changed")
    data["orders"]["a"]["notes"]["deep"][0]["n"] = 2
    assert Shelf.load(BASE).digest() == base.digest() == digest
    assert base.to_data()["bag"] == BASE["bag"]


class Odd(Record, extra="allow"):
    name: str
    _seen: list[str] = []

    @property
    def initial(self) -> str:
        return self.name[0]


class Plain(Database):
    things: Table[Odd]
    loose: Table[dict[str, Any]]
    today: str = "2024-05-15"
    numbers: list[float] = [1.0]
    limit: float = 1.0

    @tool(writes=True)
    def rename(self, key: str, name: str) -> Odd:
        """Give a thing another name."""
        self.things[key].name = name
        return self.things[key]

    @tool
    def peek(self, key: str) -> str:
        """Read a thing, its date and a number that equals nothing."""
        return f"{self.things[key].name} {self.today} {self.limit}"

    @tool
    def cheat(self, key: str) -> str:
        """Write although it may not."""
        self.things[key].name += "!"
        return "done"

    @tool
    def cheat_by_removing(self, key: str) -> str:
        """Remove although it may not."""
        del self.things[key]
        return "done"

    @tool(writes=True)
    def hide(self) -> str:
        """Keep something where nobody looks."""
        self.hidden = 1
        return "done"


PLAIN = {
    "things": {"x": {"name": "ex", "colour": ["red"]}, "y": {"name": "why"}},
    "loose": {"one": {"tags": ["a"], "n": 1}, "two": {"tags": ["b"], "n": 1}, "three": {"n": {"deep": 1}}},
}


def test_what_a_record_holds_beside_its_fields_is_kept_and_compared() -> None:
    base = Plain.load(PLAIN)
    database = base.fork()
    database.things["x"].colour.append("blue")  # type: ignore[attr-defined]
    assert database.things["x"]._seen == []
    assert database.difference() == [Change("things.x.colour", ["red"], ["red", "blue"])]
    assert base.to_data()["things"]["x"] == {"name": "ex", "colour": ["red"]}
    assert database.digest() != base.digest()


def test_where_takes_any_field_and_any_value() -> None:
    database = Plain.load(PLAIN).fork()
    assert database.loose.where(n=1, tags=["b"]) == [{"tags": ["b"], "n": 1}]
    assert database.loose.where(tags=["a"]) == [{"tags": ["a"], "n": 1}]
    assert database.loose.where(n={"deep": 1}) == [{"n": {"deep": 1}}]
    assert database.loose.where(missing=1) == []
    assert [thing.name for thing in database.things.where()] == ["ex", "why"]
    assert [thing.name for thing in database.things.where(initial="w")] == ["why"]
    with pytest.raises(DomainError, match="'things' have no field 'size'"):
        database.things.where(size=1)


def test_defaults_of_fields_are_data_of_their_own() -> None:
    one, two = Plain.load(PLAIN), Plain.load({"today": "2030-01-01"})
    fork = one.fork()
    fork.numbers.append(2.0)
    assert (fork.numbers, one.fork().numbers, two.numbers) == ([1.0, 2.0], [1.0], [1.0])
    assert (one.today, two.today) == ("2024-05-15", "2030-01-01")


def test_a_read_tool_that_writes_is_caught_and_leaves_nothing() -> None:
    database = Plain.load(PLAIN).fork()
    before = database.digest()
    for name in ("cheat", "cheat_by_removing"):
        with pytest.raises(DomainError, match=f"tool '{name}' changed the database but is not marked writes"):
            carry_out(database, Plain.tools[name], {"key": "x"})
    with pytest.raises(DomainError, match="has no field 'hidden'"):
        carry_out(database, Plain.tools["hide"], {})
    assert database.digest() == before
    assert database.difference() == []


def test_numbers_that_equal_nothing_are_no_change() -> None:
    database = Plain.load({**PLAIN, "limit": float("nan"), "numbers": [float("nan"), -0.0]}).fork()
    before = database.digest()
    assert carry_out(database, Plain.tools["peek"], {"key": "x"}) == "ex 2024-05-15 nan"
    assert database.digest() == before
    assert database.difference() == []
    database.limit = 0.5
    assert [change.after for change in database.difference()] == [0.5]


def test_odd_text_is_only_text() -> None:
    odd = "\ud800 \u2028 \0 \U0001f600"
    database = Plain.load(PLAIN).fork()
    carry_out(database, Plain.tools["rename"], {"key": "x", "name": "\u2028 \0"})
    database.loose[odd] = {"n": odd}
    assert len(database.digest()) == 64
    assert database.difference()[0].path == f"loose.{odd}"
    assert database.to_data()["loose"][odd] == {"n": odd}


def test_records_that_are_not_there() -> None:
    database = Plain.load(PLAIN).fork()
    with pytest.raises(RecordNotFound, match=r"^things has no 'z'$"):
        _ = database.things["z"]
    with pytest.raises(RecordNotFound, match=r"things has no 'z+...'"):
        del database.things["z" * 10_000_000]
    assert database.things.get("z") is None
    assert database.difference() == []
    with pytest.raises(DomainError, match="texts, not int"):
        database.things[3] = Odd(name="three")  # type: ignore[index]
    with pytest.raises(DomainError, match="cannot be replaced"):
        database.things = {}  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"thing": {}}, r"Plain has no 'thing'; it has \['limit', 'loose'"),
        ({"things": {"z": {}}}, "things.z.name: Field required"),
        ({"things": ["x"]}, "things: an object with names is needed, not list"),
        ({"numbers": ["many"]}, r"numbers.0: Input should be a valid number"),
        (["things"], "an object with names is needed, not list"),
    ],
)
def test_wrong_data_is_told_with_its_place(data: Any, message: str) -> None:
    with pytest.raises(DomainError, match=message):
        Plain.load(data)
    with pytest.raises(DomainError, match=message):
        Plain.load(PLAIN).update(data)


def test_data_may_not_leave_out_a_field() -> None:
    with pytest.raises(DomainError, match=r"the data lacks \['bag', 'clock', 'counter'\]"):
        Shelf.load({})


def test_set_up_data_replaces_fields_and_adds_records() -> None:
    base = Plain.load(PLAIN)
    database = base.fork()
    database.update({"things": {"x": {"name": "new"}, "z": {"name": "zed"}}, "limit": 3})
    assert database.to_data()["things"] == {
        "x": {"name": "new", "colour": ["red"]},
        "y": {"name": "why"},
        "z": {"name": "zed"},
    }
    assert database.limit == 3
    assert database.fork().digest() == database.digest()
    fork = database.fork()
    database.things["z"].name = "later"
    assert fork.things["z"].name == "zed"


def test_mistakes_in_a_database_class_are_told() -> None:
    with pytest.raises(DomainError, match=r"Broken.update: every Database has a 'update'"):
        type("Broken", (Database,), {"__annotations__": {"update": int}})
    with pytest.raises(DomainError, match=r"Broken.things: a table is written Table\[YourRecord\]"):
        type("Broken", (Database,), {"__annotations__": {"things": Table}})
    with pytest.raises(DomainError, match="name 'Missing' is not defined"):
        type("Broken", (Database,), {"__annotations__": {"things": "Table[Missing]"}})


class Wider(Plain):
    loose: Table[Odd]  # type: ignore[assignment]


def test_a_subclass_may_declare_a_table_anew() -> None:
    assert isinstance(Wider.load({"loose": {"x": {"name": "typed"}}}).loose["x"], Odd)
    assert set(Wider.tools) == set(Plain.tools)
