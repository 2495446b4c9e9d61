"""The help desk of a mobile network: the agent changes the line, the customer holds the phone. The tasks are generated."""

from collections.abc import Callable
from dataclasses import dataclass, field
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
    plan: str
    gigabytes: int
    price: float
    roaming: bool


class Line(Record):
    number: str
    owner: str
    postcode: str
    plan: str
    status: Literal["active", "suspended"] = "active"
    due: float = 0.0
    data_left: float
    roaming: bool = False


class Network(Database):
    """What the agent works with."""

    lines: Table[Line]
    plans: Table[Plan]

    @tool
    def find_line(self, number: str) -> Line:
        """Find a line by its phone number."""
        return self.lines[number]

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
    def add_data(self, number: str, gigabytes: Literal[1, 2, 5]) -> Line:
        """Add a pack of data to a line."""
        line = self._active(number)
        line.data_left = round(line.data_left + gigabytes, 1)
        return line

    @tool(writes=True)
    def change_plan(self, number: str, plan: str) -> Line:
        """Change the plan of a line."""
        line = self._active(number)
        line.plan = self.plans[plan].plan
        return line

    @tool(writes=True)
    def switch_on_roaming(self, number: str) -> Line:
        """Switch on roaming for a line whose plan includes it."""
        line = self._active(number)
        if not self.plans[line.plan].roaming:
            raise ToolError(f"the plan {line.plan} has no roaming")
        line.roaming = True
        return line

    @tool(writes=True)
    def reactivate_line(self, number: str) -> Line:
        """Reactivate a suspended line on which nothing is due."""
        line = self.lines[number]
        if line.due:
            raise ToolError(f"a bill of {line.due} is unpaid; the line stays suspended")
        line.status = "active"
        return line

    def _active(self, number: str) -> Line:
        line = self.lines[number]
        if line.status != "active":
            raise ToolError(f"line {number} is suspended; only active lines can be changed")
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


# What users say. Every list is shared out over the splits.

NO_SIGNAL = Phrases(
    "My phone has no signal.",
    "I have no signal at all.",
    "There is no signal on my phone.",
    "I can't make calls, the phone shows no signal.",
    "The bars are gone, I get no signal.",
    "Since this morning there is no signal.",
    "My phone finds no network.",
    "Nobody can reach me, my phone is without signal.",
    "The signal of my phone is dead.",
    "I'm cut off, no signal anywhere.",
    "Please help, the phone has lost its signal.",
    "No bars on my phone, what now?",
)
NO_INTERNET = Phrases(
    "The internet does not work on my phone.",
    "No web page opens on my phone.",
    "I have no internet.",
    "My phone is not online.",
    "I can call, but there is no internet.",
    "Mobile internet stopped working for me.",
    "My apps get no data.",
    "I can't open any page on the phone.",
    "There is no internet connection on my phone.",
    "My phone does not load anything from the internet.",
    "The web is not working for me.",
    "Please fix my internet, nothing loads.",
)
ABROAD = Phrases(
    "I'm abroad and have no internet.",
    "Since I crossed the border my internet is gone.",
    "I am on holiday abroad, and no page opens.",
    "I'm travelling abroad and can't get online.",
    "At home it worked, but abroad I have no internet.",
    "I need internet abroad, it does not work.",
    "My phone is not online while I am abroad.",
    "I am out of the country and my internet stopped.",
    "Abroad my phone has no internet, please help.",
    "I'm in another country and nothing loads.",
    "I work abroad this week and have no data.",
    "My internet does not work in this foreign country.",
)
DATA = Phrases(
    "Please add {n} GB of data to my line.",
    "I need {n} GB more data.",
    "Can I have another {n} GB?",
    "I'd like a data pack of {n} GB.",
    "Put {n} GB on my line, please.",
    "Could you give me {n} GB of extra data?",
    "Book {n} GB of data for me.",
    "My data runs out, I want {n} GB more.",
    "I would like to buy {n} GB.",
    "Add a pack with {n} GB, please.",
    "Let me have {n} GB of data on top.",
    "{n} GB more for my line, please.",
)
PLAN = Phrases(
    "I want to change to the plan {plan}.",
    "Please move me to the plan {plan}.",
    "Can I have the plan {plan}?",
    "I'd like {plan} as my plan.",
    "Switch my line to the plan {plan}, please.",
    "Could you put me on {plan}? That's the plan I want.",
    "Give me the plan {plan}.",
    "My new plan should be {plan}.",
    "I have decided for another plan, {plan}.",
    "Change my plan to {plan}, please.",
    "Let me have {plan} instead of my present plan.",
    "The plan {plan} would suit me better, please change it.",
)
REACTIVATE = Phrases(
    "My line is suspended, please reactivate it.",
    "I've paid, so reactivate my line, please.",
    "Can you reactivate my line?",
    "Please lift the suspension, I want my line reactivated.",
    "You suspended my line. I want it back, reactivate it.",
    "I'd like my suspended line to work again.",
    "Why is my line suspended? Reactivate it, please.",
    "My line was suspended, could you reactivate it?",
    "Reactivate my line, it is suspended.",
    "I need my suspended line reactivated.",
    "Would you please reactivate the line you suspended?",
    "My number is suspended, please bring it back.",
)
LEFT = Phrases(
    "How much data do I have left?",
    "What is left of my data?",
    "Can you tell me how many gigabytes I have left?",
    "How much of my data is left?",
    "I'd like to know how much data is left on my line.",
    "Please look up my remaining data.",
    "How many GB can I still use?",
    "Tell me how much data I still have.",
    "Is there data left on my line, and how much?",
    "What data is left for this month?",
    "I want to know my remaining gigabytes.",
    "My remaining data, how much is it?",
)
PRICE = Phrases(
    "What does the plan {plan} cost?",
    "How much is the plan {plan}?",
    "Can you tell me the price of {plan}?",
    "What would I pay for the plan {plan}?",
    "I'd like to know the price of the plan {plan}.",
    "Please tell me what {plan} costs.",
    "What is the price of {plan}?",
    "How much do I pay a month for {plan}?",
    "The plan {plan}, how much is it?",
    "Please look up the price of the plan {plan}.",
    "Tell me the monthly price of {plan}.",
    "Is {plan} expensive? What does it cost?",
)
CHANGED = Phrases(
    "Wait, I'd rather have {plan}.",
    "Actually, make it {plan}.",
    "Hold on, {plan} would be better.",
    "No, sorry: {plan}, please.",
    "On second thought, I take {plan}.",
    "Hmm, I changed my mind. {plan} is what I want.",
    "Oh, then rather {plan}.",
    "Let us say {plan} instead.",
)
TELL = Phrases("It is {v}.", "{v}.", "It's {v}.", "That is {v}.", "That would be {v}.", "{v}, if I remember well.", "{v} it is.", "Sure: {v}.")

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
        made["says"] = slots.phrases(TELL, v="{value}")
    return made


