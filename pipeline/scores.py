"""What an evaluation says: accuracy, tool calls and their differences, each with an interval. Pure functions.

Rollouts without a verdict count neither way in `accuracy`; `worst` and `best` say what it would be were they all wrong or
all right. A question counts as solved when at least half of its judged tries were right.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import numpy as np

from groundhop.pipeline.statistics import (
    Floats,
    Interval,
    bootstrap_mean,
    bootstrap_ratio,
    calibration_error,
    mcnemar,
    pass_at_k,
    permutation_p,
    rate_over_questions,
    wilson,
)
from groundhop.records import Rollout, Verdict

CENSORED = frozenset({"turns", "tokens", "time", "context", "truncated"})
"""Endings by a budget: their tool calls are cut off, which biases means."""
CALIBRATION_ROWS = 100
"""Fewer stated confidences say nothing about calibration."""


@dataclass(slots=True)
class QuestionScore:
    """The tries of one policy at one question."""

    tries: int = 0
    passed: int = 0
    judged: int = 0
    sound: int = 0
    """Tries that infrastructure did not fail."""
    calls: int = 0
    """Calls of the sound tries that were run."""

    @property
    def rate(self) -> float:
        """Share of judged tries that were right."""
        return self.passed / self.judged

    @property
    def solved(self) -> bool:
        """Whether at least half of the judged tries were right."""
        return 2 * self.passed >= self.judged


@dataclass(slots=True)
class PolicyScores:
    """All tries of one policy."""

    questions: dict[str, QuestionScore] = field(default_factory=dict)
    stops: Counter[str] = field(default_factory=Counter)
    states: Counter[str] = field(default_factory=Counter)
    malformed: int = 0
    completion_tokens: int = 0
    confidences: list[tuple[float, bool]] = field(default_factory=list)
    without_confidence: int = 0
    judge: dict[str, Any] = field(
        default_factory=lambda: {"dollars": 0.0, "tokens": 0, "models": set(), "prompts": set()}
    )

    def add(self, rollout: Rollout, verdict: Verdict) -> None:
        """Count one judged try."""
        score = self.questions.setdefault(rollout.question_id, QuestionScore())
        score.tries += 1
        self.stops[rollout.stop] += 1
        self.states[verdict.state] += 1
        self.completion_tokens += rollout.usage.completion_tokens
        if rollout.stop != "error":
            score.sound += 1
            score.calls += sum(call.outcome != "malformed" for call in rollout.calls)
            self.malformed += sum(call.outcome == "malformed" for call in rollout.calls)
        if verdict.correct is not None:
            score.judged += 1
            score.passed += verdict.correct
            self._take_confidence(verdict, verdict.correct)
        self.judge["dollars"] += verdict.dollars
        self.judge["tokens"] += verdict.tokens
        self.judge["models"] |= {verdict.model or verdict.judge}
        self.judge["prompts"] |= {verdict.prompt_digest} - {None}

    def _take_confidence(self, verdict: Verdict, correct: bool) -> None:
        if verdict.confidence is None:
            self.without_confidence += 1
        else:
            self.confidences.append((verdict.confidence, correct))

    def column(self, name: str) -> Floats:
        """One number a question, by question id."""
        return np.array([getattr(self.questions[key], name) for key in sorted(self.questions)], dtype=np.float64)


def policy_summary(scores: PolicyScores, *, seed: int, draws: int) -> dict[str, Any]:
    """One policy's numbers, ready for JSON."""
    tries, passed, judged = (scores.column(name) for name in ("tries", "passed", "judged"))
    sound, total = scores.column("sound"), int(tries.sum())
    right, lost = int(passed.sum()), total - int(judged.sum())
    stated = np.array(scores.confidences, dtype=np.float64).reshape(-1, 2)
    return {
        "questions": len(scores.questions),
        "repeats": int(tries.max()) if total else 0,
        "tries": total,
        "judged": int(judged.sum()),
        "right": right,
        "without_verdict": {state: count for state, count in sorted(scores.states.items()) if state != "judged"},
        "accuracy": _json(rate_over_questions(passed, judged, seed, draws)),
        "accuracy_errors_wrong": _json(rate_over_questions(passed, tries, seed, draws)),
        "worst": right / total if total else None,
        "best": (right + lost) / total if total else None,
        "pass_at_k": _pass_at_k(scores),
        "calls": _json(bootstrap_ratio(scores.column("calls"), sound, seed, draws)),
        "malformed_calls": scores.malformed,
        "censored": _json(wilson(sum(scores.stops[stop] for stop in CENSORED), int(sound.sum()))),
        "stops": dict(sorted(scores.stops.items())),
        "completion_tokens": scores.completion_tokens,
        "calibration": {
            "rows": len(stated),
            "missing": scores.without_confidence,
            "rms_error": calibration_error(stated[:, 0], stated[:, 1]) if len(stated) >= CALIBRATION_ROWS else None,
        },
        "judge": {key: sorted(value) if isinstance(value, set) else value for key, value in scores.judge.items()},
    }


