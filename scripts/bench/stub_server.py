"""`trt-lora` whose server has an engine that computes nothing: the web's part is seen alone.

    python -m trt_lora.scripts.bench.stub_server ROWS MILLISECONDS serve ENGINE ...

ENGINE gives manifest and tokenizer. The stub is a process of its own, as an engine is: at every
step, of so many milliseconds, each request has a token.
"""

import socket
import subprocess
import sys
import threading
import time

from trt_lora.runtime.generation.token import Token
from trt_lora.runtime.server import running_server
from trt_lora.runtime.server.engine_process import wire
from trt_lora.scripts.trt_lora_command import main as trt_lora

_TIMES = wire.RequestTimes(None, 0, 0.0, 0.0, 0.0, 0.0)
Left = dict[int, int]  # tokens of each request that are to come, by its number


def main() -> None:
    """Run the command, or, where a socket is named, the engine's half."""
    rows, milliseconds, first, *words = sys.argv[1:]
    if first.isdigit():
        serve_stub(socket.socket(fileno=int(first)), int(rows), float(milliseconds) / 1e3)
    else:
        running_server.__dict__["start_process"] = lambda _: _start(rows, milliseconds)
        trt_lora([first, *words])


def _start(*arguments: str) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", __spec__.name, *arguments, str(theirs.fileno())]
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
    theirs.close()
    return ours, process


def serve_stub(connection: socket.socket, rows: int, seconds: float) -> None:
    """Answer what the web's process asks, until it has had enough.

    Args:
        connection: to the web's process.
        rows: that the engine is said to have.
        seconds: between two steps.
    """
    channel, left = wire.EngineChannel(connection), Left()
    threading.Thread(target=_run, args=(channel, left, seconds), daemon=True).start()
    for command in channel.commands():
        if isinstance(command, wire.Open):
            channel.send(wire.Answer(0, rows))
        elif isinstance(command, wire.Submit):
            channel.send(wire.Accepted(command.call, (command.call,)))
            channel.send(wire.Answer(command.call))
            left[command.call] = command.max_tokens[0]
        elif isinstance(command, wire.Ask):
            channel.send(wire.Answer(command.call))
        elif isinstance(command, wire.Close):
            break
    channel.close()


def _run(channel: wire.EngineChannel, left: Left, seconds: float) -> None:
    while True:
        time.sleep(seconds)
        if numbers := list(left):
            tokens = [_token(number, left) for number in numbers]
            ended = (token.sequence_id for token in tokens if token.finish_reason)
            channel.send(wire.Step(tokens, {}, len(numbers), times=dict.fromkeys(ended, _TIMES)))


def _token(number: int, left: Left) -> Token:
    left[number] -= 1
    if left[number]:
        return Token(number, 1, text=" word")
    del left[number]
    return Token(number, 1, "length", " word")


if __name__ == "__main__":
    main()