class Scene:
    """A line with its owner, the plans of the network, and the phone."""

    def __init__(self, slots: Slots, family: str) -> None:
        self.slots, self.family = slots, family
        maker = slots.word()
        self.plans = {
            f"{maker} {size}": {
                "plan": f"{maker} {size}",
                "gigabytes": slots.number(2, 60),
                "price": slots.amount(5, 60),
                "roaming": bool(slots.number(0, 1)),
            }
            for size in slots.random.sample(["Basic", "Plus", "Max", "Travel", "Family"], slots.number(3, 4))
        }
        self.plan, *self.others = self.plans.values()
        self.line: dict[str, Any] = {
            "number": slots.draw("07##-######"),
            "owner": slots.name(),
            "postcode": slots.draw("@@#-#@"),
            "plan": self.plan["plan"],
            "data_left": slots.number(3, 190) / 10,
        }
        self.phone: dict[str, Any] = {"number": self.line["number"]}

    def agent(self, name: str, **arguments: Any) -> Call:
        return Call(name=name, arguments={"number": self.line["number"], **arguments})

    def user(self, name: str, **arguments: Any) -> Call:
        return Call(name=name, arguments=arguments, side="user")

    def repair(self, says: Phrases, works: str, story: str, *calls: Call) -> Wish:
        """A wish that is fulfilled when the phone works again."""
        done = "signal|network" if works == "has_signal" else "internet|data|roaming|online"
        agenda = {"says": self.slots.phrases(says), "done": done}
        return Wish(agenda, story, list(calls), assertions=[Assertion(name=works, side="user")])


def airplane(scene: Scene) -> Wish:
    scene.phone["airplane_mode"] = True
    return scene.repair(NO_SIGNAL, "has_signal", "Your phone has no signal.", scene.user("set_airplane_mode", on=False))


def loose_sim(scene: Scene) -> Wish:
    scene.phone["sim_seated"] = False
    return scene.repair(NO_SIGNAL, "has_signal", "Your phone has no signal.", scene.user("reseat_sim"))


def mobile_data_off(scene: Scene) -> Wish:
    scene.phone["mobile_data"] = False
    return scene.repair(NO_INTERNET, "is_online", "Your phone has no internet.", scene.user("set_mobile_data", on=True))


def roaming(scene: Scene) -> Wish:
    scene.plan["roaming"] = True
    scene.phone["is_abroad"] = True
    story = "You are abroad and your phone has no internet."
    return scene.repair(ABROAD, "is_online", story, scene.agent("switch_on_roaming"), scene.user("set_roaming", on=True))


def suspended(scene: Scene) -> Wish:
    scene.line["status"] = "suspended"
    scene.phone["registered"] = False
    story = "Your line was suspended. You have paid everything and want it back, with signal on your phone."
    wish = scene.repair(REACTIVATE, "has_signal", story, scene.agent("reactivate_line"), scene.user("restart_phone"))
    wish.agenda["done"] = "reactivat|signal|restart"
    return wish


def unpaid(scene: Scene) -> Wish:
    scene.line |= {"status": "suspended", "due": scene.slots.amount(10, 90)}
    scene.phone["registered"] = False
    agenda = {"says": scene.slots.phrases(REACTIVATE), "done": "reactivat"}
    return Wish(agenda, "Your line is suspended and you want it back.", say=[CANNOT, ("unpaid", "due", "bill")])


