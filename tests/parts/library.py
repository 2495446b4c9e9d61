"""The models that draft and play a small library, scripted: drafter, tools, agent, user, judge.

Members extend their loans, unless somebody else waits for the book. The drafter is often wrong at first.
"""

from __future__ import annotations

import json
import re
from typing import Any

from endpoint import Answer, Endpoint, Script, completion, to_call

USAGE = (100, 10)

TABLES = {
    "summary": "the desk of a public library where members extend their loans",
    "tables": {
        "members": {
            "description": "who may borrow",
            "fields": {"member_id": {"type": "text"}, "name": {"type": "text"}},
        },
        "loans": {
            "description": "borrowed books",
            "fields": {
                "loan_id": {"type": "text"},
                "member_id": {"type": "text"},
                "title": {"type": "text"},
                "due": {"type": "text", "description": "YYYY-MM-DD"},
                "state": {"type": "text", "choices": ["open", "extended", "returned"]},
                "awaited": {"type": "boolean", "description": "somebody else waits for it"},
            },
        },
    },
}
TOOLS = [
    {
        "name": "get_member",
        "description": "Look a member up.",
        "parameters": {"member_id": {"type": "text", "description": "such as M12"}},
    },
    {
        "name": "list_loans",
        "description": "List the loans of a member.",
        "parameters": {"member_id": {"type": "text"}},
    },
    {
        "name": "extend_loan",
        "description": "Extend a loan to a new date.",
        "writes": True,
        "parameters": {"loan_id": {"type": "text"}, "due": {"type": "text", "description": "YYYY-MM-DD"}},
    },
]
POLICY = (
    "# The library's desk\n\nAsk for the member number first. Before each change say what you do and get "
    "an explicit yes. A loan that somebody else waits for cannot be extended.\n"
)


def make_task(number: int) -> dict[str, Any]:
    member, loan, awaited = f"M{100 + number}", f"L{500 + number}", number % 3 == 0
    due = f"2026-12-{10 + number:02d}"
    title = f"{('Ivory', 'Copper', 'Winter', 'Silent', 'Amber', 'Distant')[number % 6]} Harbour {number}"
    loans = {
        loan: {
            "loan_id": loan,
            "member_id": member,
            "title": title,
            "due": "2026-11-20",
            "state": "open",
            "awaited": awaited,
        },
        "L900": {
            "loan_id": "L900",
            "member_id": "M900",
            "title": "Other",
            "due": "2026-11-01",
            "state": "open",
            "awaited": False,
        },
    }
    wish = f"Your member number is {member}. You want to keep the book {title} until {due}."
    done = {"loans": {loan: {"due": due, "state": "extended"}}}
    return {
        "wish": wish,
        "database": {"members": {member: {"member_id": member, "name": f"Ada Nr{number}"}}, "loans": loans},
        "changes": {} if awaited else done,
        "say": [["cannot", "not possible"]] if awaited else [],
        "family": "refuse" if awaited else "extend",
    }


# -- the parts ---------------------------------------------------------------------------------------------


def play_drafter(request: dict[str, Any], asked: int) -> str:
    """Drafts that are wrong at first: no JSON, an unknown type, no tool that writes, a wrong database."""
    prompt = request["messages"][1]["content"]
    tries = (len(request["messages"]) - 2) // 2
    if "Design the database" in prompt:
        broken = json.loads(json.dumps(TABLES))
        broken["tables"]["loans"]["fields"]["due"]["type"] = "date"
        return ["Gladly! Here is a library.", json.dumps(broken), f"```json\n{json.dumps(TABLES)}\n```"][
            min(tries, 2)
        ]
    if "Design 4 to 12 tools" in prompt:
        return json.dumps({"tools": TOOLS[:2] if tries == 0 else TOOLS})
    if "Write the policy" in prompt:
        return json.dumps({"policy": POLICY})
    number = int(re.search(r"(?:task|wish) number (\d+)", prompt)[1])  # type: ignore[index]
    draft = make_task(number)
    if number == 2 and tries == 0:
        draft["database"]["loans"]["L900"]["state"] = "burnt"
    return json.dumps(draft)


