"""Export a run or one conversation as a single HTML file: the same page with its data embedded.

Its content security policy forbids loading anything else.
"""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from typing import Any
from urllib.parse import quote

from trialogue.digests import refuse_injured
from trialogue.durable import write
from trialogue.errors import RunError
from trialogue.records import Entry
from trialogue.view.api import Answers, to_row
from trialogue.view.run_reader import RunRecords
from trialogue.view.server import read_page


def write_export(run: Path, target: Path, identity: str | None = None, *, most: int) -> dict[str, Any]:
    """Write the file and return what it contains. With more than `most` conversations, whole groups are left
    out."""
    answers = Answers(run)
    names = list(answers.find())
    if len(names) != 1:
        raise RunError(f"{run} is not a run directory; an export needs exactly one run")
    name = names[0]
    records = answers.open(name)
    records.refresh()
    records.wait()
    entries = choose_entries(records, identity, most)
    start = f"#/run/{quote(name, safe='')}" + (f"/{quote(identity, safe='')}" if identity else "")
    try:
        conversations = {entry.id: answers.conversation(name, entry.id, {}) for entry in entries}
    except RunError:
        refuse_injured(records.path)  # names the file and the line
        raise
    for conversation in conversations.values():
        del conversation["prompts"]
    data = {
        "start": start,
        "run": answers.run(name),
        "rows": [to_row(entry, records) for entry in entries],
        "conversations": conversations,
        "tokens": {entry.id: answers.tokens(name, entry.id) for entry in entries},
        "prompts": records.read_json("prompts.json"),
    }
    write(target, embed(data))
    return {
        "file": str(target),
        "conversations": len(entries),
        "of": records.count(),
        "injuries": records.injuries,
    }


def choose_entries(records: RunRecords, identity: str | None, most: int) -> list[Entry]:
    """One conversation and its siblings, or whole groups spread evenly over the run."""
    if identity is not None:
        entry = records.find(identity)
        if entry is None:
            raise RunError(f"{records.path} has no conversation '{identity}'")
        return records.siblings(entry)
    groups = list(records.groups().values())
    chosen, stride = groups, 1.0
    while len(chosen) > 1 and sum(map(len, chosen)) > most:
        stride *= 1.1
        chosen = [groups[int(number * stride)] for number in range(max(1, int(len(groups) / stride)))]
    return [entry for group in reversed(chosen) for entry in group]


def embed(data: dict[str, Any]) -> str:
    """The page as one file with style, script and data inside."""
    files = {name: content.decode() for name, content in read_page().items()}
    script, style = files["app.js"], files["style.css"]
    policy = (
        f"default-src 'none'; script-src {to_source_hash(script)}; style-src {to_source_hash(style)}; "
        "img-src data:"
    )
    # Escape '<' in the JSON so that no text can close the script element around it.
    answers = json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    page = files["page.html"]
    page = page.replace(
        '<meta charset="utf-8">',
        f'<meta charset="utf-8">\n<meta http-equiv="Content-Security-Policy" content="{policy}">',
    )
    icon = base64.b64encode(files["mark.svg"].encode()).decode()
    page = page.replace('href="mark.svg"', f'href="data:image/svg+xml;base64,{icon}"')
    page = page.replace('<link rel="stylesheet" href="style.css">', f"<style>{style}</style>")
    page = page.replace('<script type="module" src="app.js"></script>', "")
    ending = (
        f'<script type="application/json" id="baked">{answers}</script>\n'
        f'<script type="module">{script}</script>\n</body>'
    )
    return page.replace("</body>", ending)


def to_source_hash(text: str) -> str:
    """The hash by which a content security policy allows an inline script or style."""
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"
