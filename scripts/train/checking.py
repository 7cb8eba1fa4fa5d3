"""The rule of a teacher whose workers check each other: what one has answered another one works out
again, and what is found wrong is mended by a worker that has not found it.

    Alice 1: Question 1: 47+38. 7+8=15, 4+3+1=8. Answer 1: 75.

    Bob 2: Check 1: 47+38. 7+8=15, 4+3+1=8. Answer 1: 85, 75? 8:7! 5:5, wrong.

    Alice 3: Bob is right. Answer 1: 85.

- A worker that begins a step mends what another one has found wrong, else checks what others have
  answered, else takes a free question as in teacher.py.
- A lone worker mends what it has found itself, and does not check its own answers.
- Two that check the same answer part as those do that take the same question.
- All see at once what the others write; else two might answer the same question differently.
- The answers are boxed when all are given, and checked or mended.
"""

import random
from collections.abc import Mapping

from jaxshare.serving.evaluation.arithmetic import SumsProblem
from scripts.train.paragraphs import Paragraph, Sight
from scripts.train.teacher import Pupil

ERRORS = 0.4
"""The part of the answers that workers give wrong, for others to find. That is not learned."""
VERDICT = 5.0
"""The weight of the tokens that say whether digits and answers are right: few of many, and all of the
others are written as though nothing was checked."""
_IN_STEPS = 0.5
"""The part of the errors that are in a step as well."""


class CheckingPupil(Pupil):
    """One worker as that teacher plays it. A check is a claim of a negative number."""

    _given: Mapping[int, int] = {}
    """The answers of others when the last check began."""
    _pairs: list[str]
    """The digits that the check has not compared yet."""

    def _open(self, sight: Sight) -> float:
        if found := self._to_mend(sight):
            checker, number, answer = found
            self._question = 0
            text = f" {checker} is right. Answer {number}: {answer}."
            self._plan(self._script.following(self.own.body, text), "end")
        elif self._unchecked(sight):
            self._question = 0
            self._plan(self._script.check, "check")
        elif self._free(sight) or not self._waiting(sight):
            return super()._open(sight)
        else:
            self._wait(sight)
        return 1.0

    def _check(self, sight: Sight) -> float:
        """The number of what is checked, which another one may have begun to check meanwhile."""
        self._given = self._answers_of_others(sight)
        number = self._choice(self._unchecked(sight) or sorted(self._given))
        self._question, begun = -number, len(self._script.check)
        self._plan(self._script.codec.encode(f" Check {number}")[begun:], "work")
        return 1.0

    def _work(self, sight: Sight) -> float:
        if self._question > 0 and not self._rival(sight) and self._rng.random() < ERRORS:
            claim = f" Question {self._question}"
            body = wrong_body(self._problem, self._question, self._rng)
            self._plan(self._script.following(claim, body.removeprefix(claim)), "end")
            self._wrong = len(self._queue)
            return 1.0
        if self._question > 0 or self._rival(sight):
            return super()._work(sight)
        number = -self._question
        body = self._problem.body(number).removeprefix(f" Question {number}").removesuffix(".")
        both = f"{body}, {self._given[number]}?"
        self._plan(self._script.following(f" Check {number}", both), "digits")
        return 1.0

    def _digits(self, sight: Sight) -> float:
        """Compares the answers digit by digit: a small model cannot do it at one glance."""
        number = -self._question
        pairs = zip(str(self._problem.answers[number - 1]), str(self._given[number]), strict=False)
        self._pairs = [f" {a}:{b}" for a, b in pairs]
        return self._pair(sight)

    def _pair(self, sight: Sight) -> float:
        pair = self._pairs.pop(0)
        self._plan(self._script.following(self.own.body, pair), "mark")
        return 1.0

    def _mark(self, sight: Sight) -> float:
        """The mark of a pair that differs, or what comes after it."""
        ones, others = self.own.body[-3::2]
        if ones != others:
            self._plan(self._script.codec.encode("!"), "marked")
        else:
            self._marked(sight)
        return VERDICT

    def _marked(self, sight: Sight) -> float:
        if self._pairs:
            return self._pair(sight)
        self._plan(self._script.following(self.own.body, ", "), "verdict")
        return 1.0

    def _verdict(self, sight: Sight) -> float:
        """The one token in a check that the check is for, and what follows from it."""
        number = -self._question
        right = self._given[number] == self._problem.answers[number - 1]
        text = "right." if right else "wrong."
        self._plan(self._script.following(self.own.body, text), "end")
        return VERDICT

    def _answers_of_others(self, sight: Sight) -> dict[int, int]:
        """The first answers of others, by question, without those that were mended."""
        found: dict[int, int] = {}
        for p in (*sight.finished, *sight.others):
            if p.writer != self.name:
                found = {n: p.results[n] for n in p.results.keys() & p.claims.keys()} | found
        return found

    def _unchecked(self, sight: Sight) -> list[int]:
        """The questions that others have answered and that no worker checks or has checked."""
        claimed = sight.claimed
        return sorted(n for n in self._answers_of_others(sight) if -n not in claimed)

    def _to_mend(self, sight: Sight) -> tuple[str, int, int] | None:
        """The first finding of another one that an answer is wrong: who has found it, the number of
        the question, and the right answer."""
        mended = _mended(sight)
        for p in (*sight.finished, *sight.others):
            agreed = f" {p.writer} is right."
            if any(other.body.startswith(agreed) and not other.results for other in sight.others):
                continue
            if p.writer != self.name or len(self.names) == 1:
                for number, (answer, right) in p.findings.items():
                    if not right and number not in mended:
                        return p.writer, number, answer
        return None

    def _waiting(self, sight: Sight) -> bool:
        """True if an answer is missing, or one that has to be checked or mended is not."""
        found = findings(sight)
        wrong = {number for number, (_, right) in found.items() if not right}
        return (
            len(sight.results) < len(self._problem.questions)
            or bool(self._to_be_checked(sight) - found.keys())
            or bool(wrong - _mended(sight))
        )

    def _to_be_checked(self, sight: Sight) -> set[int]:
        """The answers that another worker than their writer is there to check."""
        return {
            number
            for p in (*sight.finished, *sight.others)
            if {*self.names} - {p.writer}
            for number in p.results.keys() & p.claims.keys()
        }