def comparisons(by_policy: Mapping[str, PolicyScores], *, seed: int, draws: int) -> list[dict[str, Any]]:
    """Every two policies in the order given, the later against the earlier, on the questions that both were judged on."""
    pairs = combinations(by_policy, 2)
    return [
        _comparison(before, after, by_policy[before], by_policy[after], seed=seed, draws=draws)
        for before, after in pairs
    ]


def _comparison(
    before: str, after: str, old: PolicyScores, new: PolicyScores, *, seed: int, draws: int
) -> dict[str, Any]:
    shared = [
        (old.questions[key], new.questions[key])
        for key in sorted(old.questions.keys() & new.questions.keys())
        if old.questions[key].judged and new.questions[key].judged
    ]
    differences = np.array([b.rate - a.rate for a, b in shared])
    gained, lost = int((differences > 0).sum()), int((differences < 0).sum())
    single = all(a.judged == b.judged == 1 for a, b in shared)
    both = [pair for pair in shared if pair[0].solved and pair[1].solved]
    one = [pair for pair in shared if pair[0].solved != pair[1].solved]
    neither = [pair for pair in shared if not pair[0].solved and not pair[1].solved]
    return {
        "name": f"{before} → {after}",
        "before": before,
        "after": after,
        "questions": len(shared),
        "difference": _json(bootstrap_mean(differences, seed, draws)),
        "p": (mcnemar(gained, lost) if single else permutation_p(differences, seed, draws)) if shared else None,
        "test": "McNemar, exact" if single else "paired permutation by question",
        "gained": gained,
        "lost": lost,
        "ratio": _json(_call_ratio(shared, seed, draws)),
        "ratio_both": _json(_call_ratio(both, seed, draws)),
        "ratio_other": _json(_call_ratio(one, seed, draws)),
        "ratio_neither": _json(_call_ratio(neither, seed, draws)),
        "both_solved": len(both),
        "one_solved": len(one),
        "neither_solved": len(neither),
    }


def _call_ratio(pairs: Sequence[tuple[QuestionScore, QuestionScore]], seed: int, draws: int) -> Interval:
    """Calls a try of the later policy over those of the earlier, questions weighted alike."""
    sound = [(a, b) for a, b in pairs if a.sound and b.sound]
    return bootstrap_ratio([b.calls / b.sound for _, b in sound], [a.calls / a.sound for a, _ in sound], seed, draws)


def _pass_at_k(scores: PolicyScores) -> dict[str, float | None]:
    """Mean over questions for k = 1, 2, 4, ...; only questions with k judged tries say something about k."""
    found: dict[str, float | None] = {}
    most, k = max((score.judged for score in scores.questions.values()), default=0), 1
    while k <= most:
        values = [value for s in scores.questions.values() if (value := pass_at_k(s.judged, s.passed, k)) is not None]
        found[str(k)] = float(np.mean(values)) if values else None
        k *= 2
    return found


def _json(interval: Interval) -> dict[str, float | None] | None:
    return None if interval.value is None else interval._asdict()