def no_roaming(scene: Scene) -> Wish:
    scene.plan["roaming"] = False
    scene.phone["is_abroad"] = True
    agenda = {"says": scene.slots.phrases(ABROAD), "done": "internet|roaming|online"}
    return Wish(agenda, "You are abroad and your phone has no internet.", say=[CANNOT, ("no roaming", "without roaming", "not include roaming")])


def data(scene: Scene) -> Wish:
    amount = scene.slots.pick([1, 2, 5])
    facts = {"data": fact(scene.slots, f"{amount} GB", "how (much|many)|gigabytes", r"\b\d+ (GB|gigabytes?)\b")}
    agenda = {"says": scene.slots.phrases(DATA, n=amount), "done": "data|GB|gigabyte|added", "facts": facts}
    return Wish(agenda, f"You want {amount} GB of data added.", [scene.agent("add_data", gigabytes=amount)])


def plan(scene: Scene) -> Wish:
    name = scene.slots.pick(scene.others)["plan"]
    facts = {"plan": fact(scene.slots, name, "which plan|plan (do you|would you)", "|".join(scene.plans))}
    agenda = {"says": scene.slots.phrases(PLAN, plan=name), "done": "plan", "facts": facts}
    return Wish(agenda, f"You want to change to the plan {name}.", [scene.agent("change_plan", plan=name)])


def change_of_mind(scene: Scene) -> Wish:
    first, second = plan(scene), plan(scene)
    name = second.calls[0].arguments["plan"]
    second.agenda["says"] = scene.slots.phrases(CHANGED, plan=name)
    first.agenda["instead"] = second.agenda
    return Wish(first.agenda, f"{first.story} When asked for a yes, you decide for {name} instead.", second.calls)


def data_left(scene: Scene) -> Wish:
    agenda = {"says": scene.slots.phrases(LEFT), "answer": r"\d+\.\d"}
    return Wish(agenda, "You ask how much data you have left.", say=[str(scene.line["data_left"])])


def price(scene: Scene) -> Wish:
    chosen = scene.slots.pick(scene.others)
    facts = {"plan": fact(scene.slots, chosen["plan"], "which plan", "|".join(scene.plans))}
    agenda = {"says": scene.slots.phrases(PRICE, plan=chosen["plan"]), "answer": r"\d+\.\d", "facts": facts}
    return Wish(agenda, f"You ask what the plan {chosen['plan']} costs.", say=[str(chosen["price"])])


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
    number = None if family == "forgetful" else line["number"]
    facts = {
        "number": fact(slots, number, "number", r"\b07\d\d-\d{6}\b"),
        "owner": fact(slots, line["owner"], "name"),
        "postcode": fact(slots, line["postcode"], "postcode", r"\b[A-Z]{2}\d-\d[A-Z]\b"),
    }
    who = f"You are {line['owner']}, postcode {line['postcode']}."
    who += f" The number of your line is {number}." if number else " You do not remember the number of your line."
    return Task(
        id="",
        domain="telecom",
        instructions=" ".join([who, *(wish.story for wish in wishes)]),
        setup=Setup(data={"lines": {line["number"]: line}, "plans": scene.plans}, user_data=scene.phone),
        expected=Expected(
            calls=tuple(call for wish in wishes for call in wish.calls),
            say=tuple(line for wish in wishes for line in wish.say),
            assertions=tuple(assertion for wish in wishes for assertion in wish.assertions),
        ),
        meta={"agenda": {"facts": facts, "wishes": [wish.agenda for wish in wishes]}},
    )


caller = rules.Caller(tools=("find_line", "find_line_of"), owner="number")
DONE = {"add_data": "data|gb|gigabyte|add", "change_plan": "plan", "switch_on_roaming": "roaming", "reactivate_line": "reactivat"}
changes = rules.calls(*DONE)
RULES = (
    Rule("identity first", "Find the line by its phone number", rules.before(changes, caller.identified)),
    Rule("that line only", "Speak only about that line.", rules.never(caller.told_of_others)),
    Rule("confirm", "Say exactly what you are about to do and wait for a clear yes.", rules.before(changes, rules.confirmed())),
    Rule("look at plans", "List the plans before you change one.", rules.before(rules.calls("change_plan"), rules.looked_up("plan"))),
    Rule("answer from the records", "Never guess, never invent anything.", rules.never(speech.makes_up, speech.contradicts_itself)),
    Rule("report truthfully", "Answer questions from the records.", speech.reports_truthfully(DONE)),
    Rule("be polite", "Be polite.", rules.never(speech.insults)),
    Rule("one thing at a time", "Make one tool call at a time, or write to the customer, never both at once.", rules.one_call_at_a_time),
)
made = generate_with(make_task, {family: level for family, (level, _) in FAMILIES.items()})
domain = Domain.load(
    __file__, Network, tasks=made, endless=True, user_database=Phone.load({}), after_call=keep_in_step, policy_rules=RULES
)
