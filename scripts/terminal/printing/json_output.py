"""JSON on standard output, for scripts."""

import json


def print_json(value: object, *, indent: int | None = 1) -> None:
    """Print a value as JSON; NaN and infinities, which JSON lacks, are null.

    Args:
        value: of dictionaries, lists, texts and numbers.
        indent: spaces a level; None prints one line.
    """
    finite = json.loads(json.dumps(value), parse_constant=lambda _: None)
    print(json.dumps(finite, indent=indent), flush=True)


def print_error(kind: str, message: str) -> None:
    """Print why a command, or a line of a conversation, failed: an object on one line.

    Args:
        kind: the class of the error.
        message: what is said on standard error.
    """
    print_json({"error": {"type": kind, "message": message}}, indent=None)
