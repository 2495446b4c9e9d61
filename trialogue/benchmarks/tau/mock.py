"""TAU2 mock: a small domain for tests, with a list of tasks for the agent and an inbox for the user."""

from __future__ import annotations

from typing import Any, Literal, cast

from pydantic import BaseModel, ConfigDict

from trialogue.benchmarks.toolkit import Plain, Toolkit
from trialogue.reading import read_table
from trialogue.world.database import Table
from trialogue.world.tools import tool

TaskStatus = Literal["pending", "completed"]


class MockTask(BaseModel):
    task_id: str
    title: str
    description: str | None = None
    status: TaskStatus


class MockUser(BaseModel):
    user_id: str
    name: str
    tasks: list[str]


class Notification(BaseModel):
    model_config = ConfigDict(extra="forbid")

    notification_id: str
    message: str
    status: Literal["unread", "read"] = "unread"
    task_id: str | None = None


class MockTools(Toolkit):
    tasks: Table[Plain]
    users: Table[Plain]

    notes = read_table(__file__, "notes.toml")["mock"]
    shapes = {"tasks": MockTask, "users": MockUser}

    def _task(self, task_id: str) -> Plain:
        task = self.look("tasks", task_id)
        if task is None:
            raise ValueError(f"Task {task_id} not found")
        return task

    def _user(self, user_id: str) -> Plain:
        user = self.look("users", user_id)
        if user is None:
            raise ValueError(f"User {user_id} not found")
        return user

    @tool(writes=True)
    def create_task(self, user_id: str, title: str, description: str = cast("Any", None)) -> Plain:
        """Create a task for a user."""
        self._user(user_id)
        task_id = f"task_{len(self.tasks) + 1}"
        task = MockTask(task_id=task_id, title=title, description=description, status="pending").model_dump()
        self.lay("tasks", task_id, task)
        self.touch("users", user_id)["tasks"].append(task_id)
        return task

    @tool
    def get_users(self) -> list[Plain]:
        """List all users."""
        return [self.look("users", key) for key in self.users]

    @tool(writes=True)
    def update_task_status(self, task_id: str, status: TaskStatus) -> Plain:
        """Change the status of a task."""
        self._task(task_id)
        task = self.touch("tasks", task_id)
        task["status"] = status
        return task

    def assert_number_of_tasks(self, user_id: str, expected_number: int) -> bool:
        return len(self._user(user_id)["tasks"]) == expected_number

    def assert_task_status(self, task_id: str, expected_status: TaskStatus) -> bool:
        return self._task(task_id)["status"] == expected_status

    @tool
    def transfer_to_human_agents(self, summary: str) -> str:
        """Hand the user over to a human agent."""
        return "Transfer successful"


class MockUserTools(Toolkit):
    notifications: Table[Plain]

    notes = read_table(__file__, "notes.toml")["mock"]
    shapes = {"notifications": Notification}

    def _notification(self, notification_id: str) -> Plain:
        notification = self.look("notifications", notification_id)
        if notification is None:
            raise ValueError(f"Notification {notification_id} not found")
        return notification

    @tool
    def check_notifications(self) -> list[Plain]:
        """Look through the inbox."""
        return [self.look("notifications", key) for key in self.notifications]

    @tool(writes=True)
    def dismiss_notification(self, notification_id: str) -> str:
        """Mark a notification as read."""
        self._notification(notification_id)
        self.touch("notifications", notification_id)["status"] = "read"
        return f"Notification {notification_id} dismissed"

    def add_notification(self, notification_id: str, message: str, task_id: str | None = None) -> Plain:
        notification = Notification(notification_id=notification_id, message=message, task_id=task_id)
        self.lay("notifications", notification_id, notification.model_dump())
        return notification.model_dump()

    def assert_notification_status(self, notification_id: str, expected_status: str) -> bool:
        return self._notification(notification_id)["status"] == expected_status
