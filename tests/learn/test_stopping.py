"""Ctrl-C in a real terminal: pressed once the step is finished and saved, pressed twice everything ends at
once. What is drawn meanwhile is looked at too."""

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from trialogue.config import TrainConfig
from trialogue.errors import RunError
from trialogue.learn import demo
from trialogue.learn.checkpoint import list_checkpoints

Configure = Callable[..., TrainConfig]
PLAY = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"
"""Runs a command in a terminal; what is written to it is typed there."""
SLOW = """
class Slow(ScriptedModel):
    async def reply(self, turns, tools):
        import asyncio

        await asyncio.sleep(SECONDS)
        return await super().reply(turns, tools)


"""


class Terminal:
    """A verb in a terminal of its own: a screen to look at and a keyboard."""

    def __init__(self, process: subprocess.Popen[bytes], screen: Path) -> None:
        self.process, self.screen = process, screen

    def read(self) -> str:
        """All that was ever drawn, without colours."""
        return re.sub(
            r"\x1b\[[0-9;?]*[A-Za-z]", "", self.screen.read_text(encoding="utf-8", errors="replace")
        )

    def wait_for(self, words: str, seconds: float = 100) -> None:
        until = time.monotonic() + seconds
        while words not in self.read():
            assert self.process.poll() is None, self.read()
            assert time.monotonic() < until, self.read()
            time.sleep(0.05)

    def press_control_c(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"\x03")
        self.process.stdin.flush()


@contextmanager
def open_terminal(folder: Path, *words: str) -> Generator[Terminal]:
    command = [sys.executable, "-c", PLAY, sys.executable, "-m", "trialogue", *words]
    screen = folder / "screen"
    with (
        screen.open("wb") as target,
        subprocess.Popen(
            command, cwd=folder, stdin=subprocess.PIPE, stdout=target, stderr=subprocess.STDOUT
        ) as process,
    ):
        try:
            yield Terminal(process, screen)
        finally:
            process.kill()


def write_slow(wall: str, folder: Path, seconds: float) -> str:
    """The same wall with a user who thinks before each reply."""
    text = Path(wall).read_text(encoding="utf-8")
    text = text.replace("else ScriptedModel(", "else Slow(").replace("def user(", f"{SLOW}def user(")
    (folder / "slow.py").write_text(text.replace("SECONDS", str(seconds)), encoding="utf-8")
    return str(folder / "slow.py")


@pytest.mark.kill
@pytest.mark.timeout(300)  # a process of its own takes its time to load everything on a busy machine
@pytest.mark.parametrize("presses", [1, 2])
def test_control_c(train_config: Configure, trained: Path, wall: str, tmp_path: Path, presses: int) -> None:
    domain = write_slow(wall, tmp_path, seconds=0.4 if presses == 1 else 60.0)
    config = train_config(learner__model=str(trained), training__steps=500, domain=domain)
    settings = to_settings(config.model_dump(mode="json", exclude_defaults=True))
    with open_terminal(tmp_path, "train", *settings) as terminal:
        terminal.wait_for("step 1/500" if presses == 1 else "rollout 0/12")
        terminal.press_control_c()
        terminal.wait_for("ctrl-c again to stop now")
        pressed = time.monotonic()
        if presses == 2:
            terminal.press_control_c()
        status = terminal.process.wait(60)
    shown = terminal.read()
    run = tmp_path / "runs" / "train"
    state = json.loads((run / "run.json").read_text(encoding="utf-8"))["state"]
    assert state == "stopped"
    assert "Traceback" not in shown
    assert f"trialogue train · {domain}"[:40] in shown
    assert "watch: trialogue view" in shown
    if presses == 1:
        assert status == 0, shown
        assert "stopped and saved; go on with: trialogue train --resume" in shown
        assert "s/step" in shown
        assert "eta" in shown
        assert len(list_checkpoints(run)) == 1
    else:
        assert status == 130, shown
        assert time.monotonic() - pressed < 30  # not the minute the user thinks
        assert (
            "stopped at once; go on from the last checkpoint, if any, with: trialogue train --resume" in shown
        )
        assert not list_checkpoints(run)


@pytest.mark.kill
@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_finishes_the_step(
    train_config: Configure, trained: Path, wall: str, tmp_path: Path, number: signal.Signals
) -> None:
    """With the output in a pipe, as of a scheduler; a line says what will happen."""
    domain = write_slow(wall, tmp_path, seconds=0.4)
    config = train_config(learner__model=str(trained), training__steps=500, domain=domain)
    words = ["train", *to_settings(config.model_dump(mode="json", exclude_defaults=True))]
    ignored = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
    with subprocess.Popen(
        [sys.executable, "-m", "trialogue", *words],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        signal.signal(signal.SIGHUP, ignored)
        assert process.stdout is not None
        lines: list[str] = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith("step=1/500 "):
                process.send_signal(number)
    shown = "".join(lines)
    assert process.returncode == 0, shown
    assert "\nstopping: the step in progress will be finished and saved, then the run ends; " in shown
    assert "stopped and saved; go on with: trialogue train --resume" in shown
    assert "Traceback" not in shown
    run = tmp_path / "runs" / "train"
    assert json.loads((run / "run.json").read_text(encoding="utf-8"))["state"] == "stopped"
    *_, last = re.findall(r"^step=(\d+)/500 ", shown, re.MULTILINE)
    assert [checkpoint.name for checkpoint in list_checkpoints(run)] == [f"step-{int(last):06d}"]


async def test_control_c_ends_a_demonstration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What would come next would be told of a model that is half taught."""
    monkeypatch.setattr(demo, "COLD_START", [*demo.COLD_START, "sft.count=60"])

    def press(step: int, metrics: dict[str, Any]) -> None:
        if step == 1:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(RunError, match="sft is stopped, so the course ends here"):
        await demo.demonstrate(tmp_path, 0, print, press)
    assert not (tmp_path / "rl").exists()
    assert not (tmp_path / "summary.json").exists()


def to_settings(values: dict[str, Any], before: str = "") -> list[str]:
    """Settings as words of a command line."""
    words: list[str] = []
    for key, value in values.items():
        if isinstance(value, dict):
            words += to_settings(cast("dict[str, Any]", value), f"{before}{key}.")
        else:
            words.append(f"{before}{key}={json.dumps(value)}")
    return words
