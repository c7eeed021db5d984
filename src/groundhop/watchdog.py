"""Run a command that cannot outlive the process that started it, however that one ends.

    python -I watchdog.py PARENT_PID GRACE_S COMMAND...

The command and its children form this process's group. When the parent is gone (kill -9 included) or a SIGTERM or
SIGINT comes, the command gets SIGTERM and, GRACE_S seconds later, what is left of the group gets SIGKILL. Standard
library only, so that it starts at once in any environment.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from types import FrameType

POLL_S = 0.2
PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> int:
    """Watch over the command; returns its exit status, 128 + n when signal n ended it."""
    parent, grace_s, command = int(arguments[0]), float(arguments[1]), arguments[2:]
    stopping: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        stopping.append(number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, note)
    # The process that starts us puts us in a session of our own, so the group is ours to kill.
    child = subprocess.Popen(command, preexec_fn=_die_with_parent)  # noqa: PLW1509 (we have no threads)
    while child.poll() is None and not stopping and os.getppid() == parent:
        time.sleep(POLL_S)
    if child.poll() is None:
        _stop(child, grace_s if os.getppid() == parent else min(grace_s, 1.0))
    status = child.wait()
    _kill_group()
    return status if status >= 0 else 128 - status


def _die_with_parent() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _stop(child: "subprocess.Popen[bytes]", grace_s: float) -> None:
    child.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(timeout=grace_s)
    if child.poll() is None:
        child.kill()


def _kill_group() -> None:
    """Kill children that the command left in our group; we are in it too, so ignore nothing and go last."""
    if os.getpgrp() != os.getpid():
        return
    for entry in os.listdir("/proc") if os.path.isdir("/proc") else []:  # noqa: PTH112, PTH208
        if entry.isdigit() and int(entry) != os.getpid():
            with contextlib.suppress(OSError):
                if os.getpgid(int(entry)) == os.getpgrp():
                    os.kill(int(entry), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
