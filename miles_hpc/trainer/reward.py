"""From a response's text to a reward.

    reward = 0.9 * score + 0.1 * [an answer was found]

`score` is the task's own verdict (0 to 1) on the extracted answer. The second term is the only shaping: it tells a response
that answers from one that does not, so that a model which is nearly always wrong still gets groups with a spread.
Knows nothing of tokens.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from reasoning_gym.utils import extract_answer

ANSWERED_WEIGHT = 0.1
_NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """The reward of a response and the task's score inside it."""

    value: float
    score: float


def find_answer(text: str, reference: str) -> str | None:
    """Return the answer that `text` gives; None when it gives none.

    An <answer> tag wins. Else, when the reference is a number, the last number in the text: small models answer in prose
    and often repeat the problem first. A minus sign counts only where it cannot be a subtraction, that is not right
    after a digit or a letter. Else the whole text without surrounding space.
    """
    tagged = extract_answer(text)
    if tagged:
        return str(tagged)
    if _NUMBER.fullmatch(reference.strip()) is None:
        return text.strip() or None
    matches = list(_NUMBER.finditer(text))
    if not matches:
        return None
    last = matches[-1]
    found = last.group()
    before = text[: last.start()]
    if found.startswith("-") and before and before[-1].isalnum():
        found = found[1:]
    return found.replace(",", "")


def reward_response(text: str, reference: str, score: Callable[[str | None], float]) -> Reward:
    """Return the reward of a response; `score` is the task's verdict on an answer."""
    answer = find_answer(text, reference)
    if answer is None:
        return Reward(value=0.0, score=0.0)
    verdict = score(answer)
    return Reward(value=(1.0 - ANSWERED_WEIGHT) * verdict + ANSWERED_WEIGHT, score=verdict)
