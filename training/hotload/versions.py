"""Which weights made which tokens of an answer, as vLLM's engine tells it, and which a request wants."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from groundhop.training.hotload.asgi import Refusal


@dataclass(frozen=True, slots=True)
class Span:
    """Output tokens `[start, end)` of one choice, and the version that made them."""

    choice: int
    version: str
    start: int
    end: int

    def to_json(self) -> dict[str, Any]:
        """As answers carry it; vLLM's own spans have no `choice`."""
        return {"choice": self.choice, "version": self.version, "start": self.start, "end": self.end}


@dataclass(slots=True)
class Seen:
    """What the engine said of one HTTP request's tokens."""

    spans: list[Span] = field(default_factory=list)
    calls: int = 0
    """Prompts handed to the engine; a completion request may hold several."""

    @property
    def versions(self) -> list[str]:
        """Each version once, in the order of the tokens of each choice."""
        return list(dict.fromkeys(span.version for span in self.spans))


@dataclass(frozen=True, slots=True)
class Wish:
    """What a request asks of the weights."""

    exact: str | None = None
    least: int | None = None

    def __bool__(self) -> bool:
        return self.exact is not None or self.least is not None

    def holds(self, version: str) -> bool:
        """Whether tokens of `version` are what was asked for. A label that is no number has no rank."""
        if self.exact is not None and version != self.exact:
            return False
        return self.least is None or (version.isdecimal() and int(version) >= self.least)

    def conflict(self, current: str, spans: Sequence[Span] = (), versions: Sequence[str] = ()) -> Refusal:
        """The 409 that says what was wanted, what is here, and, after the fact, which versions the tokens are of."""
        exact = [] if self.exact is None else [f"exactly version {self.exact}"]
        wanted = " and ".join(exact + ([] if self.least is None else [f"at least version {self.least}"]))
        made = f"; its tokens are of {', '.join(versions)}" if versions else ""
        message = f"need {wanted}, this replica holds {current or 'an unknown one'}{made}"
        told = {"weight_versions": [span.to_json() for span in spans]} if spans else {}
        return Refusal(409, "version_not_served", message, current_version=current or None, **told)


def read_wish(named: Mapping[str, Any]) -> Wish:
    """The wish in `exact_version` and `min_required_version`. Raises: Refusal for what is no version."""
    exact, least = named.get("exact_version"), named.get("min_required_version")
    if isinstance(exact, (bool, float, list, dict)) or isinstance(least, bool):
        raise Refusal(400, "invalid_argument", f"cannot read a version in {dict(named)}")
    if least is not None and not str(least).isdecimal():
        raise Refusal(400, "invalid_argument", f"min_required_version must be a whole number, got {least!r}")
    return Wish(None if exact is None else str(exact), None if least is None else int(least))


watching: ContextVar[Seen | None] = ContextVar("groundhop_watching", default=None)
"""Where the spans of the HTTP request that is being handled go."""


def observe(engine: Any) -> None:
    """Have an engine (vLLM's `EngineClient`) report the spans of each `generate` to `watching`. Harmless when repeated."""
    generate = getattr(engine, "generate", None)
    if generate is None or getattr(generate, "reports_spans", False):
        return

    def reporting(*arguments: Any, **named: Any) -> AsyncGenerator[Any, None]:
        outputs: AsyncGenerator[Any, None] = generate(*arguments, **named)
        seen = watching.get()
        if seen is None:
            return outputs
        settings = named.get("sampling_params", arguments[1] if len(arguments) > 1 else None)
        first = seen.calls * int(getattr(settings, "n", None) or 1)
        seen.calls += 1
        return _reported(outputs, seen, first)

    reporting.reports_spans = True  # type: ignore[attr-defined]
    engine.generate = reporting


async def _reported(outputs: AsyncGenerator[Any, None], seen: Seen, first: int) -> AsyncGenerator[Any, None]:
    done: set[int] = set()
    try:
        async for output in outputs:
            for part in output.outputs:
                spans = getattr(part, "weight_versions", None)
                if spans and part.index not in done:
                    done.add(part.index)
                    seen.spans += [Span(first + part.index, str(s.version), int(s.start), int(s.end)) for s in spans]
            yield output
    finally:
        # The engine ends a request when its generator is closed, and closing ours would not close it.
        await outputs.aclose()
