"""Grammars compiled by llguidance, here or in a process of their own.

The only file that imports llguidance. It imports nothing of ours: the process runs it by its path.
"""

import json
import signal
import sys
import threading
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# What one token may cost: 30 ms at the worst that we found, where a text can be read in more and
# more ways (`e: e e | e e e | "a"`), and then it is an error. Schemas of 200 alternatives or 200
# optional fields need less, and 0.2 ms a token.
_LIMITS = {
    "max_items_in_row": 1_000,
    "step_max_items": 3_000,
    "step_lexer_fuel": 50_000,
    "max_grammar_size": 10_000,
    "max_lexer_states": 20_000,
    "verbose_errors": False,  # they show the tokens so far
}
# Otherwise text that nothing else can follow is written ahead, which may be without an end.
_NO_FORCING = '%llguidance {"no_forcing": true}\nstart: @answer'

_MEMORY = 64 << 20  # bytes, most, of the grammars that the process has compiled
# The process has an eighth of a thread's usual stack, so that what it survives is no danger here:
# grammars are compiled recursively, and without stack the whole process dies.
_STACK = 1 << 20
_ORPHANED_S = 10  # after which a grammar ends the process, if nothing else does


def new_tokenizer(tokenizer_json: str, vocabulary: int, stop: int) -> "LLTokenizer":
    """Read a tokenizer; takes half a second, in which no other thread runs.

    Raises:
        ImportError: llguidance is not installed.
        ValueError: it cannot read the tokenizer.
    """
    from llguidance import LLTokenizer

    return LLTokenizer(tokenizer_json, n_vocab=vocabulary, eos_token=[stop])


def serialized(kind: str, text: str) -> str:
    """Return a JSON schema, a regex or a Lark grammar as llguidance takes it."""
    from llguidance import LLMatcher

    answer = f'"json_schema": {text}'
    if kind != "json":
        if kind == "regex":
            (entry,) = json.loads(LLMatcher.grammar_from_regex(text))["grammars"]
            text = entry["lark_grammar"]
        answer = f'"lark_grammar": {json.dumps(text)}'
    start = json.dumps({"name": "start", "lark_grammar": _NO_FORCING})
    return f'{{"grammars": [{start}, {{"name": "answer", {answer}}}]}}'


def compiled(tokenizer: "LLTokenizer", grammar: str) -> "LLMatcher":
    """Return what follows a grammar; its `get_error` says why it is refused."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(**_LIMITS)  # type: ignore[arg-type]
    return LLMatcher(tokenizer, grammar, log_level=0, limits=limits)


def _serve(connection: Connection) -> None:
    """Compile grammars, and answer when each is over, until the other end is closed."""
    import resource

    tokenizer = new_tokenizer(*json.loads(connection.recv_bytes()))
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + _MEMORY, used + _MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    connection.send_bytes(b"")
    while True:
        grammar = connection.recv_bytes().decode()
        signal.alarm(_ORPHANED_S)
        compiled(tokenizer, grammar).compute_bitmask()
        signal.alarm(0)
        connection.send_bytes(b"")


def _main() -> None:
    threading.stack_size(_STACK)
    thread = threading.Thread(target=_serve, args=(Connection(int(sys.argv[1])),))
    thread.start()
    thread.join()


if __name__ == "__main__":
    _main()
