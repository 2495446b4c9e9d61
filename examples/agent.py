"""An agent of your own: an async function of messages and tools, in the shapes of OpenAI's chat completions.

    trialogue eval examples/library --agent examples/agent.py:agent --user agenda --split all

It returns a text, or a message with tool calls. A language model behind any client can stand in its place.
"""

import json
import re
from typing import Any


async def agent(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str | dict[str, Any]:
    """Renews the first loan of the member, after a yes, whatever was asked for."""
    before, last = (message.get("content") or "" for message in messages[-2:])
    if messages[-1]["role"] == "user":
        if loan := re.search(r"Shall I renew loan (N\d{2})", before):
            return to_call("renew_loan", loan_id=loan[1])
        card = re.search(r"L-\d{3}", last)
        return to_call("list_loans", card=card[0]) if card else "What is your card number?"
    if last.startswith("Error"):
        return f"That is not possible. {last}"
    loan = re.search(r"N\d{2}", last)
    return f"Shall I renew loan {loan[0]}?" if loan else "Your loan has been renewed."


def to_call(name: str, **arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function}]}
