"""Escapes for text of files that a terminal would obey."""


def visible(text: str) -> str:
    """Return a text with escapes for what would move the cursor, change colours or is no text."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def visible_lines(text: str) -> str:
    """Return the same of a text of several lines."""
    return "\n".join(map(visible, text.split("\n")))
