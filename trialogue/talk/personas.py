"""What a user is like besides its scenario: traits as data, drawn by the conversation's seed."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random

from trialogue.errors import ConfigError
from trialogue.reading import explain, from_json

BUILT_IN = Path(__file__).parent / "personas.toml"


@dataclass(frozen=True, slots=True)
class Persona:
    """The manner of one user: a name to file it under and the words it is told."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Personas:
    """Groups of traits, of each of which at most one is drawn; or whole personas, one of which is."""

    groups: Mapping[str, Mapping[str, str]]
    chance: Mapping[str, float]

    def draw(self, seed: int) -> Persona | None:
        """The persona of a conversation; None where nothing was drawn."""
        random = Random(f"persona/{seed}")
        names: list[str] = []
        texts: list[str] = []
        for group, traits in self.groups.items():
            drawn, trait = random.random(), random.choice(sorted(traits))
            if drawn < self.chance.get(group, 0.0):
                names.append(f"{group}={trait}")
                texts.append(traits[trait])
        return Persona(" ".join(names), " ".join(texts)) if names else None


def read_personas(strength: str, file: str | None = None) -> Personas:
    """Traits from a TOML file of groups with their chances, or whole personas from JSON lines."""
    path = Path(file) if file is not None else BUILT_IN
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".jsonl":
            lines = [from_json(line) for line in text.split("\n") if line.strip()]
            groups = {"persona": {str(line["name"]): str(line["text"]) for line in lines}}
            chance = {"persona": 1.0}
        else:
            data = tomllib.loads(text)
            chance = {name: float(share) for name, share in data.pop("chance")[strength].items()}
            groups = {
                name: {key: str(value) for key, value in traits.items()} for name, traits in data.items()
            }
        if not all(groups.values()):
            raise ValueError("a group without traits")
    except Exception as error:
        raise ConfigError(
            f"cannot read the personas in {path}: {explain(error)}; write groups of named "
            f"texts and [chance.{strength}] in TOML, or JSON lines with name and text"
        ) from error
    return Personas(groups, chance)
