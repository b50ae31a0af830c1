"""A process that tries whether a grammar can be compiled: it may hang there, or take the machine.

A thread would not do: it cannot be ended, and all threads die of a grammar that needs more stack
than there is.
"""

import json
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from trt_lora.plugins.errors import BackendError
from trt_lora.runtime.generation.text import grammar_compiler

_MOST_S = 5.0  # that a grammar may take
_START_S = 60.0  # that the process may take until it has read the tokenizer
_KNOWN = 256  # grammars that are remembered


class GrammarProcess:
    """Tries one grammar after the other; it is begun when one comes, and anew after it was ended.

    Any thread may call it.
    """

    def __init__(self, tokenizer_json: str, vocabulary: int, stop: int) -> None:
        """Take the arguments of `new_tokenizer`."""
        self._tokenizer = json.dumps([tokenizer_json, vocabulary, stop]).encode()
        self._failures: dict[str, str] = {}  # by grammar, the oldest first; empty: none
        self._lock = threading.Lock()  # of the process
        self._connection: Connection | None = None
        self._kill: Callable[[], object] = list  # nothing is to be done

    def failure(self, grammar: str) -> str:
        """Return why a grammar cannot be compiled; empty where it can be, or is refused.

        Raises:
            BackendError: the process cannot be started.
        """
        failure = self._failures.get(grammar)
        if failure is None:
            with self._lock:
                failure = self._failures.get(grammar)  # another thread may have tried it
                if failure is None:
                    failure = self._failures[grammar] = self._tried(grammar)
                    while len(self._failures) > _KNOWN:
                        del self._failures[next(iter(self._failures))]
        return failure

    def _tried(self, grammar: str) -> str:
        is_new = self._connection is None
        connection = self._connection or self._start()
        try:
            connection.send_bytes(grammar.encode())
            if connection.poll(_MOST_S):
                connection.recv_bytes()
                return ""
            failure = f"it takes more than {_MOST_S:g} s"
        except (EOFError, OSError):
            failure = "it takes too much memory, or too deep a stack"
            if not is_new:  # but not for what others have left behind
                self._end()
                return self._tried(grammar)
        self._end()
        return failure

    def _start(self) -> Connection:
        connection, theirs = Pipe()
        fd = theirs.fileno()
        command = [sys.executable, "-P", str(grammar_compiler.__file__), str(fd)]
        failure = f"it has not begun in {_START_S:g} s"
        try:
            with theirs:
                process = subprocess.Popen(
                    command, pass_fds=[fd], stderr=subprocess.DEVNULL, start_new_session=True
                )
            self._kill = weakref.finalize(self, _kill, connection, process)
            connection.send_bytes(self._tokenizer)
            if connection.poll(_START_S):
                connection.recv_bytes()
                self._connection = connection
                return connection
        except (EOFError, OSError) as error:
            failure = f"{error}" or "it ends at once"
        self._end()
        raise BackendError(f"grammars are tried in a process of {sys.executable}: {failure}")

    def _end(self) -> None:
        self._kill()
        self._connection = None


def _kill(connection: Connection, process: "subprocess.Popen[bytes]") -> None:
    connection.close()
    process.kill()
    process.wait()
