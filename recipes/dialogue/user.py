"""A simulated user with three wishes in the world of heedful demo, and the gold judge of dialogues with this user.

The user asks a question, then something about the answer, then for the first answer again:

    Chinese for cat? | And in French? | What did you say first?

A wrong or a rude answer is not accepted: the user says so and asks once more. After three answers the dialogue is over.
"""

import re

from heedful.apps.demo.facts import LISTS, RUDE_WORDS, family_named
from heedful.apps.demo.judge import gold_marks, gold_score

TURNS = 3
"""Answers of a dialogue."""
AGAIN, OTHERS = "again", "others"
"""What a wish has in the place of a right answer: the first answer is right, or three members that it did not list."""
NOT_ACCEPTED = {"en": ("No.", "Be polite!"), "zh": ("不对。", "请礼貌一点。")}
"""What the user says to a wrong and to a rude answer, by language."""
WRONG = 0.21
"""The gold judge's mark of a polite answer that is wrong."""


class User:
    """A user with wishes: each a question, its family in the demo's world, and a right answer.

    Methods without an underscore would be tools that the policy may call.
    """

    def reset(self, wishes):
        self.wishes, self.turn, self.heard = wishes, 0, []

    def _reply(self, text):
        self.turn += 1
        question, family, _ = self._wish()
        wrong, rude = NOT_ACCEPTED[family_named(family).language]
        if self.turn == TURNS:
            return None
        if any(word in text.casefold() for word in RUDE_WORDS):
            return f"{rude} {question}"
        if not self._is_right(text):
            return f"{wrong} {question}"
        self.heard.append(", ".join(_members(text)) if family == "lists" else self._right())
        return self._wish()[0]

    def _wish(self):
        return self.wishes[len(self.heard)]

    def _right(self):
        """A right answer to the present wish."""
        _, _, answer = self._wish()
        if answer == OTHERS:
            said = _members(self.heard[0])
            kind = next(members for members in LISTS.values() if said[0] in members)
            return ", ".join(member for member in kind if member not in said)
        return self.heard[0] if answer == AGAIN else answer

    def _is_right(self, text):
        _, family, answer = self._wish()
        right = self._right()
        if answer in (AGAIN, OTHERS) and family == "lists" and set(_members(text)) != set(_members(right)):
            return False
        return gold_marks(family, right, text, True).correct == 1

    def _mark(self, text, ended):
        """The gold judge's mark of an answer to the present wish, from 0 to 1."""
        mark = gold_score(self._wish()[1], self._right(), text, ended)
        return mark if self._is_right(text) else min(mark, WRONG)


def gold(completions, truncated, wishes):
    """The mean mark of the three answers of each dialogue; one that was not given has 0. No policy is trained on them."""
    return [sum(marks(*one)) / TURNS for one in zip(completions, truncated, wishes, strict=True)]


def marks(turns, cut, wishes):
    """The mark of each answer of a dialogue; the last one may be cut off."""
    user, found = User(), []
    user.reset(wishes)
    said = [turn["content"] for turn in turns if turn["role"] == "assistant"]
    for place, text in enumerate(said, 1):
        found.append(user._mark(text, not cut or place < len(said)))
        user._reply(text)
    return found


def _members(text):
    """The members of lists in a text, in order, each once."""
    known = {member.casefold(): member for members in LISTS.values() for member in members}
    words = dict.fromkeys(re.findall(r"[a-z0-9À-ÿ]+", text.casefold()))
    return [known[word] for word in words if word in known]
