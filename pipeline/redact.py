"""Take out of records what would publish a benchmark: questions, answers, and all text that may quote them."""

import msgspec

from groundhop.records import Rollout, Verdict


def redacted_rollout(rollout: Rollout) -> Rollout:
    """Ids, seed, stop reason, names and outcomes of calls, usage; no text and no tokens."""
    calls = tuple(
        msgspec.structs.replace(call, arguments=None if call.arguments is None else {}, detail="")
        for call in rollout.calls
    )
    return msgspec.structs.replace(
        rollout,
        messages=(),
        tools=(),
        token_ids=(),
        prompt_length=0,
        mask=(),
        log_probs=(),
        spans=(),
        answer=None,
        error=None if rollout.error is None else "redacted",
        calls=calls,
    )


def redacted_verdict(verdict: Verdict) -> Verdict:
    """Everything but the judge's words, which quote question and answer."""
    return msgspec.structs.replace(verdict, reason="")
