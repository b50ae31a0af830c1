"""Ports of this machine, with no package but Python's own: a free one, and what answers at one."""

import socket
import urllib.request


def free_port() -> int:
    """Return one that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def is_answered(url: str) -> bool:
    """Whether there is a server yet."""
    try:
        with urllib.request.urlopen(url) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
