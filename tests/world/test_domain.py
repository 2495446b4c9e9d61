"""Environments: dual control, set-up, single use, and the files a domain is loaded from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trialogue import (
    Assertion,
    Call,
    Change,
    Database,
    Domain,
    DomainError,
    Environment,
    Record,
    Setup,
    Table,
    Task,
    ToolError,
    tool,
)
from trialogue.errors import ConfigError
from trialogue.world import domain as domain_module
from trialogue.world.domain import from_list


class Line(Record):
    active: bool = True
    data: int = 0


class Network(Database):
    lines: Table[Line]
    ticks: int = 0

    @tool(writes=True)
    def set_data(self, number: str, data: int) -> Line:
        """Set how much data is left."""
        self.lines[number].data = data
        return self.lines[number]

    @tool
    def get_line(self, number: str) -> Line:
        """Look a line up."""
        return self.lines[number]

    def suspend(self, number: str) -> None:
        self.lines[number].active = False

    def has_data(self, number: str) -> bool:
        return self.lines[number].data > 0


class Phone(Database):
    number: str
    online: bool = False
    airplane: bool = False

    @tool(writes=True)
    def toggle_airplane(self) -> str:
        """Turn airplane mode on or off."""
        self.airplane = not self.airplane
        return "on" if self.airplane else "off"

    def drop(self) -> None:
        self.airplane = True

    def is_online(self) -> bool:
        return self.online


def keep_in_step(network: Network, phone: Phone) -> None:
    network.ticks += 1
    line = network.lines[phone.number]
    if line.data == 13:
        raise ToolError("13 is refused by the network")
    if line.data == 66:
        raise DomainError("66 breaks the network")
    phone.online = line.active and line.data > 0 and not phone.airplane


def make(*tasks: Task, **more: Any) -> Domain:
    more.setdefault("user_database", Phone.load({"number": "1"}))
    return Domain(
        "telecom",
        "Be kind.",
        Network.load({"lines": {"1": {"data": 5}, "2": {}}}),
        from_list("telecom", tasks),
        after_call=keep_in_step,
        **more,
    )


def task(**more: Any) -> Task:
    return Task(**{"id": "t", "domain": "telecom", "instructions": "", **more})


def online(environment: Environment) -> bool:
    assert isinstance(environment.user_database, Phone)
    return environment.user_database.online


def test_each_side_has_its_own_tools_and_both_are_kept_in_step() -> None:
    environment = make().open(task())
    assert list(environment.tools) == ["set_data", "get_line"]
    assert list(environment.user_tools) == ["toggle_airplane"]
    assert environment.call("toggle_airplane", {}).text.startswith(
        "Error: there is no tool 'toggle_airplane'"
    )
    assert "there is no tool 'get_line'" in environment.call("get_line", {"number": "1"}, "user").text
    environment.call("get_line", {"number": "1"})
    assert online(environment)
    environment.call("toggle_airplane", {}, "user")
    assert not online(environment)
    assert [change.path for change in environment.difference()] == ["ticks", "user.airplane"]
    assert environment.digest() != environment.reopen().digest()


def test_a_refused_call_moves_neither_side() -> None:
    environment = make().open(task())
    before = environment.digest()
    assert environment.call("set_data", {"number": "9", "data": 1}).text == "Error: lines has no '9'"
    assert (
        environment.call("set_data", {"number": "1", "data": 13}).text
        == "Error: 13 is refused by the network"
    )
    with pytest.raises(DomainError, match="66 breaks"):
        environment.call("set_data", {"number": "1", "data": 66})
    assert environment.digest() == before
    assert environment.difference() == []


def test_set_up_data_and_calls_make_the_state_a_conversation_opens_in() -> None:
    setup = Setup(
        data={"lines": {"1": {"data": 9}, "3": {}}},
        user_data={"airplane": False},
        calls=(
            Call(name="suspend", arguments={"number": "1"}),
            Call(name="set_data", arguments={"number": "2", "data": 4}),
            Call(name="drop", side="user"),
        ),
    )
    domain = make()
    environment = domain.open(task(setup=setup))
    assert environment.database.to_data() == {
        "lines": {
            "1": {"active": False, "data": 9},
            "2": {"active": True, "data": 4},
            "3": {"active": True, "data": 0},
        },
        "ticks": 5,
    }
    assert environment.user_database is not None
    assert environment.user_database.to_data() == {"number": "1", "online": False, "airplane": True}
    assert environment.difference() == []
    environment.call("set_data", {"number": "3", "data": 1})
    assert Change("lines.3.data", 0, 1) in environment.difference()
    assert environment.reopen().difference() == domain.open(task(setup=setup)).difference() == []
    assert domain.open(task(setup=setup)).digest() == environment.reopen().digest()
    assert domain.open(task(id="other")).database.to_data()["ticks"] == 0


@pytest.mark.parametrize(
    ("setup", "message"),
    [
        (Setup(data={"line": {}}), "task t, setup: Network has no 'line'"),
        (Setup(data={"lines": {"1": {"data": "much"}}}), "lines.1.data: Input should be a valid integer"),
        (Setup(calls=(Call(name="explode"),)), "Network has no method 'explode'"),
        (Setup(calls=(Call(name="digest"),)), "Network has no method 'digest'"),
        (Setup(calls=(Call(name="_take"),)), "Network has no method '_take'"),
        (Setup(calls=(Call(name="suspend"),)), "Network.suspend: .*missing 1 required positional argument"),
        (Setup(calls=(Call(name="suspend", arguments={"number": "9"}),)), "lines has no '9'"),
        (Setup(calls=(Call(name="set_data", arguments={"number": "1"}),)), "missing argument 'data'"),
    ],
)
def test_a_wrong_set_up_names_the_task(setup: Setup, message: str) -> None:
    with pytest.raises(DomainError, match=message):
        make().open(task(setup=setup))


def test_user_data_needs_a_user_database() -> None:
    domain = Domain("x", "", Network.load({}), from_list("x", []))
    with pytest.raises(DomainError, match="the user has no database"):
        domain.open(task(setup=Setup(user_data={"number": "2"})))
    assert domain.open(task()).call("toggle_airplane", {}, "user").text == (
        "Error: there is no tool 'toggle_airplane'; you have no tools"
    )


def test_assertions_ask_either_side() -> None:
    environment = make().open(task())
    assert environment.do(Assertion(name="has_data", arguments={"number": "1"})) is True
    assert environment.do(Assertion(name="is_online", side="user")) is True


def test_environments_of_a_task_stay_comparable_when_it_is_prepared_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(domain_module, "_KEPT", 2)
    domain = make()
    early = domain.open(task())
    early.call("set_data", {"number": "1", "data": 2})
    for number in range(5):
        domain.open(task(id=f"t{number}"))
    assert len(domain._prepared) == 2
    assert early.reopen().difference() == []
    assert [change.path for change in early.difference(early.reopen())] == [
        "ticks",
        "lines.1.data",
        "user.online",
    ]


def test_a_task_of_the_same_id_but_another_set_up_is_another_task() -> None:
    domain = make()
    one = domain.open(task())
    two = domain.open(task(setup=Setup(data={"lines": {"1": {"data": 0}}})))
    assert one.database.to_data() != two.database.to_data()
    assert domain.open(task()).digest() == one.digest()


def write(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    defaults = {
        "policy.md": "Be kind.",
        "database.json": '{"lines": {"1": {}}}',
        "tasks.jsonl": '{"id": "a", "instructions": "Hi \u2028 there."}\n\n'
        '{"id": "b", "instructions": "", "split": "train"}\n',
    }
    for name, text in {**defaults, **{name.replace("_", "."): text for name, text in files.items()}}.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def test_a_domain_is_loaded_from_the_files_beside_it(tmp_path: Path) -> None:
    folder = write(tmp_path / "bakery")
    domain = Domain.load(folder / "bakery.py", Network, greeting="Hello!")
    assert (domain.name, domain.policy, domain.greeting) == ("bakery", "Be kind.", "Hello!")
    assert [item.id for item in domain.tasks("test")] == ["a"]
    assert domain.tasks("test")[0].instructions == "Hi \u2028 there."
    assert [item.id for item in domain.tasks("all", 5)] == ["a", "b"]
    assert domain.tasks("all", levels=[3]) == []
    with pytest.raises(ConfigError, match="no tasks in split 'dev'; it has test, train"):
        domain.tasks("dev")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"database_json": "{"}, "database.json: not JSON"),
        ({"database_json": "[]"}, "an object with names is needed"),
        ({"tasks_jsonl": '{"id": "a"}'}, "tasks.jsonl, line 1, task a: instructions: Field required"),
        ({"tasks_jsonl": '\n{"id": '}, "tasks.jsonl, line 2: not JSON"),
        ({"tasks_jsonl": '"text"'}, "tasks.jsonl, line 1"),
        (
            {"tasks_jsonl": '{"id": "a", "instructions": "", "goal": 1}'},
            "goal: there is no such field",
        ),
        (
            {"tasks_jsonl": '{"id":"a","instructions":""}\n' * 2},
            r"task ids must be unique; repeated: \['a'\]",
        ),
    ],
)
def test_wrong_files_are_told_with_their_line(tmp_path: Path, files: dict[str, str], message: str) -> None:
    write(tmp_path, **files)
    with pytest.raises(DomainError, match=message):
        Domain.load(tmp_path, Network)


def test_missing_and_unreadable_files_are_told(tmp_path: Path) -> None:
    with pytest.raises(DomainError, match=r"the domain needs a file database.json"):
        Domain.load(tmp_path, Network)
    write(tmp_path)
    (tmp_path / "policy.md").write_bytes(b"\xff\xfe")
    with pytest.raises(DomainError, match=r"cannot read .*policy.md"):
        Domain.load(tmp_path, Network)


def test_calls_are_replayed_in_order() -> None:
    environment = make().open(task())
    results = environment.replay(
        [("set_data", {"number": "1", "data": 2}, "agent"), ("get_line", {"number": "1"}, "agent")]
    )
    assert [json.loads(result.text)["data"] for result in results] == [2, 2]
