"""A record is data: unless the caller says so it runs no code, starts no process and sends no key."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from command import run_verb
from endpoint import Endpoint

from trialogue.cli.conversations import to_chat, to_chat_config
from trialogue.cli.main import main
from trialogue.cli.options import Asked, to_allowed
from trialogue.config import (
    AuditSettings,
    EngineChoice,
    EvalConfig,
    InDomain,
    RunSettings,
    Section,
    SftConfig,
    Share,
    Speaker,
    SynthesizeConfig,
    Tasks,
    TrainConfig,
    load_config,
)
from trialogue.corpus.draft import write_folder
from trialogue.digests import list_now
from trialogue.errors import ConfigError
from trialogue.records import read_lines, write_records
from trialogue.run import Kind, Run, read_config
from trialogue.score.evaluate import evaluate
from trialogue.score.resume import find_claims
from trialogue.seams import Seam
from trialogue.world.simulated import Scenario

CONFIGS: dict[Kind, type[Section]] = {
    "eval": EvalConfig,
    "rollout": EvalConfig,
    "sft": SftConfig,
    "synthesize": SynthesizeConfig,
    "train": TrainConfig,
}
CODE = "from pathlib import Path\nPath({ran!r}).touch()\nfrom trialogue.world.domains.shop import domain\n"
SECRET = "sk-canary-7777"


def refused(*words: str) -> str:
    """The one line with which a verb is refused, in this process: nothing is loaded."""
    done = run_verb(Path.cwd(), *words)
    assert done.returncode == 2, (words, done.stdout, done.stderr)
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr


def record(folder: Path, kind: Kind, *settings: str) -> Path:
    """A run directory as somebody else might send it."""
    config: Any = load_config(CONFIGS[kind], None, settings)
    made = Run.create(RunSettings(directory=str(folder), name=kind), kind, config.domain, config, 0)
    made.add_prompts({"hash": "", "tasks_hash": ""})
    made.close("stopped")
    return made.path


# -- code ----------------------------------------------------------------------------------------------------


@pytest.fixture
def ran(tmp_path: Path) -> Path:
    """Where code beside a record leaves its mark: a folder, a file, a module, a server that is started."""
    ran = tmp_path / "ran"
    code = CODE.format(ran=str(ran))
    (tmp_path / "package").mkdir()
    for name in ("package/domain.py", "single.py", "module.py"):
        (tmp_path / name).write_text(code)
    (tmp_path / "server").mkdir()
    command = [sys.executable, "-c", f"open({str(ran)!r}, 'w')"]
    (tmp_path / "server" / "server.toml").write_text(f"command = {json.dumps(command)}\n")
    (tmp_path / "server" / "policy.md").write_text("Help.\n")
    return ran


PLACES = {
    "package": "package/domain.py",
    "single.py": "single.py",
    "module:domain": "the module module",
    "server": "server/server.toml",
}
"""What a record may name, and what that would run."""


@pytest.mark.parametrize(("place", "code"), PLACES.items())
def test_a_record_that_is_looked_at_runs_no_code(
    tmp_path: Path, ran: Path, place: str, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = EvalConfig(tasks=Tasks(count=2), run=RunSettings(name="sent"))
    asyncio.run(evaluate(settings))
    file = Path("runs/sent/trajectories/eval.jsonl")
    lines = [line for _, line in read_lines(file)]
    for line in lines:
        line["meta"]["domain"] = place
    write_records(file, [json.dumps(line) for line in lines])  # digests are no signature
    list_now(Path("runs/sent"))
    for words in (["score", str(file)], ["score", "runs/sent"], ["users", "audit", "runs/sent"]):
        told = refused(*words)
        assert not ran.exists(), words
        assert code in told
        assert f"add the DOMAIN {place} to allow it, or --trust" in told
    for more in (["--trust"], [place]):
        done = run_verb(tmp_path, "score", "runs/sent", *more)
        assert ran.exists(), done.stderr
        if place != "server":  # which answers nothing
            assert "2 conversations, 2 graded as recorded" in done.stdout, done.stderr
        ran.unlink()


@pytest.mark.parametrize(("place", "code"), PLACES.items())
def test_a_run_that_goes_on_runs_no_code(
    tmp_path: Path, ran: Path, place: str, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for kind in CONFIGS:
        record(tmp_path, kind, f"domain={place}", "tasks.count=1")
    for words in (
        *([kind, "--resume", kind] for kind in CONFIGS),
        ["chat", "train"],
        ["review", "synthesize"],
    ):
        told = refused(*words)
        assert not ran.exists(), words
        assert code in told
        assert (f"add domain={place} to allow it" in told) == (words[0] != "review")
        assert "--trust" in told
    with pytest.raises(ConfigError, match="--trust"):
        asyncio.run(evaluate(EvalConfig(), resume=Path("eval")))
    assert not ran.exists()
    for more in (["--trust"], [f"domain={place}"]):
        done = run_verb(tmp_path, "eval", "--resume", "eval", *more)
        assert ran.exists(), done.stderr
        ran.unlink()


def test_other_names_of_code(tmp_path: Path, ran: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a corpus is held against, a benchmark's folder; control characters are shown."""
    monkeypatch.chdir(tmp_path)
    record(tmp_path, "synthesize", 'synthesize.against=["shop/test", "package/test"]')
    told = refused("synthesize", "--resume", "synthesize")
    assert "package/domain.py" in told
    assert """'synthesize.against=["shop/test", "package/test"]'""" in told
    record(tmp_path, "eval", "domain=bfcl:base", "data=package")
    assert "would load a benchmark from package: add data=package" in refused("eval", "--resume", "eval")
    assert "add data=package" in refused("eval", "bfcl:base", "--resume", "eval")
    monkeypatch.setenv("TRIALOGUE_DATA", "package")
    assert "no data of bfcl in package" in CliRunner().invoke(main, ["eval", "--resume", "eval"]).stderr
    name = "a\x1b[2J.py"
    (tmp_path / name).write_text((tmp_path / "single.py").read_text())
    record(tmp_path, "train", f"domain={json.dumps(name)}")
    told = refused("train", "--resume", "train")
    assert "\x1b" not in told
    assert "\\x1b[2J.py" in told
    assert not ran.exists()


