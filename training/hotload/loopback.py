"""Is an address one that only this machine can reach?"""

import contextlib
import ipaddress


def is_loopback(host: str) -> bool:
    """Whether `host`, a name or an address with or without brackets, is this machine's own."""
    if host == "localhost":
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    return False
