"""How plain English sentences of a conversation are understood: patterns for the free language of a model.

The rule-based user, the audit of users, the verification of corpora and the policy rules share them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator


def _any_of(*patterns: str) -> re.Pattern[str]:
    return re.compile("|".join(patterns), re.IGNORECASE)


# What an agent does with a sentence.
ASKS = _any_of(
    r"\?|^\W*(?:what|which)\b|\bplease (?!note|be |hold|wait|bear)",
    r"\b(?:i|we)(?:'ll| will)? (?:also |just )?need\b",
    r"\b(?:require|provide|share|give me|tell me|let me know|confirm|without your)\b",
)
PROPOSES = _any_of(
    r"\b(?:shall|should|may|can|could) i "
    r"(?!(?:please |also )*(?:have|get|ask|know|take|see|help|assist|do anything (?:else|more|further)\b))",
    r"\b(?:like|want|wish) me to\b",
    r"\bdo you (?:really |still )?(?:want|wish) to\b",
    r"\bgo ahead\b|\bproceed\b|\byes ?(?:/|or) ?no\b|\bare you (?:sure|happy|ok)",
    r"\b(?:is|are|does) (?:that|this|it|everything) (?:all )?(?:correct|right|ok|okay|fine|look|sound)",
)
CONFIRMS = _any_of(r"\bconfirm|\bapprov|\bagree\b", r"\b(?:ok|okay|correct|right)\s*\?")
OPEN = _any_of(r"^\W*(?:\w+\W+){0,3}?(?:which|what|where|when|why|who|how)\b")
YES_OR_NO = _any_of(r"^\W*(?:(?:so|and|ok|okay|then)\W+)*(?:is|are|was|were|did|do|does|have|has)\b.*\?")
ELSE = _any_of(
    r"\b(?:any|some)thing (?:else|more|further)\b", r"\b(?:other|further) (?:request|question|help|assist)"
)
REFUSES = _any_of(
    r"\bcan(?:not|'t| not)\b|\bunable\b|\bunfortunately\b",
    r"(?:\bnot|n't) (?:be )?(?:able|allowed|possible|eligible|permitted|something)\b",
    r"\b(?:must|have to) (?:decline|refuse)|\bagainst (?:our|the) (?:policy|rules)",
    r"\bno longer (?:possible|eligible)|\bonly\b.*\b(?:can|may) be\b",
)
EXCUSED = _any_of(r"\b(?:without|until|unless|before i|find|locate|verify|identify|undone?|revers\w+|once)\b")
REPORTS = _any_of(
    r"\b(?:has|have) (?:now |just |already |successfully )*been\b|\b(?:is|are) now\b|\ball set\b",
    r"\bdone\b|\bcompleted?\b|\bsuccessful|\btransferring\b|\b(?:is|are|was|were) \w+ed\b",
    r"\bi(?:'ve| have)? (?:now |just |also |already |successfully )*"
    r"(?!need|check|look|locat|verif|identif)\w+ed\b",
)
PARTS_OF_REPORTS = ("ed", "been", "now", "all ", "done", "complete", "ucce", "ferr")
"""A text in small letters without any of these reports nothing."""
BARE_REPORT = _any_of(
    r"^\W*(?:(?:it|that|this|everything|ok|okay)(?: is|'s|,)? )?(?:all )?(?:done|set|completed)\W*$"
)
SHORT_REPORT = _any_of(
    r"^\W*(?=\w)"
    r"(?!(?:\S+ ){0,3}?(?:no|not|none|nothing|never|be|being|get|gets|getting|if|once|until|when|\w+n't)\b)"
    r"(?:[\w'#-]+ ){0,3}(?P<participle>\w+ed)[.!\s]*$"
)
"""Up to three words and a participle: "Class booked." """
POSSIBLE = _any_of(r"\b(?:can|could|may|might|would|should|to) (?:only |still )?be\b|\bif\b")
OFFERS_HELP = _any_of(
    r"\bhow (?:can|may|could) i (?:help|assist)", r"\bwhat (?:can i do|would you like|do you (?:want|need))"
)
WAITS = _any_of(
    r"\b(?:one|a) (?:moment|minute|second)\b|\bhold on\b|\bbear with\b|\bplease (?:wait|hold)\b",
    r"\b(?:let me|i'll|i will|i am going to|i'm going to) (?:\w+ )?"
    r"(?:check|look|see|verify|find|process|start)\b",
    r"\b(?:checking|looking|working on|processing)\b",
)
QUESTION = _any_of(r"\?|\b(?:provide|share|give me|tell me|i need your)\b")


LONGEST_SENTENCE = 500
"""A longer one is read in pieces: a pattern may look through the rest of its text at each character."""


def split_sentences(text: str) -> list[str]:
    """Sentences and lines of a text, with plain apostrophes; long ones in pieces of bounded length."""
    sentences: list[str] = []
    for part in _BETWEEN.split(text.replace("’", "'")):
        sentence = part.strip()
        if len(sentence) > LONGEST_SENTENCE:
            sentences += _cut(sentence)
        elif sentence:
            sentences.append(sentence)
    return sentences


_BETWEEN = re.compile(r"\s(?:(?<=[.!?]\s)\s*|(?<=\n)\n*)")
"""The white space behind the end of a sentence, or the end of a line. It begins with a class of characters,
which makes the search for it fast."""


def _cut(sentence: str) -> Iterator[str]:
    """Pieces of a sentence, cut between words where there are some."""
    begin = 0
    while len(sentence) - begin > LONGEST_SENTENCE:
        end = sentence.rfind(" ", begin + 1, begin + LONGEST_SENTENCE)
        end = end if end > 0 else begin + LONGEST_SENTENCE
        yield sentence[begin:end]
        begin = end
    if sentence[begin:]:
        yield sentence[begin:]


# What a user does with a proposal.
YES = _any_of(
    r"\b(?:yes|yeah|yep|yup|sure|ok|okay|go ahead|do (?:it|that|so)|confirm(?:ed)?|correct|right|agreed?|"
    r"fine|absolutely|definitely|of course|certainly|sounds good|proceed|please)\b"
)
NO = _any_of(
    r"^\W*(?:no|nope|not|don't|do not|wait|stop|actually|hold on)\b|\bchanged my mind\b",
)


UNKNOWN = _any_of(
    r"\b(?:don't|do not|can't|cannot|didn't) (?:know|remember|recall|have|find)\b",
    r"\bno idea\b|\bforgot|\bnot sure\b|\bremember\b|\bunknown\b|\bno clue\b|\bslipped my mind\b",
)
TAKES_A_STAND = _any_of(
    r"\b(?:yes|yeah|yep|yup|sure|ok|okay|no|nope|not|go ahead|please do|do it|do that|do so|correct|right)\b",
    r"\b(?:exactly|wait|actually|instead|hold on|stop|changed my mind|rather|absolutely|of course)\b",
    r"\b(?:certainly|confirm\w*|agree\w*|fine|perfect|good|great|please|thanks?|proceed|n't)\b",
)


_COURTESY = _any_of(
    r"\b(?:thank\w*|thx|cheers|welcome|appreciate\w*|grateful|pleasure|(?:good)?bye|see you|take care)\b",
    r"\b(?:have|enjoy) (?:a|an|the|your) (?:\w+ ){0,2}(?:day|evening|night|one|time|week|weekend)\b",
    r"\byou (?:too|as well)\b|\bthat(?:'s| is| was|'ll be| will be) (?:all|it|everything)\b|\bno problem\b",
    r"^\W*(?:(?:oh|ok|okay|all right|alright|great|perfect|wonderful|excellent|awesome|good|nice|fine|sure"
    r"|that's|that is|sounds|all|very|so|is|helpful|kind|amazing|fantastic|got it|no|nothing|else)\b\W*)+$",
)
_WANTS = _any_of(
    r"\?|\d|@",
    r"\b(?:but|also|however|before|instead|need|want|like to|would like|wish|please|can you|could you)\b",
)


def is_courtesy(text: str) -> bool:
    """Whether a text of the user only thanks or takes leave: it wants, asks and tells nothing."""
    sentences = split_sentences(text)
    return bool(sentences) and all(
        _COURTESY.search(sentence) and not _WANTS.search(sentence) for sentence in sentences
    )


# What only an agent says: a user with these words has left its role.
_DEED = r"cancel|refund|update|change|process|return|exchange|transfer|replace|book|modif|send"
_DEEDS = r"cancell?ed|refunded|updated|changed|processed|returned|exchanged|transferred|replaced|booked|sent"
_THINGS = r"order|account|refund|request|payment|address|return|exchange|reservation|ticket|booking|item"
ROLE = _any_of(
    r"\bhow (?:can|may|could) i (?:help|assist)\b",
    r"\bi(?:'m| am|'d be| would be) (?:happy|glad|here|pleased) to (?:help|assist) (?:you|with)",
    r"\banything else i can (?:help|assist|do)\b",
    r"\bas an? (?:ai|assistant|language model)\b|\b(?:language model|virtual assistant|ai assistant)\b",
    rf"\bi(?:'ve| have)(?: just| now| already| successfully)* (?:{_DEEDS}) (?:your|the)\b",
    rf"\byour (?:\w+ ){{0,4}}?(?:{_THINGS})\b.*\b(?:has|have) (?:now |already |successfully )*been\b",
    r"\b(?:could|can|may) i (?:please |just )?(?:have|get|see) your\b",
    r"\b(?:could|can|would) you (?:please )?(?:provide|share|confirm|verify|give me) your\b",
    r"\bplease (?:provide|share|confirm|verify|enter|give me) your\b",
    rf"\b(?:shall|should) i (?:go ahead|proceed|{_DEED})",
    r"\bthank you for (?:contacting|calling|reaching out|choosing|your patience)\b",
    r"\blet me (?:check|look up|pull up|find) (?:that|your|the)\b.*\bfor you\b",
    r"\bi(?:'ll| will) (?:now )?(?:transfer|connect) you\b",
    r"^\W*(?:assistant|agent|representative|support|customer service)\s*:",
    r"</?tool_call>|\{\s*\"(?:name|tool|function)\"\s*:",
)


# What anybody does with words just said.
TAKING_BACK = frozenset(
    (
        "wait",
        "scratch",
        "strike",
        "thought",
        "thoughts",
        "correction",
        "mean",
        "rather",
        "misspoke",
        "actually",
    )
) | {"back"}
TAKES_BACK = re.compile(
    r"\b(?:no,? wait|wait,? no|scratch that|strike that|on second thoughts?|corrections?\b"
    r"|i mean\b|or rather\b|i misspoke"
    r"|actually,? no|i take that back)\b",
    re.IGNORECASE,
)


def takes_back(text: str) -> str:
    """The words with which a text takes back what it has just said; empty where it does not."""
    found = TAKES_BACK.search(text)
    return found.group() if found else ""


def is_proposal(text: str) -> bool:
    """Whether an agent's text asks for a yes."""
    return any(
        (PROPOSES.search(sentence) and not OPEN.search(sentence)) or CONFIRMS.search(sentence)
        for sentence in split_sentences(text)
    )


def is_yes(text: str) -> bool:
    """Whether a user's text agrees to what was proposed."""
    return YES.search(text) is not None and NO.search(text.replace("\u2019", "'")) is None
