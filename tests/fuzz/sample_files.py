"""Small made-up files of every kind that is read: what the fuzzer spoils, one file at a time."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

Files = Mapping[str, str]


def to_lines(*rows: Any) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


# -- TAU-bench ---------------------------------------------------------------------------------------------

_ORDER = {
    "order_id": "#W1",
    "user_id": "mira",
    "status": "pending",
    "items": [{"name": "Lamp", "product_id": "P1", "item_id": "I1", "price": 12.5, "options": {}}],
    "payment_history": [{"transaction_type": "payment", "amount": 12.5, "payment_method_id": "card"}],
}
_USER = {"name": {"first_name": "Mira", "last_name": "Tolen"}, "payment_methods": {}, "orders": ["#W1"]}
_TABLES = {
    "data/orders.json": json.dumps({"#W1": _ORDER}),
    "data/products.json": json.dumps({"P1": {"name": "Lamp", "variants": {"I1": {"price": 12.5}}}}),
    "data/users.json": json.dumps({"mira": _USER}),
}
_TOOL = {
    "type": "function",
    "function": {
        "name": "cancel_pending_order",
        "description": "Cancel it.",
        "parameters": {"type": "object", "properties": {"order_id": {"type": "string"}}},
    },
}
_TAU1_TASK = {
    "user_id": "mira",
    "instruction": "You are Mira. Cancel the lamp.",
    "actions": [
        {"name": "cancel_pending_order", "kwargs": {"order_id": "#W1", "reason": "no longer needed"}}
    ],
    "outputs": ["12.5"],
}
TAU1_JSON: Files = {
    **{f"retail/{name}": text for name, text in _TABLES.items()},
    "retail/wiki.md": "# Retail\nBe kind.\n",
    "retail/tasks_test.json": json.dumps([_TAU1_TASK, {**_TAU1_TASK, "actions": [], "outputs": []}]),
    "retail/tools_info.json": json.dumps([_TOOL]),
    "episodes.jsonl": to_lines(
        {
            "id": "e-1",
            "task": _TAU1_TASK,
            "messages": [
                {"role": "user", "content": "Hi"},
                {
                    "role": "assistant",
                    "tool_call": {"name": "cancel_pending_order", "arguments": {"order_id": "#W1"}},
                },
                {"role": "tool", "content": "cancelled"},
                {"role": "assistant", "content": "It was 12.5."},
            ],
            "done": True,
        }
    ),
}
_TAU1_CODE = """\
from tau_bench.types import Action, Task

TASKS_TEST = [
    Task(annotator="0", user_id="mira", instruction="Cancel the lamp.",
         actions=[Action(name="cancel_pending_order", kwargs={"order_id": "#W1", "count": -1})],
         outputs=["12.5"]),
    Task(user_id="mira", instruction="Say hello.", actions=[], outputs=[]),
]
"""
_TAU1_TOOL = f"""\
class Cancel(Tool):
    @staticmethod
    def invoke(data, order_id):
        raise SystemExit

    @staticmethod
    def get_info():
        return {_TOOL!r}
"""
_TAU1_USER = """\
class LLMUserSimulationEnv:
    def build_system_prompt(self, instruction):
        return f"You are a user.{instruction}Rules: be brief."
