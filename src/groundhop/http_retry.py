"""Read what a server says about asking again: `Retry-After`, in seconds or as a date (RFC 9110, 10.2.3)."""

from datetime import UTC
from email.utils import parsedate_to_datetime


def retry_after_s(header: str, now: float) -> float | None:
    """Seconds to wait from `now` (Unix time), never negative; None when the header cannot be read."""
    text = header.strip()
    if text.isascii() and text.isdigit():
        return float(text)
    try:
        when = parsedate_to_datetime(text)
    except (TypeError, ValueError):
        return None
    # A date without a zone is read as UTC: HTTP dates are always GMT.
    if when.tzinfo is None:
        when = when.replace(tzinfo=UTC)
    return max(0.0, when.timestamp() - now)
