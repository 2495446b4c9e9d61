"""The server as a browser and as an attacker meets it: real requests to a real server over real runs."""

import http.client
import json
import re
import shutil
import threading
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from trialogue.view.run_reader import RunRecords
from trialogue.view.server import SCRIPTS, PageServer, open_server, read_page


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[PageServer]:
    with open_server(folder / "runs", "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(
    server: PageServer, path: str, method: str = "GET", **headers: str
) -> tuple[int, dict[str, str], bytes]:
    port = server.server_address[1]
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.putrequest(method, path, skip_host=True)
    sent = {"Host": f"127.0.0.1:{port}", **{name.replace("_", "-"): value for name, value in headers.items()}}
    for name, value in sent.items():
        connection.putheader(name, value)
    connection.endheaders()
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, dict(answer.getheaders()), body


def get(server: PageServer, question: str, **query: object) -> Any:
    status, _, body = ask(server, f"/api/{question}?{urlencode({k: str(v) for k, v in query.items()})}")
    assert status == 200, body
    return json.loads(body)


def test_the_runs_are_listed(server: PageServer) -> None:
    runs = get(server, "runs")["runs"]
    assert {run["name"] for run in runs} == {"good", "bad"}
    good = next(run for run in runs if run["name"] == "good")
    assert good["pass1"] == pytest.approx([1.0, 0.6637, 1.0], abs=1e-4)
    assert (good["kind"], good["model"], good["user"], good["state"]) == (
        "eval",
        "oracle",
        "agenda",
        "finished",
    )


def test_a_run_and_its_conversations(server: PageServer) -> None:
    run = get(server, "run", run="good")
    assert run["count"] == 18
    assert run["result"]["pass^2"] == 1
    assert run["changed"]["tasks.trials"] == 2
    assert sum(run["health"]["ends"].values()) == 18
    page = get(server, "conversations", run="good", limit=5, offset=15)
    assert page["total"] == 18
    assert len(page["rows"]) == 3
    row = page["rows"][0]
    told = get(server, "conversation", run="good", id=row["id"])
    assert told["trajectory"]["task"]["id"] == row["task"]
    assert [item["trial"] for item in told["siblings"]] == [0, 1]
    assert len(told["seconds"]) == row["turns"]
    assert {tool["function"]["name"] for tool in told["prompts"]["tools"]} >= {"cancel_order", "find_orders"}


@pytest.mark.parametrize(
    ("query", "count"),
    [
        ({}, 9),
        ({"reward": "lost"}, 9),
        ({"reward": "won"}, 0),
        ({"family": "cancel"}, 3),
        ({"level": "3"}, 1),
        ({"task": "CANCEL-1"}, 1),
        ({"end": "user_stop"}, 9),
        ({"end": "max_turns"}, 0),
        ({"lost": "1"}, 9),
        ({"step": "1"}, 0),
        ({"text": "anything ELSE"}, 9),
        ({"text": "never said by anyone"}, 0),
    ],
)
def test_filters(server: PageServer, query: dict[str, str], count: int) -> None:
    assert len(get(server, "conversations", run="bad", **query)["rows"]) == count


def test_lost_by_all_leaves_out_tasks_that_somebody_won(server: PageServer) -> None:
    assert get(server, "conversations", run="good", lost="1")["total"] == 0


def test_neighbours_follow_the_filter(server: PageServer) -> None:
    rows = get(server, "conversations", run="bad", family="cancel")["rows"]
    told = get(server, "conversation", run="bad", id=rows[1]["id"], family="cancel")
    assert (told["previous"], told["next"], told["place"]) == (rows[0]["id"], rows[2]["id"], 1)


def test_sorting(server: PageServer) -> None:
    turns = [row["turns"] for row in get(server, "conversations", run="good", sort="-turns")["rows"]]
    assert turns == sorted(turns, reverse=True)
    assert len(set(turns)) > 1


# -- what is refused ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/", "/app.js", "/style.css", "/api/runs"])
def test_every_answer_has_a_strict_policy(server: PageServer, path: str) -> None:
    status, headers, body = ask(server, path)
    assert status == 200
    assert body
    policy = headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'")
    assert "unsafe" not in policy
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert "Access-Control-Allow-Origin" not in headers


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:7878",
        "127.0.0.1.evil.example",
        "10.0.0.7",
        "",
        "[::2]",
        "localhost.evil",
    ],
)
def test_a_foreign_host_is_refused(server: PageServer, host: str) -> None:
    for path in ("/", "/api/runs"):
        status, _, body = ask(server, path, Host=host)
        assert status == 403
        assert b"good" not in body


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "localhost:80", "[::1]:7878"])
def test_this_machine_is_welcome(server: PageServer, host: str) -> None:
    assert ask(server, "/api/runs", Host=host)[0] == 200