"""
TAU1_CODE: Files = {
    **{f"envs/retail/{name}": text for name, text in _TABLES.items()},
    "envs/retail/wiki.md": "# Retail\nBe kind.\n",
    "envs/retail/tasks_test.py": _TAU1_CODE,
    "envs/retail/tools/__init__.py": "from .cancel import Cancel\nALL_TOOLS = [Cancel]\n",
    "envs/retail/tools/cancel.py": _TAU1_TOOL,
    "envs/user.py": _TAU1_USER,
    "pyproject.toml": '[project]\nversion = "1"\n',
}

# -- TAU2 --------------------------------------------------------------------------------------------------

_TAU2_TASK = {
    "id": "[kind]make",
    "user_scenario": {
        "persona": "Short.",
        "instructions": {"domain": "mock", "reason_for_call": "A task.", "task_instructions": "Ask."},
    },
    "initial_state": {
        "initialization_data": {
            "agent_data": {"tasks": {"t2": {"task_id": "t2", "title": "b", "status": "pending"}}}
        },
        "initialization_actions": [],
        "message_history": [{"role": "user", "content": "Hello"}],
    },
    "evaluation_criteria": {
        "actions": [
            {
                "action_id": "a",
                "name": "create_task",
                "arguments": {"user_id": "u1", "title": "x"},
                "compare_args": None,
            }
        ],
        "env_assertions": [],
        "communicate_info": ["done"],
        "nl_assertions": ["The agent is kind."],
        "reward_basis": ["DB", "COMMUNICATE"],
    },
    "ticket": "Make a task.",
    "user_tools": [],
}
_TAU2_PLAIN = {"id": "2", "user_scenario": {"instructions": "Say hello."}, "evaluation_criteria": None}
_TAU2_SCHEMA = {
    "mock": {
        "agent_system_prompt": "Rules: # Mock\nBe kind.\n",
        "policy": "# Mock\nBe kind.\n",
        "agent_tools": [{"function": {"name": "create_task", "description": "Make.", "parameters": {}}}],
        "user_tools": [],
    }
}
TAU2: Files = {
    "domains/mock/db.json": json.dumps(
        {
            "tasks": {"t1": {"task_id": "t1", "title": "a", "status": "pending"}},
            "users": {"u1": {"user_id": "u1", "name": "Ada", "tasks": ["t1"]}},
        }
    ),
    "domains/mock/user_db.json": json.dumps(
        {"notifications": {"n1": {"notification_id": "n1", "message": "m"}}}
    ),
    "domains/mock/policy.md": "# Mock\nBe kind.\n",
    "domains/mock/tasks.json": json.dumps([_TAU2_TASK, _TAU2_PLAIN]),
    "domains/mock/split_tasks.json": json.dumps({"base": ["[kind]make", "2"], "test": ["2"]}),
    "user_simulator/simulation_guidelines.md": "Play a user.\n",
    "user_simulator/simulation_guidelines_tools.md": "Play a user with tools.\n",
    "prompts_and_tools.json": json.dumps(_TAU2_SCHEMA),
    "results.json": json.dumps(
        {
            "info": {"agent_info": {"implementation": "llm_agent"}},
            "tasks": [_TAU2_PLAIN],
            "simulations": [
                {
                    "id": "s",
                    "task_id": "2",
                    "termination_reason": "user_stop",
                    "messages": [
                        {"role": "assistant", "content": "Hi"},
                        {
                            "role": "assistant",
                            "tool_calls": [{"id": "c", "name": "get_users", "arguments": {}}],
                        },
                        {
                            "role": "tool",
                            "id": "c",
                            "requestor": "assistant",
                            "content": "[]",
                            "error": False,
                        },
                    ],
                }
            ],
        }
    ),
}
_CODE_TELECOM = '''\
class TelecomTools:
    """Tools."""

    @is_tool(ToolType.READ)
    def get_customer_by_id(self, customer_id: str):
        """Find a customer.

        Args:
            customer_id: Whose.
        """


class Plan(BaseModel):
    """A plan."""

    name: str = Field(description="Its name")
'''
_CODE_AGENT = '''\
AGENT_INSTRUCTION = """Help.""".strip()
AGENT_SOLO_INSTRUCTION = "Call {stop_function_name}."
SYSTEM_PROMPT = """{agent_instruction} {domain_policy}""".strip()
SYSTEM_PROMPT_SOLO = "{agent_instruction} {domain_policy} {ticket}"
'''
TAU2_CODE: Files = {
    "data/tau2/domains/telecom/db.toml": (
        '[[plans]]\nplan_id = "P"\nname = "small"\ndata_limit_gb = 1\nprice_per_month = 9.5\n'
        "data_refueling_price_per_gb = 2\n"
    ),
    "data/tau2/domains/telecom/user_db.toml": "[device]\n[surroundings]\n",
    "data/tau2/domains/telecom/main_policy.md": "Be kind.\n",
    "data/tau2/domains/telecom/tech_support_manual.md": "Look at the phone.\n",
    "data/tau2/domains/telecom/tasks.json": json.dumps([_TAU2_PLAIN]),
    "data/tau2/domains/telecom/split_tasks.json": json.dumps({"base": ["2"]}),
    "src/tau2/agent/llm_agent.py": _CODE_AGENT,
    "src/tau2/domains/telecom/tools.py": _CODE_TELECOM,
}

# -- BFCL --------------------------------------------------------------------------------------------------

_LAMPS = """\
class TicketAPI:
    def __init__(self):
        self.lamps = {}

    def _load_scenario(self, scenario, long_context=False):
        self.lamps = scenario.get("lamps", {})

    def switch(self, name, on=True):
        self.lamps[name] = on
        return {"name": name, "on": on}

    def count(self):
        return len(self.lamps)
