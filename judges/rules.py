"""The judge that needs no model: the rules of `exact` over all accepted forms of an answer."""

from groundhop.judges.exact import compare_any
from groundhop.judges.protocol import Asked, Judge, verdict_of, without_judging
from groundhop.records import Rollout, Verdict, VerdictState


class ExactJudge:
    """Decides by rule; leaves open what has two readings."""

    name = "exact"

    async def __call__(self, rollout: Rollout, question: Asked) -> Verdict:
        """Judge by rule alone."""
        early = without_judging(rollout, self.name)
        if early is not None:
            return early
        match = compare_any(rollout.answer, (question.answer, *question.aliases), question.kind)
        state: VerdictState = "open" if match.same is None else "judged"
        return verdict_of(rollout, self.name, match.same, match.rule, state)


class ExactThenJudge:
    """Decides by rule where a reader would surely agree, and asks another judge about the rest."""

    def __init__(self, other: Judge) -> None:
        self._other = other

    async def __call__(self, rollout: Rollout, question: Asked) -> Verdict:
        """Judge by rule or by the other judge."""
        early = without_judging(rollout, "exact")
        if early is not None:
            return early
        match = compare_any(rollout.answer, (question.answer, *question.aliases), question.kind)
        if match.same is not None and match.sure:
            return verdict_of(rollout, "exact", match.same, match.rule)
        return await self._other(rollout, question)
