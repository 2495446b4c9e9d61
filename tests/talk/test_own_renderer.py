"""A renderer from outside the package: what it may be, what is checked, and what a folder may not choose."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from trialogue import ConfigError, Message, Reply, Tool, Vocabulary, find_domain, load_learner
from trialogue.cli.main import main
from trialogue.config import LearnerSettings, TrainConfig, load_config
from trialogue.engine.models import find_model_folder
from trialogue.run import find_files, read_trajectories
from trialogue.talk.render.load import load_renderer, save_renderer
from trialogue.talk.render.tiny import BriefRenderer

EXAMPLE = Path(__file__).parents[2] / "examples" / "renderer.py"
CODE = '''
from trialogue import BriefRenderer


class Shouting(BriefRenderer):
    """Starts every conversation with a word of its own."""

    def start(self, messages, tools):
        return [*self.vocabulary.encode([" LISTEN"]), *super().start(messages, tools)]


def make(vocabulary):
    return Shouting(vocabulary)


def two_arguments(vocabulary, tokenizer):
    return Shouting(vocabulary)


def nothing(vocabulary):
    return None


class Halved:
    name, vocabulary, stop_tokens = "halved", None, ()

    def __init__(self, vocabulary):
        pass

    def start(self, messages):
        return []


class Short(Shouting):
    def start(self, messages):
        return []


class Text(Shouting):
    def start(self, messages, tools):
        return "LISTEN"


class Bug(Shouting):
    def start(self, messages, tools):
        return [*messages.first]


class Mute(Shouting):
    def parse(self, reply):
        return "what?"


absent = None
'''
TASK = [Message(role="system", content="# Desk"), Message(role="user", content="Hi.")]
Written = Callable[[str], str]


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Written:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(CODE, encoding="utf-8")
    return lambda name: f"mine.py:{name}"


@pytest.mark.parametrize("name", ["Shouting", "make"])
def test_it_writes_the_prompts(mine: Written, name: str) -> None:
    folder = find_model_folder("tiny")
    _, own = load_renderer(folder, mine(name))
    _, usual = load_renderer(folder)
    assert own.vocabulary.decode(own.start(TASK, [])) == (
        " LISTEN" + usual.vocabulary.decode(usual.start(TASK, []))
    )
    reply = own.write(Message(role="assistant", content="Hello!"))
    assert own.parse(reply) == usual.parse(reply) == Reply("Hello!")
    assert own.extend(usual.start(TASK, []), reply, TASK[1:]) == usual.extend([], reply, TASK[1:])
    assert (own.name, own.stop_tokens) == (f"mine.py:{name}", usual.stop_tokens)


def test_the_example_names_the_tools() -> None:
    _, renderer = load_renderer(find_model_folder("tiny"), f"{EXAMPLE}:ToolNames")
    tools = list(find_domain("shop").database.tools.values())
    text = renderer.vocabulary.decode(renderer.start(TASK, tools))
    assert text.startswith("<|system|> Desk tools: ")
    assert all(tool.name in text for tool in tools)


MISTAKES = {
    "two_arguments": "it is called as renderer(vocabulary), but takes (vocabulary, tokenizer)",
    "nothing": "renderer nothing (mine.py, line 20): None is no Renderer, it lacks name, ",
    "Halved": "is no Renderer, it lacks extend, write, parse",
    "Short": "start(messages, tools), but takes (messages)",
    "absent": "renderer is None",
    "Shout": "mine.py has no 'Shout'",
}


@pytest.mark.parametrize(("name", "told"), MISTAKES.items())
def test_what_is_no_renderer_is_refused(mine: Written, name: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_renderer(find_model_folder("tiny"), mine(name))
    assert told in str(caught.value)


def evaluate(*words: str) -> tuple[int, str]:
    small = ["--tasks", "2", "limits.reply_tokens=8", "rollout.redraws=0"]
    done = CliRunner().invoke(main, ["eval", "shop", "--agent", "tiny", *small, *words])
    return done.exit_code, done.stderr


@pytest.mark.parametrize(
    ("name", "told"),
    {
        "Text": "start returned an object of type str, not a list of token ids",
        "Bug": "AttributeError: 'list' object has no attribute 'first' (in start, mine.py, line 46)",
        "Mute": "parse returned an object of type str, not a Reply",
    }.items(),
)
def test_a_mistake_is_raised_at_once_and_is_no_failed_conversation(
    mine: Written, name: str, told: str
) -> None:
    code, error = evaluate(f"agent.renderer={mine(name)}", "run.name=run")
    assert code == 2
    assert told in error.splitlines()[-1]
    assert f"renderer {name} (mine.py, line " in error
    assert not [*Path().glob("runs/run/trajectories/*")]


def test_an_agent_in_this_process_speaks_by_it(mine: Written) -> None:
    code, error = evaluate(f"agent.renderer={mine('Shouting')}", "run.name=run")
    assert code == 0, error
    held = [item for file in find_files(Path("runs/run")) for item in read_trajectories(file)]
    listen = load_renderer(find_model_folder("tiny"))[1].vocabulary.encode([" LISTEN"])
    first = [next(turn.tokens for turn in item.turns if turn.tokens is not None) for item in held]
    assert [list(tokens.prompt[: len(listen)]) for tokens in first] == [listen, listen]
    recorded = json.loads(Path("runs/run/config.json").read_text(encoding="utf-8"))
    assert recorded["agent"]["renderer"] == "mine.py:Shouting"


def test_a_folder_does_not_run_the_renderer_that_it_names(mine: Written, tmp_path: Path) -> None:
    learner = load_learner(LearnerSettings(renderer=mine("Shouting"), device="cpu"))
    folder = tmp_path / "folder"
    shutil.copytree(find_model_folder("tiny"), folder)
    save_renderer(folder, learner.tokenizer, learner.renderer)
    learner.engine.close()
    assert json.loads((folder / "renderer.json").read_text(encoding="utf-8")) == {
        "renderer": "mine.py:Shouting"
    }
    with pytest.raises(ConfigError, match=r"would run .*mine\.py: add learner\.renderer=mine\.py:Shouting"):
        load_renderer(str(folder))
    code, error = evaluate("--user", str(folder))
    assert code == 2
    assert "add user.renderer=mine.py:Shouting to allow it" in error
    _, renderer = load_renderer(str(folder), mine("Shouting"))
    assert renderer.name == "mine.py:Shouting"
    _, renderer = load_renderer(str(folder), "brief")
    assert isinstance(renderer, BriefRenderer)


def test_a_misspelt_name_is_refused_with_the_settings() -> None:
    with pytest.raises(ConfigError, match="did you mean hermes"):
        load_config(TrainConfig, None, ["learner.renderer=hermse"])
    assert load_config(TrainConfig).learner.renderer is None


def test_a_vocabulary_is_public() -> None:
    _, renderer = load_renderer(find_model_folder("tiny"))
    assert isinstance(renderer.vocabulary, Vocabulary)
    assert Tool is not None