def play_tools(request: dict[str, Any], asked: int) -> str:
    """Answers from the database it is shown; its first write of each conversation is in a wrong shape."""
    prompt = request["messages"][1]["content"]
    database = json.loads(prompt.split("# Database\n")[1].split("\n\n# Tool")[0])
    name, _, given = prompt.split("# Call\n")[1].partition(" ")
    arguments = json.loads(given)
    if name == "get_member":
        found = database["members"].get(arguments["member_id"])
        return json.dumps({"result": found} if found else {"error": f"no member {arguments['member_id']}"})
    if name == "list_loans":
        loans = [loan for loan in database["loans"].values() if loan["member_id"] == arguments["member_id"]]
        return json.dumps({"result": loans, "changes": {}})
    changes = {"loans": {arguments["loan_id"]: {"due": arguments["due"], "state": "extended"}}}
    if len(request["messages"]) == 2:
        changes["loans"][arguments["loan_id"]]["state"] = "prolonged"
    return json.dumps({"result": {**arguments, "state": "extended"}, "changes": changes})


def play_agent(request: dict[str, Any], asked: int) -> str | tuple[str, dict[str, Any]]:
    messages = request["messages"]
    last = messages[-1]
    said = " ".join(message["content"] or "" for message in messages if message["role"] == "user")
    member, due = re.search(r"M\d+", said), re.findall(r"\d{4}-\d\d-\d\d", said)
    if last["role"] == "user":
        if "yes" in last["content"].lower():
            loans = json.loads([message for message in messages if message["role"] == "tool"][-1]["content"])
            return "extend_loan", {"loan_id": loans[0]["loan_id"], "due": due[-1]}
        return ("get_member", {"member_id": member[0]}) if member else "Your member number, please?"
    result = json.loads(last["content"])
    if isinstance(result, dict) and "name" in result:
        return "list_loans", {"member_id": result["member_id"]}
    if isinstance(result, list):
        loan = result[0]
        if loan["awaited"]:
            return f"I cannot extend {loan['title']} because somebody else waits for it. Anything else?"
        return f"Shall I extend {loan['title']} to {due[-1]}?"
    return f"The loan has been extended to {result['due']}. Anything else?"


def play_user(request: dict[str, Any], asked: int) -> str:
    messages = request["messages"]
    scenario = messages[0]["content"].split("# Your scenario")[1]
    heard = messages[-1]["content"]
    if len([message for message in messages if message["role"] == "assistant"]) == 0:
        return re.sub(r".*You want to keep", "I would like to keep", scenario.strip(), flags=re.DOTALL)
    if "member number" in heard:
        return f"It is {re.search(r'M[0-9]+', scenario)[0]}."  # type: ignore[index]
    if "Shall I" in heard:
        return "Yes, please."
    return "Thank you, that is all. ###STOP###"


def play_judge(request: dict[str, Any], asked: int) -> str:
    """Finds fault with the fourth harbour, and babbles the first time it is asked."""
    if asked == 0:
        return "It looks fine to me."
    scores = dict.fromkeys(("faithful", "policy", "complete", "user", "natural"), 5)
    if "Harbour 4" in request["messages"][1]["content"]:
        return json.dumps({"scores": {**scores, "natural": 2}, "reasons": ["stiff"]})
    return json.dumps({"scores": scores, "reasons": []})


PLAYERS: dict[str, Any] = {
    "drafter": play_drafter,
    "tools": play_tools,
    "agent": play_agent,
    "user": play_user,
    "judge": play_judge,
}


def serve(**players: Script) -> Endpoint:
    """An endpoint whose models are these; others may stand in."""
    known = PLAYERS | players

    def answer(request: dict[str, Any], asked: int) -> Answer:
        said = known[request["model"]](request, asked)
        if isinstance(said, str):
            return completion(said, usage=USAGE)
        name, arguments = said
        call = to_call(name, json.dumps(arguments), f"call_{asked}")
        return completion(usage=USAGE, tool_calls=[call])

    return Endpoint(answer)
