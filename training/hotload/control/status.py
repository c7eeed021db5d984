"""`groundhop hotload status`: a table of replicas that follows what happens, or once for scripts."""

import time
from collections.abc import Callable, Iterable

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from groundhop.errors import ServerError
from groundhop.training.hotload.control.client import ControlClient
from groundhop.training.hotload.control.wire import DeploymentView, HotLoadView, ReplicaView

REFRESH_S = 1.0
COLOURS = {"ready": "green", "updating": "yellow", "pending_update": "cyan", "error": "red"}
HEADS = ("replica", "state", "version", "target", "bytes", "seconds", "beat", "detail")


def show_once(client: ControlClient, deployment: str | None) -> str:
    """The state now, as plain lines with a tab between columns."""
    lines = []
    for view in _chosen(client, deployment):
        lines.append(f"# {_title(view)}")
        lines += ["\t".join(("replica", *HEADS[1:]))]
        lines += ["\t".join(_cells(replica)) for replica in view.replicas]
    return "\n".join(lines)


def follow(
    client: ControlClient, deployment: str | None, console: Console, *, keep_on: Callable[[], bool] = lambda: True
) -> None:
    """Redraw the table every second until interrupted. A control plane that goes away is shown as such, and waited for."""
    shown: RenderableType = Text("asking ...")
    with Live(shown, console=console, auto_refresh=False) as live:
        while keep_on():
            try:
                views = _chosen(client, deployment)
                shown = Group(*(part for view in views for part in _draw(view))) if views else Text("no deployment yet")
            except ServerError as error:
                shown = Text(f"{error}; asking again", style="red")
            live.update(shown, refresh=True)
            time.sleep(REFRESH_S)


def _chosen(client: ControlClient, deployment: str | None) -> tuple[DeploymentView, ...]:
    return client.status() if deployment is None else (client.deployment(deployment),)


def _draw(view: DeploymentView) -> Iterable[RenderableType]:
    table = Table(title=_title(view), title_justify="left", expand=False)
    for head in HEADS:
        table.add_column(head, justify="right" if head in ("bytes", "seconds", "beat") else "left")
    for replica in view.replicas:
        style = COLOURS[replica.public_state]
        cells = _cells(replica)
        table.add_row(cells[0], Text(cells[1], style=style), *cells[2:])
    yield table
    for hot_load in view.hot_loads[:3]:
        yield Text(_line(hot_load, view.now), style="dim")


def _title(view: DeploymentView) -> str:
    parts = [view.name, view.config.transition_mode, f"head {view.head or 'initial'}"]
    if view.announced != view.head:
        parts.append(f"announced {view.announced or 'initial'}")
    if view.lease_owner is not None:
        parts.append(f"publisher {view.lease_owner} (epoch {view.epoch})")
    return " | ".join(parts)


def _cells(replica: ReplicaView) -> tuple[str, ...]:
    target = replica.target_identity or ""
    return (
        replica.name,
        replica.state,
        replica.current_identity or "initial",
        "" if target == replica.current_identity else target,
        in_words(replica.bytes),
        f"{replica.seconds:.1f}" if replica.started_at is not None else "",
        f"{replica.beat_age_s:.1f}",
        " ".join(replica.detail.split()),
    )


def _line(hot_load: HotLoadView, now: float) -> str:
    seconds = (hot_load.finished_at or now) - hot_load.created_at
    reason = f": {hot_load.reason}" if hot_load.reason else ""
    return f"{hot_load.identity} ({hot_load.kind}) {hot_load.state} after {seconds:.1f} s, attempt {hot_load.attempt}{reason}"


def in_words(count: int) -> str:
    """Bytes for reading: `1.5 MB` (powers of 1000)."""
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