def test_other_sites_may_not_ask(server: PageServer) -> None:
    assert ask(server, "/api/runs", Origin="http://evil.example")[0] == 403
    assert ask(server, "/api/runs", Origin="null")[0] == 403
    assert ask(server, "/api/runs", Sec_Fetch_Site="cross-site")[0] == 403
    assert ask(server, "/app.js", Sec_Fetch_Site="same-site")[0] == 403
    assert ask(server, "/", Sec_Fetch_Site="cross-site")[0] == 200  # a link to the page may be followed
    own = f"http://127.0.0.1:{server.server_address[1]}"
    assert ask(server, "/api/runs", Origin=own, Sec_Fetch_Site="same-origin")[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_can_be_changed(server: PageServer, method: str) -> None:
    assert ask(server, "/api/runs", method)[0] == 501


@pytest.mark.parametrize(
    "path",
    [
        "/../run.json",
        "/..%2f..%2fetc/passwd",
        "/%2e%2e/run.json",
        "//etc/passwd",
        "/page/../server.py",
        "/server.py",
        "/api/run?run=../bakery",
        "/api/run?run=%2e%2e",
        "/api/run?run=/etc",
        "/api/run?run=good/../bad",
        "/api/run?run=good/trajectories",
        "/api/conversation?run=good&id=../../run.json",
        "/api/tokens?run=good&id=%00",
        "/api/run",
        "/api/",
    ],
)
def test_nothing_outside_the_runs_is_reached(server: PageServer, path: str) -> None:
    status, _, body = ask(server, path)
    assert status == 404
    assert set(json.loads(body)) == {"error"}


def test_a_link_out_of_the_run_is_not_followed(server: PageServer, folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "runs" / "good"
    shutil.copytree(folder / "runs" / "good", copy)
    (copy / "trajectories" / "other.jsonl").symlink_to(
        folder / "runs" / "bad" / "trajectories" / "eval.jsonl"
    )
    records = RunRecords(copy)
    records.refresh()
    records.wait()
    assert records.count() == 18


def test_a_taken_port_is_told(server: PageServer, folder: Path) -> None:
    from trialogue.errors import RunError

    with pytest.raises(RunError, match="choose another port with --port"):
        open_server(folder / "runs", "127.0.0.1", server.server_address[1])


def test_the_page_asks_nobody_else() -> None:
    for name, content in read_page().items():
        text = content.decode()
        for word in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "new Function",
        ):
            assert word not in text, f"{name} has {word}"
        links = text.replace("http://www.w3.org/2000/svg", "")
        assert "http://" not in links, name
        assert "https://" not in links, name


def test_the_modules_can_stand_in_one_script() -> None:
    """They are laid end to end: no two may give a name to something at their top level."""
    folder = files("trialogue.view").joinpath("page")
    texts = {item.name: item.read_text() for item in folder.iterdir() if item.name.endswith(".js")}
    assert set(SCRIPTS) == set(texts)
    assert [name for name in read_page() if name.endswith(".js")] == ["app.js"]
    pattern = re.compile(r"^(?:export )?(?:async )?(?:function|const|let|class) (\w+)", re.MULTILINE)
    names = [name for module in SCRIPTS for name in pattern.findall(texts[module])]
    assert len(names) == len(set(names)), sorted(name for name in set(names) if names.count(name) > 1)
    for number, module in enumerate(SCRIPTS):
        for needed in re.findall(r'from "\./(\w+\.js)"', texts[module]):
            assert needed in SCRIPTS[:number], f"{module} needs {needed}, which stands after it"


# -- a run that grows, and one whose index is not right ------------------------------------------------------


def to_facts(records: RunRecords) -> list[tuple[str, int, float | None, int]]:
    return [(entry.id, entry.at, entry.reward, entry.turns) for entry in records.entries()]


def test_what_no_index_lists_is_looked_through(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "good"
    shutil.copytree(folder / "runs" / "good", copy)
    whole = RunRecords(copy)
    whole.refresh()
    assert not whole.scanning
    expected = to_facts(whole)
    lines = (copy / "index.jsonl").read_text().splitlines(keepends=True)
    for left in (0, 5, len(lines)):
        (copy / "index.jsonl").write_text("".join(lines[:left]))
        records = RunRecords(copy)
        records.refresh()
        records.wait()
        assert to_facts(records) == expected
    (copy / "index.jsonl").write_text("nonsense\n" + lines[0].replace('"at":0', '"at":7') + lines[3])
    records = RunRecords(copy)
    records.refresh()
    records.wait()
    assert to_facts(records) == expected


def test_a_growing_run_is_followed_line_by_line(folder: Path, tmp_path: Path) -> None:
    source = folder / "runs" / "good"
    copy = tmp_path / "good"
    (copy / "trajectories").mkdir(parents=True)
    shutil.copy(source / "run.json", copy)
    conversations = (source / "trajectories" / "eval.jsonl").read_bytes().splitlines(keepends=True)
    entries = (source / "index.jsonl").read_bytes().splitlines(keepends=True)
    records = RunRecords(copy)
    for number, (conversation, entry) in enumerate(zip(conversations, entries, strict=True), 1):
        with (copy / "trajectories" / "eval.jsonl").open("ab") as file:
            file.write(conversation)
        with (copy / "index.jsonl").open("ab") as file:
            file.write(entry[:-9])
            file.flush()
            before = records.version
            records.refresh()  # half a line is no line
            records.wait()
            file.write(entry[-9:])
        records.refresh()
        records.wait()
        assert records.count() == number
        assert records.version > before
    assert len({entry.id for entry in records.entries()}) == len(conversations)


def test_a_run_begun_anew_is_noticed(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(folder / "runs" / "good", copy)
    records = RunRecords(copy)
    records.refresh()
    shutil.rmtree(copy)
    shutil.copytree(folder / "runs" / "bad", copy)
    records.refresh()
    records.wait()
    assert {entry.reward for entry in records.entries()} == {0.0}
    assert records.metrics[0]["agent"] == "naive"
