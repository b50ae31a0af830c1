"""Resident memory of a process, mapped files included (Linux)."""

from pathlib import Path


def resident_bytes(pid: int | str = "self") -> int:
    """Return what a process has in RAM now; 0 where it has ended."""
    return _status_bytes(pid, "VmRSS:")


def peak_resident_bytes() -> int:
    """Return the most that this process had in RAM; `getrusage` would count its parent's too."""
    return _status_bytes("self", "VmHWM:")


def _status_bytes(pid: int | str, name: str) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    _, found, rest = status.partition(name)  # a process that has just ended has none
    return int(rest.split()[0]) * 1024 if found else 0