def findings(sight: Sight) -> dict[int, tuple[int, bool]]:
    """By question: the answer that a check has come to, and whether that was given before."""
    return {
        number: found
        for p in (*sight.finished, *sight.others)
        for number, found in p.findings.items()
    }


def said(
    problem: SumsProblem, name: str, step: int, number: int, rng: random.Random, wrong: bool
) -> Paragraph:
    """A paragraph that is there when the workers begin: an answer, which may be wrong."""
    opening = f"{name} {step}:"
    body = wrong_body(problem, number, rng) if wrong else problem.body(number)
    return Paragraph(name, text=opening + body, opening=len(opening))


def wrong_body(problem: SumsProblem, number: int, rng: random.Random) -> str:
    """The body of a paragraph whose answer has one wrong digit, as may one of its steps."""
    body = problem.body(number)
    working, _, answer = body.rpartition(": ")
    if rng.random() < _IN_STEPS:
        ends = [
            i
            for i, sign in enumerate(working)
            if sign in ",." and working[i - 1].isdigit() and "=" in working[:i]
        ]
        at = rng.choice(ends) - 1
        working = working[:at] + _other(working[at], rng) + working[at + 1 :]
    digits = answer.removesuffix(".")
    at = rng.randrange(len(digits))
    changed = _other(digits[at], rng, zero=at > 0 or len(digits) == 1)
    return f"{working}: {digits[:at]}{changed}{digits[at + 1 :]}."


def _other(digit: str, rng: random.Random, *, zero: bool = True) -> str:
    return rng.choice([d for d in "0123456789" if d != digit and (zero or d != "0")])


def _mended(sight: Sight) -> set[int]:
    """The questions whose answers were mended: given without being worked on."""
    return {
        number
        for p in (*sight.finished, *sight.others)
        for number in p.results.keys() - p.claims.keys()
    }
