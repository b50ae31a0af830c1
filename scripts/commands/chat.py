"""`trt-lora chat`: a conversation in the terminal, with adapters switched between turns."""

import argparse
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trt_lora.plugins.errors import ConfigError, LoRAError
from trt_lora.runtime import Chat, Engine, SamplingParams, Scheduler, ServingConfig, open_engine
from trt_lora.runtime.generation.sequence import new_sequence
from trt_lora.runtime.generation.sources import refuse_encoder
from trt_lora.runtime.serving.generate import stream_from
from trt_lora.scripts.terminal.adapters import (
    BASE,
    BASE_NAME,
    adapter_in_use,
    adapter_or_base,
    adapter_paths,
    load_adapters,
    name_and_path,
)
from trt_lora.scripts.terminal.answering_options import (
    add_answering_options,
    sampling_params,
    standard_input,
    template_variables,
)
from trt_lora.scripts.terminal.console import FAILED
from trt_lora.scripts.terminal.line_editor import LineEditor
from trt_lora.scripts.terminal.printing import print_error, print_json, visible, visible_lines

HELP = """/use NAME            answer with an adapter from now on; NAME@0.5 at half its strength,
                     /use alone: the base model
/load NAME=PATH      load one more
/blend a=0.7 b=0.3   answer with a sum of adapters
/adapters            list them
/new                 forget the conversation
/quit                end (or Ctrl-D, or Ctrl-C twice)"""
_STATUS = "Where lines come from a file or a pipe, one that fails makes the exit status 2."
_BLEND, _QUIT = "blend", "/quit"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand."""
    parser.epilog = f"In the conversation:\n{HELP}\n\n{_STATUS}"
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("engine", type=Path, metavar="ENGINE", help="what build-engine made")
    add_answering_options(add)
    add("--json", action="store_true", help="print one JSON object a line instead, without prompts")
    parser.set_defaults(command=_chat)


def _chat(args: argparse.Namespace) -> None:
    standard_input("a conversation")
    sampling, variables = sampling_params(args, args.engine), template_variables(args)
    paths = adapter_paths(args.adapter)
    use = adapter_in_use(args.use, list(paths))
    with open_engine(args.engine, args.backend) as engine:
        refuse_encoder(engine.manifest, "trt-lora chat")
        load_adapters(engine.adapters, paths)
        adapter = adapter_or_base(engine.adapters, use)
        talk = Conversation(engine, adapter, sampling, variables, as_json=args.json)
        failed = talk.run()
    if failed and not sys.stdin.isatty():
        sys.exit(FAILED)


class Conversation:
    """Turns of a user and the engine."""

    def __init__(
        self,
        engine: Engine,
        adapter: str | None,
        sampling: SamplingParams,
        variables: Mapping[str, Any],
        *,
        as_json: bool = False,
    ) -> None:
        """Begin with nothing said; with `as_json`, every line said has a line of JSON.

        `variables` are those of the model's chat template.

        Raises:
            ConfigError: the engine has no tokenizer, or no turn could be sampled so.
            BackendError: llguidance is needed and not installed.
        """
        self._engine, self._adapter, self._sampling = engine, adapter, sampling
        self._variables = variables
        self._as_json, self._has_blend = as_json, False
        new_sequence((), sampling, engine.manifest, engine.tokenizer)
        self._scheduler = self._new_scheduler()
        self._messages: list[dict[str, str]] = []
        self._editor = LineEditor(self._completions)
        self._commands: dict[str, Callable[[list[str]], None]] = {
            "/use": self._use,
            "/load": self._load,
            "/blend": self._blend,
            "/adapters": self._list,
            "/new": self._forget,
            "/help": lambda _: self._show(HELP, {"help": HELP}),
        }

    def run(self) -> int:
        """Read lines until there are no more, or /quit; return how many failed.

        A mistake costs a message, not the talk; in a terminal, so does Ctrl-C.
        """
        failed = 0
        if self._editor.is_interactive:  # an interrupt is no end from here on, and not to be noted
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if self._editor.is_interactive and not self._as_json:
            print("type /help for commands, Ctrl-D to end")
        while (line := self._read()) is not None:
            words = line.split()
            if words and words[0] == _QUIT:
                break
            try:
                if words and words[0].startswith("/"):
                    self._command(words)
                elif words:
                    self._answer(line)
            except LoRAError as error:
                failed += 1
                self._show_error(type(error).__name__, str(error))
            except KeyboardInterrupt:
                if not self._editor.is_interactive:
                    raise
                self._show_error(KeyboardInterrupt.__name__, "interrupted")
        return failed

    def _show(self, text: str, fields: dict[str, object]) -> None:
        if self._as_json:
            print_json(fields, indent=None)
        else:
            print(text)

    def _show_error(self, kind: str, message: str) -> None:
        if self._as_json:
            print_error(kind, message)
        else:
            print(f"error: {visible_lines(message)}")

    def _read(self) -> str | None:
        """The next line; None where there is none, or Ctrl-C comes twice without one."""
        name = self._adapter or BASE
        prompt = "" if self._as_json else f"{visible(name)}> "
        for hint in ("\n(Ctrl-C again, or Ctrl-D, ends)", ""):
            try:
                return self._editor.read(prompt)
            except EOFError:
                break
            except KeyboardInterrupt:
                if not self._editor.is_interactive:
                    raise
                print(end="" if self._as_json or not hint else f"{hint}\n")
        print(end="" if self._as_json else "\n")
        return None

    def _completions(self, line: str) -> list[str]:
        *before, word = line.split(" ")
        names = self._engine.adapters.names
        choices = {
            "": [f"{command} " for command in (*self._commands, _QUIT)],
            "/use": [*names, BASE_NAME],
            "/blend": [f"{name}=" for name in names],
        }
        known = choices.get(before[0] if before else "", [])
        return [choice for choice in known if choice.startswith(word)]

    def _command(self, words: list[str]) -> None:
        if words[0] not in self._commands:
            raise ConfigError(f"there is no {words[0]}; commands:\n{HELP}")
        self._commands[words[0]](words[1:])

    def _answer(self, line: str) -> None:
        """Stream an answer; in a terminal Ctrl-C ends it, and what was said so far stays."""
        messages = [*self._messages, {"role": "user", "content": line}]
        said: list[str] = []
        chat = Chat(messages, chat_template_kwargs=self._variables)
        pieces = stream_from(self._scheduler, chat, self._sampling, adapter=self._adapter)
        try:
            for piece in pieces:
                said.append(piece)
                if not self._as_json:
                    print(piece, end="", flush=True)
        except KeyboardInterrupt:
            self._scheduler = self._new_scheduler()  # whatever was interrupted
            if not self._editor.is_interactive:
                raise
        text = "".join(said)
        self._show("", {"adapter": self._adapter or "", "prompt": line, "text": text})
        self._messages = [*messages, {"role": "assistant", "content": text}]

    def _new_scheduler(self) -> Scheduler:
        """A cache for one sequence, which keeps what was said."""
        return self._engine.serve(ServingConfig(rows=1))

    def _use(self, words: list[str]) -> None:
        self._adapter = adapter_or_base(self._engine.adapters, " ".join(words))
        self._done("/use")

    def _load(self, words: list[str]) -> None:
        name, path = name_and_path(" ".join(words), "/load")
        self._engine.adapters.load(name, path)
        self._done("/load")

    def _blend(self, words: list[str]) -> None:
        parts = {}
        for word in words:
            name, _, weight = word.partition("=")
            try:
                parts[name] = float(weight)
            except ValueError:
                raise ConfigError(f"/blend got {word!r}, expected NAME=WEIGHT: a=0.7") from None
        if _BLEND in self._engine.adapters.names and not self._has_blend:
            raise ConfigError(f"an adapter of yours is named {_BLEND!r}; load it by another name")
        self._engine.adapters.blend(_BLEND, parts, replace=True, at_once=True)
        self._has_blend, self._adapter = True, _BLEND
        self._done("/blend")

    def _list(self, words: list[str]) -> None:
        del words
        active, names = self._adapter or "", ["", *self._engine.adapters.names]
        lines = [f"{'*' if name == active else ' '} {visible(name or BASE)}" for name in names]
        self._show("\n".join(lines), {"adapters": names, "active": active})

    def _forget(self, words: list[str]) -> None:
        del words
        self._messages = []
        self._done("/new")

    def _done(self, command: str) -> None:
        """Say that a command succeeded which shows a person nothing: a program waits for a line."""
        if self._as_json:
            print_json({"command": command, "adapter": self._adapter or ""}, indent=None)