"""
BFCL_CODE = {"eval_checker/multi_turn_eval/func_source_code/ticket_api.py": _LAMPS}
"""Code of the package, which is trusted and not spoilt."""
_BFCL_ENTRY = {
    "id": "multi_turn_miss_func_0",
    "question": [[{"role": "user", "content": "Light the hall."}], [], [{"role": "user", "content": "Hm."}]],
    "initial_config": {"TicketAPI": {"lamps": {"hall": False}}},
    "involved_classes": ["TicketAPI"],
    "missed_function": {"1": ["count"]},
    "excluded_function": [],
}
_BFCL_DESCRIBED = [
    {
        "name": name,
        "description": name,
        "parameters": {"type": "dict", "properties": {"name": {"type": "str"}}},
    }
    for name in ("switch", "count")
]
BFCL: Files = {
    "bfcl_eval/data/BFCL_v4_multi_turn_base.json": "\n",
    "bfcl_eval/data/BFCL_v4_multi_turn_miss_func.json": to_lines(_BFCL_ENTRY),
    "bfcl_eval/data/possible_answer/BFCL_v4_multi_turn_miss_func.json": to_lines(
        {"id": _BFCL_ENTRY["id"], "ground_truth": [["switch('hall', on=True)"], ["count()"], []]}
    ),
    "bfcl_eval/data/multi_turn_func_doc/ticket_api.json": to_lines(*_BFCL_DESCRIBED),
    "bfcl_eval/constants/default_prompts.py": '\nDEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_FC = "More."\n',
}

# -- ACEBench ----------------------------------------------------------------------------------------------

_ACE_STATE = [
    {"BaseApi": {"wifi": True, "logged_in": True}},
    {
        "MessageApi": {
            "inbox": {
                str(n): {"sender_id": "USR100", "receiver_id": "USR101", "message": "m"} for n in range(1, 7)
            }
        }
    },
    {
        "ReminderApi": {
            "reminder_list": {
                str(n): {
                    "reminder_id": n,
                    "title": "t",
                    "description": "d",
                    "time": "2024-07-15 08:00",
                    "notified": False,
                }
                for n in range(1, 4)
            }
        }
    },
]
_ACE_TASK = {
    "id": "agent_multi_step_0",
    "question": "Switch the Wi-Fi on.",
    "initial_config": {"BaseApi": {"wifi": False, "logged_in": True}},
    "function": [
        {
            "name": "turn_on_wifi",
            "description": "On.",
            "parameters": {"type": "dict", "properties": {}, "required": []},
        }
    ],
    "involved_classes": ["BaseApi", "MessageApi", "ReminderApi"],
}
_ACE_ANSWER = {"id": _ACE_TASK["id"], "ground_truth": _ACE_STATE, "mile_stone": ["[turn_on_wifi()]"]}
_ACE = "data_all/data_en"
ACE: Files = {
    f"{_ACE}/data_agent_multi_turn.json": "\n",
    f"{_ACE}/data_agent_multi_step.json": to_lines(_ACE_TASK),
    f"{_ACE}/possible_answer/data_agent_multi_turn.json": "\n",
    f"{_ACE}/possible_answer/data_agent_multi_step.json": to_lines(_ACE_ANSWER),
    "model_inference/prompt_en.py": 'BASE_PROMPT_EN = "Help."\nTRAVEL_PROMPT_EN = """Fly."""\n',
    "episodes.jsonl": to_lines(
        {"id": _ACE_TASK["id"], "steps": [{"call": "[turn_on_wifi()]", "result": [{"status": True}]}]}
    ),
}

# -- our own files -----------------------------------------------------------------------------------------

_TASK = {
    "id": "t1",
    "instructions": "Cancel it.",
    "setup": {"data": {"orders": {"W1": {"status": "open", "count": 1}}}},
    "expected": {"calls": [{"name": "cancel", "arguments": {"order": "W1"}}], "say": ["gone", ["a", "b"]]},
    "split": "test",
    "meta": {"family": "cancel", "level": 1},
}
_SCENARIO = {
    "summary": "A shop.",
    "tables": {
        "orders": {
            "description": "Orders.",
            "fields": {
                "status": {"type": "text", "choices": ["open", "gone"], "description": "How it stands."},
                "count": {"type": "integer", "optional": True},
            },
        }
    },
    "tools": [
        {
            "name": "cancel",
            "description": "Cancel.",
            "writes": True,
            "parameters": {"order": {"type": "text"}, "why": {"type": "texts", "optional": True}},
        }
    ],
}
OWN: Files = {
    "tasks.jsonl": to_lines(_TASK, {"id": "t2", "instructions": "Nothing.", "expected": {"nothing": True}}),
    "scenario.json": json.dumps(_SCENARIO),
    "policy.md": "Be kind.\n",
    "server.toml": 'command = ["run", "{folder}"]\ncall_seconds = 3.5\ntools = []\nenvironment = {A = "C"}\n',
    "personas.toml": '[tone]\ncurt = "You are curt."\n[chance.mild]\ntone = 0.5\n',
    "personas.jsonl": to_lines({"name": "curt", "text": "You are curt."}),
    "script.jsonl": to_lines("Hello", {"content": "", "tool_calls": [{"name": "f", "arguments": "{}"}]}),
}

_ENTRY = {"file": "eval", "at": 0, "bytes": 10, "id": "t/0", "task": "t", "end": "user_stop"}
_TRAJECTORY = {
    "id": "t/0",
    "task": {"id": "t", "domain": "shop", "instructions": ""},
    "turns": [{"side": "user", "message": {"role": "user", "content": "Hi"}}],
    "end": "user_stop",
    "reward": {"value": 1.0},
}
RUN: Files = {
    "run.json": json.dumps(
        {"kind": "eval", "domain": "shop", "seed": 0, "state": "finished", "marks": ["m"]}
    ),
    "metrics.jsonl": to_lines({"step": 1, "reward": 0.5}),
    "timings.jsonl": to_lines(
        {"id": "1/t/0", "seconds": {"agent": 1.0, "user": 0.5}, "turns": [1.0, 0.5]},
        {"step": 1, "update": 2.0},
        {"wall": 3.0},
    ),
    "index.jsonl": to_lines(_ENTRY),
    "decisions.jsonl": to_lines({"id": "t/0", "accepted": True}),
    "ledger.jsonl": to_lines({"role": "agent", "model": "m", "prompt": 3, "completion": 1}),
    "recordings/user.jsonl": to_lines(
        {"key": "abc", "content": "hello", "usage": {"prompt": 3, "completion": 1}}
    ),
    "verdicts.jsonl": to_lines({"id": "t/0", "stage": "review", "accepted": True, "scores": {"user": 3}}),
    "trajectories/eval.jsonl": to_lines(_TRAJECTORY),
}
MESSAGES = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": [{"type": "text", "text": "Cancel it."}]},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}],
    },
    {"role": "tool", "tool_call_id": "c", "content": "done"},
    {"role": "assistant", "content": "It is done."},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]

SETS: dict[str, Files] = {
    "tau1-json": TAU1_JSON,
    "tau1-code": TAU1_CODE,
    "tau2": TAU2,
    "tau2-code": TAU2_CODE,
    "bfcl": BFCL,
    "ace": ACE,
    "own": OWN,
    "run": RUN,
}