def find_seams(kind: type[Section], prefix: str = "") -> Iterator[str]:
    """The settings that may name code of the caller's own, besides the domain."""
    for name, known in kind.model_fields.items():
        if isinstance(known.annotation, type) and issubclass(known.annotation, Section):
            yield from find_seams(known.annotation, f"{prefix}{name}.")
        elif any(isinstance(mark, Seam) for mark in known.metadata):
            yield prefix + name


@pytest.mark.parametrize("kind", ["eval", "train", "sft", "synthesize"])
def test_every_setting_that_may_name_code_is_named_by_the_caller(
    tmp_path: Path, ran: Path, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = list(find_seams(CONFIGS[kind]))
    assert {"train": "loss.name", "eval": "agent.model"}.get(kind, "user.model") in names
    for name in names:
        for place, code in (("module:f", "the module module"), ("single.py:f", "single.py")):
            config: Section = load_config(CONFIGS[kind], None, [f"{name}={place}"])
            assert [claim.settings for claim in find_claims(config)] == [{name: place}]
            assert find_claims(config, {name}) == []
            shutil.rmtree(tmp_path / kind, ignore_errors=True)
            record(tmp_path, kind, f"{name}={place}")
            told = refused(kind, "--resume", kind)
            assert code in told
            assert f"add {name}={place} to allow it, or --trust" in told
    mix = EvalConfig(user=Speaker(mix=(Share(model="agenda"), Share(model="single.py:f"))))
    assert {key for claim in find_claims(mix) for key in claim.settings} == {"user.mix"}
    assert not ran.exists()


SCENARIO = Scenario.model_validate(
    {
        "summary": "A library.",
        "tables": {"books": {"fields": {"title": {}}}},
        "tools": [{"name": "find_book", "description": "Find a book."}],
    }
)


@pytest.mark.parametrize("name", ["~nobody-9/x", "", "a\0b", "no such", "shop "])
def test_a_domain_that_is_not_there_is_told(name: str) -> None:
    with pytest.raises(ConfigError, match="no domain"):
        find_claims(EvalConfig(domain=name))


def test_what_is_installed_or_data_is_found_without_asking(tmp_path: Path) -> None:
    write_folder(tmp_path / "library", "Lend books.", SCENARIO, "A library.", "openai:m")
    for domain in ("shop", "tau2:retail", "bfcl:base", str(tmp_path / "library")):
        assert find_claims(EvalConfig(domain=domain)) == []


def test_the_command_that_is_printed_goes_on(
    tmp_path: Path, ran: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The printed command allows what was allowed and nothing more."""
    done = run_verb(tmp_path, "eval", "single.py", "--agent", "human", "run.name=left")
    [line] = [line for line in done.stderr.splitlines() if "--resume" in line]
    assert line.strip() == "trialogue eval --resume runs/left domain=single.py"
    done = run_verb(tmp_path, "eval", "shop", "--agent", "human", "run.name=my own")
    assert done.stderr.endswith("trialogue eval --resume 'runs/my own'\n")
    monkeypatch.chdir(tmp_path)
    config = load_config(
        TrainConfig, None, ["domain=single.py", "reward.name=module:f", "loss.name=module:g"]
    )
    assert to_allowed(Path("runs/my own"), to_chat_config(config)) == (
        "'runs/my own' domain=single.py reward.name=module:f"
    )
    sent = record(tmp_path, "train", "domain=single.py", "reward.name=module:f", "learner.renderer=module:h")
    learned = read_config(TrainConfig, sent)
    words = shlex.split(to_allowed(sent, to_chat_config(learned)))
    assert to_chat(words[0], Asked(settings=tuple(words[1:]))).defaults


# -- keys ----------------------------------------------------------------------------------------------------


@pytest.fixture
def listener() -> Iterator[Endpoint]:
    """An endpoint that refuses every key."""
    with Endpoint(lambda request, asked: (401, {"error": {"message": "no"}})) as server:
        yield server


def read_keys(listener: Endpoint) -> set[str]:
    """The keys that were sent since the last time."""
    keys = {request["authorization"] for request in listener.requests}
    listener.requests.clear()
    return keys


QUICK = ("tasks.count=1", "rollout.redraws=0", "agent.model=openai:m", "agent.retries=0", "agent.outage=0.0")


def test_a_run_that_goes_on_sends_no_key_where_it_says(
    tmp_path: Path, listener: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-own-7777")
    address = listener.url
    stolen = [f"agent.base_url={address}", "agent.api_key_env=AWS_SECRET_ACCESS_KEY"]
    record(tmp_path, "eval", *QUICK, *stolen)
    for more in ([], stolen[:1], stolen[1:]):
        told = refused("eval", "--resume", "eval", *more)
        assert f"eval would send the key in AWS_SECRET_ACCESS_KEY to {address}: add " in told
        assert all((setting in told) == (setting not in more) for setting in stolen)
    with pytest.raises(ConfigError, match="AWS_SECRET_ACCESS_KEY"):
        asyncio.run(evaluate(EvalConfig(), resume=Path("eval")))
    assert read_keys(listener) == set()
    for more in (stolen, ["--trust"]):
        CliRunner().invoke(main, ["eval", "--resume", "eval", *more])
        assert read_keys(listener) == {f"Bearer {SECRET}"}


@pytest.mark.parametrize(("typed", "status"), [("n\n", 2), ("\n", 2), ("y\n", 1)])
def test_on_a_terminal_one_line_asks(tmp_path: Path, listener: Endpoint, typed: str, status: int) -> None:
    address = listener.url
    record(tmp_path, "eval", *QUICK, f"agent.base_url={address}")
    ended, shown = type_at(tmp_path, ["eval", "--resume", "eval"], typed, {"OPENAI_API_KEY": SECRET})
    assert f"eval would send the key in OPENAI_API_KEY to {address}. Allow it? [y/N]" in shown
    assert ended == status, shown  # where it is allowed, the endpoint refuses the key
    assert read_keys(listener) == ({f"Bearer {SECRET}"} if typed == "y\n" else set())


def type_at(folder: Path, words: list[str], typed: str, environment: dict[str, str]) -> tuple[int, str]:
    """Run a verb on a terminal of its own and answer its question."""
    ours, theirs = os.openpty()
    command = [sys.executable, "-m", "trialogue", *words]
    whole = {**os.environ, "COLUMNS": "300", **environment}
    with subprocess.Popen(
        command, cwd=folder, stdin=theirs, stdout=theirs, stderr=theirs, env=whole, start_new_session=True
    ) as child:
        os.close(theirs)
        shown = b""
        with suppress(OSError):  # the other end is closed
            while part := os.read(ours, 4096):
                shown += part
                if typed and b"[y/N]" in shown:
                    os.write(ours, typed.encode())
                    typed = ""
        os.close(ours)
    return child.returncode, shown.decode()


OTHER = "https://other.example/v1"
MY_KEY = {"model": "openai:m", "api_key_env": "MY_KEY"}
AT_OTHER = {"model": "openai:m", "base_url": OTHER}


@pytest.mark.parametrize(
    ("config", "keys"),
    [
        (EvalConfig(agent=Speaker(**AT_OTHER)), {"agent.base_url"}),
        (EvalConfig(user=Speaker(**MY_KEY)), {"user.api_key_env"}),
        (EvalConfig(user=Speaker(model="replay:x", otherwise="openai:m", base_url=OTHER)), {"user.base_url"}),
        (EvalConfig(agent=Speaker(mix=(Share(model="oracle"), Share(**AT_OTHER)))), {"agent.mix"}),
        (EvalConfig(judge=Speaker(**AT_OTHER)), {"judge.base_url"}),
        (EvalConfig(simulator=Speaker(**AT_OTHER)), {"simulator.base_url"}),
        (EvalConfig(audit=AuditSettings(judge=Speaker(**AT_OTHER))), {"audit.judge.base_url"}),
        (SynthesizeConfig(judge=Speaker(**MY_KEY)), {"judge.api_key_env"}),
        (SftConfig(user=Speaker(**AT_OTHER)), {"user.base_url"}),
        (TrainConfig(audit=AuditSettings(judge=Speaker(**MY_KEY))), {"audit.judge.api_key_env"}),
        (TrainConfig(engine=EngineChoice(name="tinker", url=OTHER)), {"engine.url"}),
        (TrainConfig(engine=EngineChoice(name="vllm", url=OTHER)), {"engine.url"}),
        (EvalConfig(run=RunSettings(track=("wandb",))), {"run.track"}),
        (
            TrainConfig(
                engine=EngineChoice(name="vllm", url="http://127.0.0.1:8000", weights="/home/me/model")
            ),
            {"engine.weights"},
        ),
        (EvalConfig(user=Speaker(model="guided:openai:m", base_url=OTHER)), {"user.base_url"}),
        (EvalConfig(agent=Speaker(model="openai:m")), set[str]()),
        (EvalConfig(agent=Speaker(model="openai:m", base_url="http://localhost:8000/v1")), set[str]()),
        (EvalConfig(agent=Speaker(model="openai:m", base_url="http://localhost.me/v1")), {"agent.base_url"}),
        (
            EvalConfig(agent=Speaker(model="openai:m", base_url="http://127.0.0.1@other.example")),
            {"agent.base_url"},
        ),
        (EvalConfig(agent=Speaker(model="oracle", base_url=OTHER)), set[str]()),
    ],
)
def test_every_endpoint_is_named_by_the_caller(
    config: Section, keys: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "TINKER_API_KEY", "TINKER_BASE_URL", "VLLM_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    assert {key for claim in find_claims(config) for key in claim.settings} == keys
    assert find_claims(config, keys) == []
    assert find_claims(config, {key.partition(".")[0] for key in keys}) == []


def test_the_environment_names_an_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    config = EvalConfig(agent=Speaker(model="openai:m", base_url="http://127.0.0.1:8000/v1/"))
    [claim] = find_claims(config)
    assert claim.does == "send the key in OPENAI_API_KEY to http://127.0.0.1:8000/v1/"
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:8000/v1")
    assert find_claims(config) == []


def test_the_world_of_a_run_one_chats_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`chat` takes domain and simulator from the run; what is given besides counts as named."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    record(tmp_path, "train", "simulator.model=oracle", f"simulator.base_url={OTHER}")
    assert f"add simulator.base_url={OTHER}" in refused("chat", "train", "simulator.model=openai:m")
    own = ("simulator.model=openai:m", "simulator.base_url=http://h")
    config = to_chat("train", Asked(settings=own)).to_config(EvalConfig)
    assert (config.simulator.model, config.simulator.base_url) == ("openai:m", "http://h")
    assert (config.domain, config.agent.model) == ("shop", "train")


CHOSEN_BY_THE_CALLER = {
    *("TrainConfig.domain", "TrainConfig.data", "Synthesis.against"),
    *("Speaker.base_url", "Speaker.api_key_env"),
    *("EngineChoice.name", "EngineChoice.url", "EngineChoice.weights"),
    *("AdvantageSettings.name", "LossSettings.name", "RewardSettings.name"),
    *("LearnerSettings.renderer", "Speaker.renderer"),
}
READ_AS_DATA = {
    *("Speaker.model", "Speaker.otherwise", "Speaker.prompt", "Speaker.personas"),
    *("SftSettings.examples", "LearnerSettings.model"),
}
NO_PLACE = {
    *("LearnerSettings.device", "Synthesis.free_text"),
    *("Tasks.split", "Tasks.families", "Training.eval_split", "SftSettings.eval_split"),
    *("RunSettings.directory", "RunSettings.name"),  # of a new run
}


def find_texts(kind: type[Section]) -> Iterator[str]:
    for name, known in kind.model_fields.items():
        if isinstance(known.annotation, type) and issubclass(known.annotation, Section):
            yield from find_texts(known.annotation)
        elif known.annotation in (str, str | None, tuple[str, ...]):
            owner = "TrainConfig" if name in InDomain.model_fields else kind.__name__
            yield f"{owner}.{name}"


def test_every_text_among_the_settings_has_been_decided_about() -> None:
    """A new one may name code, an address or a variable: `find_claims` has to know it, then put it here."""
    found = {text for kind in CONFIGS.values() for text in find_texts(kind)}
    assert found == CHOSEN_BY_THE_CALLER | READ_AS_DATA | NO_PLACE
