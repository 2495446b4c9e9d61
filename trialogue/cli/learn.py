"""What `train` and `sft` share on the command line: following the run, and telling what to do with it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from trialogue.cli.options import to_config, to_resume, with_trust
from trialogue.output import echo, echo_json


def learn(
    verb: Any,
    kind: Any,
    file: str | None,
    settings: tuple[str, ...],
    resume: str | None,
    as_json: bool,
    *,
    trust: bool,
) -> None:
    import asyncio
    from contextlib import closing

    from trialogue.run import read_about
    from trialogue.view.live import show_steps
    from trialogue.view.report import write_report
    from trialogue.view.trackers import Trackers

    if file is not None and "=" in file:
        settings, file = (file, *settings), None
    config = to_config(kind, None, settings, file, {}, resume, trust=trust)
    if int(os.environ.get("RANK", "0")) and "LOCAL_RANK" in os.environ:  # torchrun's others
        from trialogue.learn.checkpoint import follow

        follow(config.learner, int(verb.__name__ == "train" and config.loss.kl > 0), config.seed)
        return
    title = f"trialogue {verb.__name__} · {config.domain} · {config.learner.model}"
    steps = config.training.steps if verb.__name__ == "train" else None
    trackers = Trackers(config.run.track)
    run: list[Path] = []
    try:
        with closing(trackers), show_steps(as_json, title, steps) as shown:

            def started(path: Path) -> None:
                run.append(path)
                shown.started(path)
                trackers.started(path)

            def watch(step: int, metrics: dict[str, Any]) -> None:
                shown(step, metrics)
                trackers(step, metrics)

            resumed = Path(resume) if resume else None
            path = asyncio.run(verb(config, resume=resumed, watch=watch, started=started))
    except KeyboardInterrupt:
        if run:
            again = to_resume(verb.__name__, run[0], config)
            echo(f"stopped at once; go on from the last checkpoint, if any, with: {again}", err=True)
        raise
    write_report(path)
    about = read_about(path)
    state, marks = about["state"], about.get("marks", [])
    for mark in marks:
        echo(f"marked: {mark}", err=as_json)
    if (fault := shown.find_fault()) is not None:
        echo(fault, err=True)
    if resume and not shown.durations:
        echo(f"{path} had nothing left to do", err=True)
    if as_json:
        echo_json({"run": str(path), "state": state, **({"marks": marks} if marks else {})})
    elif state == "stopped":
        echo(f"stopped and saved; go on with: {to_resume(verb.__name__, path, config)}")
    else:
        echo(f"model: {path / 'model'}")
        if verb.__name__ == "sft" and config.sft.side == "user":
            echo(f"let it play: trialogue eval {config.domain} --user local:{path} user.prompt=card")
        else:
            levels = config.tasks.levels
            same = "" if levels == type(config.tasks)().levels else f' "tasks.levels={list(levels)}"'
            echo(f"evaluate it: trialogue eval {config.domain} --agent {path}{same}")
            echo(f"talk to it: trialogue chat {with_trust(path, config)}")
        echo(f"look at it: trialogue view {path}")
