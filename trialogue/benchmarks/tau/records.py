"""Records that several domains of TAU-bench have in common."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


class StrictRecord(BaseModel):
    """A record that refuses unknown fields."""

    model_config = ConfigDict(extra="forbid")


class UserName(BaseModel):
    first_name: str
    last_name: str


class CreditCard(BaseModel):
    source: Literal["credit_card"]
    id: str
    brand: str
    last_four: str
