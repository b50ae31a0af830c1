"""Lines of a conversation: with editing, history and Tab in a terminal where readline is there."""

import sys
from collections.abc import Callable

Complete = Callable[[str], list[str]]


class LineEditor:
    """Reads standard input line by line."""

    def __init__(self, complete: Complete) -> None:
        """Take over the terminal's lines, if it is one.

        Args:
            complete: returns, for a line up to the cursor, what may stand in place of its last
                word.
        """
        self.is_interactive = sys.stdin.isatty()
        if self.is_interactive and sys.stdout.isatty():  # elsewhere readline prints escapes
            _use_readline(complete)

    def read(self, prompt: str) -> str:
        """Return the next line, without its end.

        Raises:
            EOFError: there is none.
        """
        if self.is_interactive:
            return input(prompt)
        print(prompt, end="", flush=True)
        if not (line := sys.stdin.readline()):  # `input` wants an open stderr, too
            raise EOFError
        return line.removesuffix("\n")


def _use_readline(complete: Complete) -> None:
    """Let `input` edit lines; a Python without readline leaves them to the terminal."""
    try:
        import readline
    except ImportError:
        return
    found: list[str] = []

    def completer(_: str, number: int) -> str | None:
        if number == 0:
            found[:] = complete(readline.get_line_buffer()[: readline.get_endidx()])
        return found[number] if number < len(found) else None

    readline.set_completer(completer)
    readline.set_completer_delims(" ")
    is_libedit = "libedit" in (readline.__doc__ or "")  # as in Python for macOS
    readline.parse_and_bind("bind ^I rl_complete" if is_libedit else "tab: complete")
