"""What a judge is: it says yes, no or nothing about a rollout's answer, and never raises for an outage."""

from typing import Any, Protocol

import msgspec

from groundhop.judges.parse import confidence_of, without_reasoning
from groundhop.records import AnswerKind, Rollout, Verdict, VerdictState


class Asked(Protocol):
    """A question with its accepted answers: `Question` and `Task` both are."""

    @property
    def question(self) -> str:
        """What was asked."""
        ...

    @property
    def answer(self) -> str:
        """The expected answer."""
        ...

    @property
    def kind(self) -> AnswerKind:
        """Decides how answers are compared by rule."""
        ...

    @property
    def aliases(self) -> tuple[str, ...]:
        """Other accepted forms."""
        ...


class Judge(Protocol):
    """Says whether a rollout answers its question rightly."""

    async def __call__(self, rollout: Rollout, question: Asked) -> Verdict:
        """Judge. Raises: CredentialError alone; every other trouble is a verdict without yes or no."""
        ...


def verdict_of(
    rollout: Rollout, judge: str, correct: bool | None, reason: str, state: VerdictState = "judged"
) -> Verdict:
    """A verdict that carries the rollout's key and its stated confidence."""
    return Verdict(
        question_id=rollout.question_id,
        repeat=rollout.repeat,
        policy=rollout.policy,
        correct=correct,
        judge=judge,
        state=state,
        confidence=confidence_of(final_text(rollout)),
        reason=reason,
    )


def without_judging(rollout: Rollout, judge: str) -> Verdict | None:
    """The verdict that needs no judge: none for a failed rollout, no for one without an answer; else None."""
    if rollout.stop == "error":
        return verdict_of(rollout, judge, None, rollout.error or "rollout failed", "rollout_error")
    if rollout.answer is None or not rollout.answer.strip():
        return verdict_of(rollout, judge, False, f"no answer ({rollout.stop})")
    return None


def final_text(rollout: Rollout) -> str:
    """The last words of the model, reasoning left out."""
    for message in reversed(rollout.messages):
        if message.get("role") == "assistant":
            return without_reasoning(_text(message.get("content"))).strip()
    return ""


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))


def with_costs(verdict: Verdict, **costs: Any) -> Verdict:
    """A copy with `model`, `prompt_digest`, `attempts`, `tokens` or `dollars` filled in."""
    return msgspec.structs.replace(verdict, **costs)
