"""Sizes of files and memory in words."""


def byte_size(nbytes: int) -> str:
    """Return a size in the largest unit that it has one of, with a digit behind the point."""
    size, unit = float(nbytes), "bytes"
    for larger in ("kB", "MB", "GB"):
        if round(size, 1) < 1000:
            break
        size, unit = size / 1000, larger
    return f"{nbytes} bytes" if unit == "bytes" else f"{size:.1f} {unit}"
