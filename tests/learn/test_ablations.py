"""The ablations replace parts of the method from outside: what they replace does what it says."""

from pathlib import Path

import pytest

from speed import ablations
from trialogue.config import Limits
from trialogue.engine.api import EngineSettings, Row
from trialogue.learn.losses import cross_entropy
from trialogue.score.reward import grade
from trialogue.talk.rollout import RolloutSettings, rollout
from trialogue.world.domain import Domain


async def test_without_the_mask_every_token_is_trained(blank: Path) -> None:
    row = Row([3, 4, 5, 6], [0, 0, 0, 1], [0.0, 0.0, 0.0, -1.0], [0.0, 0.0, 0.0, -0.5])
    engine = ablations.UnmaskedEngine.load(blank, EngineSettings(device="cpu"))
    known = await engine.forward([row])
    outputs = await engine.forward_backward([row], cross_entropy)
    assert outputs.logprobs[0] == pytest.approx(known[0][1:], abs=1e-5)
    engine.close()


@pytest.mark.parametrize(("domain", "kept", "failed"), [(ablations.apart, 0, 1), (ablations.scored, 1, 0)])
async def test_an_outage_fails_or_is_scored(
    monkeypatch: pytest.MonkeyPatch, domain: Domain, kept: int, failed: int
) -> None:
    monkeypatch.setattr(ablations, "OUTAGES", 1.0)
    assert domain.oracle is not None
    settings = RolloutSettings(limits=Limits(), redraws=0, grade=grade)
    tasks = domain.tasks("train", 1, 0, levels=(1,))
    groups = [item async for item in rollout(domain, tasks, domain.oracle, domain.user, settings)]  # type: ignore[arg-type]
    assert [(len(group.trajectories), len(group.failed)) for group in groups] == [(kept, failed)]
    assert [item.value for group in groups for item in group.trajectories] == [0.0] * kept
