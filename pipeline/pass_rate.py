"""From verdicts to counts, posterior and bucket: pure functions of who passed, who was judged, who failed.

A bucket is a function of the rate = passed / judged with half-open edges, so that each rate lies in exactly one:

    too_hard  rate = 0          easy      0.7 <= rate < 1
    hard      0 < rate < 0.3    too_easy  rate = 1
    medium    0.3 <= rate < 0.7

Of eight tries: 0 | 1-2 | 3-5 | 6-7 | 8. Edges are compared in whole numbers, so no rounding moves a question.
"""

from collections import defaultdict
from collections.abc import Iterable

from groundhop.pipeline.statistics import jeffreys
from groundhop.records import Bucketed, BucketName, Verdict

MEDIUM_FROM_TENTHS = 3
EASY_FROM_TENTHS = 7


def name_bucket(passed: int, judged: int, min_judged: int) -> BucketName | None:
    """The bucket of a question; None when fewer than `min_judged` (or no) rollouts were judged."""
    if judged < max(1, min_judged):
        return None
    if passed in (0, judged):
        return "too_easy" if passed else "too_hard"
    if 10 * passed < MEDIUM_FROM_TENTHS * judged:
        return "hard"
    return "medium" if 10 * passed < EASY_FROM_TENTHS * judged else "easy"


def count(question_id: str, policy: str, corrects: Iterable[bool | None], min_judged: int) -> Bucketed:
    """Counts of one question's verdicts; those without yes or no are errors and count neither way."""
    verdicts = list(corrects)
    passed, judged = verdicts.count(True), len(verdicts) - verdicts.count(None)
    posterior = jeffreys(passed, judged)
    return Bucketed(
        question_id=question_id,
        policy=policy,
        passed=passed,
        judged=judged,
        errors=len(verdicts) - judged,
        mean=posterior.value or 0.0,
        low=posterior.low or 0.0,
        high=posterior.high or 0.0,
        bucket=name_bucket(passed, judged, min_judged),
    )


def count_all(verdicts: Iterable[Verdict], min_judged: int) -> list[Bucketed]:
    """One row a question and policy, sorted; a repeat that was judged twice counts by its last verdict."""
    by_question: defaultdict[tuple[str, str], dict[int, bool | None]] = defaultdict(dict)
    for verdict in verdicts:
        by_question[verdict.question_id, verdict.policy][verdict.repeat] = verdict.correct
    return [
        count(question, policy, repeats.values(), min_judged)
        for (question, policy), repeats in sorted(by_question.items())
    ]
