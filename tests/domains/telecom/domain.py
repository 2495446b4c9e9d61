"""The help desk of a mobile network: the agent changes the line, the customer holds the phone."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from trialogue import (
    Assertion,
    Call,
    Database,
    Domain,
    Expected,
    Phrases,
    Record,
    Rule,
    Setup,
    Slots,
    Table,
    Task,
    ToolError,
    generate_with,
    tool,
)
from trialogue import policy_rules as rules
from trialogue import policy_speech as speech


class Plan(Record):
    plan_id: str
    name: str
    gigabytes: int
    price: float
    roaming: bool


class Line(Record):
    phone_number: str
    owner: str
    postcode: str
    plan_id: str
    status: Literal["active", "suspended"] = "active"
    due: float = 0.0
    data_left: float
    roaming: bool = False


class Network(Database):
    """What the agent works with."""

    lines: Table[Line]
    plans: Table[Plan]

    @tool
    def find_line(self, phone_number: str) -> Line:
        """Find a line by its phone number."""
        return self.lines[phone_number]

    @tool
    def find_line_of(self, owner: str, postcode: str) -> Line:
        """Find a line by the name and the postcode of its owner."""
        for line in self.lines.where(owner=owner):
            if line.postcode == postcode:
                return line
        raise ToolError("no line has this owner and postcode")

    @tool
    def list_plans(self) -> list[Plan]:
        """List all plans."""
        return list(self.plans.values())

    @tool(writes=True)
    def add_data(self, phone_number: str, gigabytes: Literal[1, 2, 5]) -> Line:
        """Add a pack of data to a line."""
        line = self._active(phone_number)
        line.data_left = round(line.data_left + gigabytes, 1)
        return line

    @tool(writes=True)
    def change_plan(self, phone_number: str, plan_id: str) -> Line:
        """Change the plan of a line."""
        line = self._active(phone_number)
        line.plan_id = self.plans[plan_id].plan_id
        return line

    @tool(writes=True)
    def switch_on_roaming(self, phone_number: str) -> Line:
        """Switch on roaming for a line whose plan includes it."""
        line = self._active(phone_number)
        plan = self.plans[line.plan_id]
        if not plan.roaming:
            raise ToolError(f"the plan {plan.name} has no roaming")
        line.roaming = True
        return line

    @tool(writes=True)
    def reactivate_line(self, phone_number: str) -> Line:
        """Reactivate a suspended line on which nothing is due."""
        line = self.lines[phone_number]
        if line.due:
            raise ToolError(f"a bill of {line.due} is unpaid; the line stays suspended")
        line.status = "active"
        return line

    def _active(self, phone_number: str) -> Line:
        line = self.lines[phone_number]
        if line.status != "active":
            raise ToolError(f"line {phone_number} is suspended; only active lines can be changed")
        return line


class Phone(Database):
    """What the user holds."""

    number: str = ""
    is_abroad: bool = False
    airplane_mode: bool = False
    sim_seated: bool = True
    registered: bool = True
    mobile_data: bool = True
    roaming: bool = False
    signal: bool = True
    online: bool = True

    @tool
    def read_status_bar(self) -> str:
        """Read what the phone shows in its top line."""
        if self.airplane_mode:
            return "airplane mode is on"
        return "full signal" if self.signal else "no signal"

    @tool
    def open_web_page(self) -> str:
        """See whether a web page opens."""
        return "the page opens" if self.online else "the page does not open"

    @tool(writes=True)
    def set_airplane_mode(self, on: bool) -> str:
        """Switch airplane mode on or off."""
        self.airplane_mode = on
        return f"airplane mode is {'on' if on else 'off'}"

    @tool(writes=True)
    def set_mobile_data(self, on: bool) -> str:
        """Switch mobile data on or off."""
        self.mobile_data = on
        return f"mobile data is {'on' if on else 'off'}"

    @tool(writes=True)
    def set_roaming(self, on: bool) -> str:
        """Switch data roaming on or off."""
        self.roaming = on
        return f"data roaming is {'on' if on else 'off'}"

    @tool(writes=True)
    def reseat_sim(self) -> str:
        """Take the SIM card out and put it back."""
        self.sim_seated = True
        return "the SIM card is back in"

    @tool(writes=True)
    def restart_phone(self) -> str:
        """Restart the phone."""
        self.registered = True
        return "the phone has restarted"

    def has_signal(self) -> bool:
        return self.signal

    def is_online(self) -> bool:
        return self.online


def keep_in_step(network: Network, phone: Phone) -> None:
    line = network.lines.get(phone.number)
    if line is None:
        return
    if line.status == "suspended":
        phone.registered = False
    phone.signal = phone.registered and phone.sim_seated and not phone.airplane_mode
    at_home = not phone.is_abroad or (line.roaming and phone.roaming)
    phone.online = phone.signal and phone.mobile_data and at_home and line.data_left > 0


WORDINGS = json.loads((Path(__file__).parent / "phrases.json").read_text(encoding="utf-8"))
SAY = {name: Phrases(*texts) for name, texts in WORDINGS.items()}
"""What users say. Each list is shared out over the splits."""
CANNOT = ("cannot", "can't", "not possible", "unable", "not allowed")


@dataclass
class Wish:
    """What the user wants, and what is right."""

    agenda: dict[str, Any]
    story: str
    calls: list[Call] = field(default_factory=list)
    say: list[Any] = field(default_factory=list)
    assertions: list[Assertion] = field(default_factory=list)


def fact(slots: Slots, value: str | None, asked: str, form: str = "") -> dict[str, Any]:
    made: dict[str, Any] = {"value": value, "asked": asked}
    if form:
        made["form"] = form
    if value is not None:
        made["says"] = slots.phrases(SAY["tell"], v="{value}")
    return made


class Scene:
    """A line with its owner, the plans of the network, and the phone."""

    def __init__(self, slots: Slots, family: str) -> None:
        self.slots, self.family = slots, family
        maker = slots.word()
        plans = [
            {
                "plan_id": slots.draw("P###"),
                "name": f"{maker} {size}",
                "gigabytes": slots.number(2, 60),
                "price": slots.amount(5, 60),
                "roaming": bool(slots.number(0, 1)),
            }
            for size in slots.random.sample(["Basic", "Plus", "Max", "Travel", "Family"], slots.number(3, 4))
        ]
        self.plan, *self.others = plans
        self.plans = {str(each["plan_id"]): each for each in plans}
        self.line: dict[str, Any] = {
            "phone_number": slots.draw("07##-######"),
            "owner": slots.name(),
            "postcode": slots.draw("@@#-#@"),
            "plan_id": self.plan["plan_id"],
            "data_left": slots.number(3, 190) / 10,
        }
        self.phone: dict[str, Any] = {"number": self.line["phone_number"]}

    @property
    def names(self) -> str:
        return "|".join(str(each["name"]) for each in self.plans.values())

    def agent(self, name: str, **arguments: Any) -> Call:
        return Call(name=name, arguments={"phone_number": self.line["phone_number"], **arguments})

    def user(self, name: str, **arguments: Any) -> Call:
        return Call(name=name, arguments=arguments, side="user")

    def repair(self, says: Phrases, works: str, story: str, *calls: Call) -> Wish:
        """A wish that is fulfilled when the phone works again."""
        done = "signal|network" if works == "has_signal" else "internet|data|roaming|online"
        agenda = {"says": self.slots.phrases(says), "done": done}
        return Wish(agenda, story, list(calls), assertions=[Assertion(name=works, side="user")])


def airplane(scene: Scene) -> Wish:
    scene.phone["airplane_mode"] = True
    return scene.repair(
        SAY["no_signal"],
        "has_signal",
        "Your phone has no signal.",
        scene.user("read_status_bar"),
        scene.user("set_airplane_mode", on=False),
    )


def loose_sim(scene: Scene) -> Wish:
    scene.phone["sim_seated"] = False
    return scene.repair(
        SAY["no_signal"],
        "has_signal",
        "Your phone has no signal.",
        scene.user("read_status_bar"),
        scene.user("reseat_sim"),
    )


def mobile_data_off(scene: Scene) -> Wish:
    scene.phone["mobile_data"] = False
    return scene.repair(
        SAY["no_internet"], "is_online", "Your phone has no internet.", scene.user("set_mobile_data", on=True)
    )


def roaming(scene: Scene) -> Wish:
    scene.plan["roaming"] = True
    scene.phone["is_abroad"] = True
    story = "You are abroad and your phone has no internet."
    return scene.repair(
        SAY["abroad"],
        "is_online",
        story,
        Call(name="list_plans"),
        scene.agent("switch_on_roaming"),
        scene.user("set_roaming", on=True),
    )


def suspended(scene: Scene) -> Wish:
    scene.line["status"] = "suspended"
    scene.phone["registered"] = False
    story = "Your line was suspended. You have paid everything and want it back, with signal on your phone."
    wish = scene.repair(
        SAY["reactivate"], "has_signal", story, scene.agent("reactivate_line"), scene.user("restart_phone")
    )
    wish.agenda["done"] = "reactivat|signal|restart"
    return wish


def unpaid(scene: Scene) -> Wish:
    scene.line |= {"status": "suspended", "due": scene.slots.amount(10, 90)}
    scene.phone["registered"] = False
    agenda = {"says": scene.slots.phrases(SAY["reactivate"]), "done": "reactivat"}
    return Wish(
        agenda, "Your line is suspended and you want it back.", say=[CANNOT, ("unpaid", "due", "bill")]
    )


def no_roaming(scene: Scene) -> Wish:
    scene.plan["roaming"] = False
    scene.phone["is_abroad"] = True
    agenda = {"says": scene.slots.phrases(SAY["abroad"]), "done": "internet|roaming|online"}
    return Wish(
        agenda,
        "You are abroad and your phone has no internet.",
        [Call(name="list_plans")],
        say=[CANNOT, ("no roaming", "without roaming", "not include roaming")],
    )


def data(scene: Scene) -> Wish:
    amount = scene.slots.pick([1, 2, 5])
    facts = {
        "gigabytes": fact(
            scene.slots, str(amount), "how (much|many)|gigabytes", r"\b\d\b(?= (?:GB|gigabyte))"
        )
    }
    agenda = {
        "says": scene.slots.phrases(SAY["data"], n=amount),
        "done": "data|GB|gigabyte|added",
        "facts": facts,
    }
    return Wish(agenda, f"You want {amount} GB of data added.", [scene.agent("add_data", gigabytes=amount)])


def plan(scene: Scene) -> Wish:
    chosen = scene.slots.pick(scene.others)
    name = chosen["name"]
    facts = {"plan": fact(scene.slots, name, "which plan|plan (do you|would you)", scene.names)}
    agenda = {"says": scene.slots.phrases(SAY["plan"], plan=name), "done": "plan", "facts": facts}
    return Wish(
        agenda,
        f"You want to change to the plan {name}.",
        [scene.agent("change_plan", plan_id=chosen["plan_id"])],
    )


def change_of_mind(scene: Scene) -> Wish:
    first, second = plan(scene), plan(scene)
    name = second.agenda["facts"]["plan"]["value"]
    second.agenda["says"] = scene.slots.phrases(SAY["changed"], plan=name)
    first.agenda["instead"] = second.agenda
    return Wish(
        first.agenda, f"{first.story} When asked for a yes, you decide for {name} instead.", second.calls
    )


def data_left(scene: Scene) -> Wish:
    agenda = {"says": scene.slots.phrases(SAY["left"]), "answer": r"\d+\.\d"}
    return Wish(agenda, "You ask how much data you have left.", say=[str(scene.line["data_left"])])


def price(scene: Scene) -> Wish:
    chosen = scene.slots.pick(scene.others)
    facts = {"plan": fact(scene.slots, chosen["name"], "which plan", scene.names)}
    agenda = {
        "says": scene.slots.phrases(SAY["price"], plan=chosen["name"]),
        "answer": r"\d+\.\d",
        "facts": facts,
    }
    return Wish(agenda, f"You ask what the plan {chosen['name']} costs.", say=[str(chosen["price"])])


FAMILIES: dict[str, tuple[int, list[Callable[[Scene], Wish]]]] = {
    "question": (1, [data_left, price]),
    "data": (1, [data]),
    "no_signal": (1, [airplane, loose_sim]),
    "plan": (2, [plan]),
    "no_internet": (2, [mobile_data_off]),
    "roaming": (2, [roaming]),
    "forbidden": (2, [unpaid, no_roaming]),
    "suspended": (3, [suspended]),
    "change_of_mind": (3, [change_of_mind]),
    "forgetful": (3, [data, plan, airplane, mobile_data_off]),
    "two_wishes": (3, []),
}
PAIRS = [(data, airplane), (plan, mobile_data_off), (data_left, data), (loose_sim, price)]


def make_task(slots: Slots, family: str) -> Task:
    scene = Scene(slots, family)
    wants = slots.pick(PAIRS) if family == "two_wishes" else [slots.pick(FAMILIES[family][1])]
    wishes, line = [want(scene) for want in wants], scene.line
    number: str | None = None if family == "forgetful" else line["phone_number"]
    facts = {
        "phone_number": fact(slots, number, "number", r"\b07\d\d-\d{6}\b"),
        "owner": fact(slots, line["owner"], "name"),
        "postcode": fact(slots, line["postcode"], "postcode", r"\b[A-Z]{2}\d-\d[A-Z]\b"),
    }
    who = f"You are {line['owner']}, postcode {line['postcode']}."
    who += (
        f" The number of your line is {number}."
        if number
        else " You do not remember the number of your line."
    )
    return Task(
        id="",
        domain="telecom",
        instructions=" ".join([who, *(wish.story for wish in wishes)]),
        setup=Setup(
            data={"lines": {line["phone_number"]: line}, "plans": scene.plans}, user_data=scene.phone
        ),
        expected=Expected(
            calls=tuple(call for wish in wishes for call in wish.calls),
            say=tuple(line for wish in wishes for line in wish.say),
            assertions=tuple(assertion for wish in wishes for assertion in wish.assertions),
        ),
        meta={"agenda": {"facts": facts, "wishes": [wish.agenda for wish in wishes]}},
    )


caller = rules.Caller(tools=("find_line", "find_line_of"), owner="phone_number")
DONE = {
    "add_data": "data|gb|gigabyte|add",
    "change_plan": "plan",
    "switch_on_roaming": "roaming",
    "reactivate_line": "reactivat",
}
changes = rules.calls(*DONE)
RULES = (
    Rule("identity first", "Find the line by its phone number", rules.before(changes, caller.identified)),
    Rule("that line only", "Speak only about that line.", rules.never(caller.told_of_others)),
    Rule(
        "confirm",
        "Say exactly what you are about to do and wait for a clear yes.",
        rules.before(changes, rules.confirmed()),
    ),
    Rule(
        "look at plans",
        "List the plans before you change one.",
        rules.before(rules.calls("change_plan"), rules.looked_up("plan_id")),
    ),
    Rule(
        "answer from the records",
        "Never guess, never invent anything.",
        rules.never(speech.makes_up, speech.contradicts_itself),
    ),
    Rule("report truthfully", "Answer questions from the records.", speech.reports_truthfully(DONE)),
    Rule("be polite", "Be polite.", rules.never(speech.insults)),
    Rule(
        "one thing at a time",
        "Make one tool call at a time, or write to the customer, never both at once.",
        rules.one_call_at_a_time,
    ),
)
made = generate_with(make_task, {family: level for family, (level, _) in FAMILIES.items()})
domain = Domain.load(
    __file__,
    Network,
    tasks=made,
    endless=True,
    user_database=Phone.load({}),
    after_call=keep_in_step,
    policy_rules=RULES,
)
