"""A rule-based user for tasks without an agenda: it begins with the whole of its instructions."""

from __future__ import annotations

from collections.abc import Callable

from trialogue.talk.agenda import AgendaUser
from trialogue.talk.teacher.listener import derive_agenda
from trialogue.task import Task
from trialogue.world.domain import Domain


def make_reciting(domain: Domain) -> Callable[[Task, int], AgendaUser]:
    """The source of such users, each with the agenda that the teacher derives as well."""
    writes = [tool.name for tool in domain.database.tools.values() if tool.writes]

    def make(task: Task, seed: int) -> AgendaUser:
        agenda = derive_agenda(task, writes)
        phrases = agenda.phrases.model_copy(update={"opening": ("{wish}",)})
        return AgendaUser(agenda.model_copy(update={"phrases": phrases}), seed, domain.rules.stop_tokens[0])

    return make
