"""A strict endpoint that serves a store."""

from collections.abc import Iterator

import pytest
from store import KEY, Store


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    with Store() as running:
        yield running
