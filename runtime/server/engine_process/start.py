"""Start the engine's half of a server: in a process of its own, or in a thread of this one."""

import signal
import socket
import subprocess
import sys
import threading

from trt_lora.runtime.server.engine_process.engine_side import serve_engine
from trt_lora.runtime.server.log_lines import LogConfig


def start_process(log: LogConfig) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Start a process that logs so.

    Returns:
        The socket that commands it, and the process, which ends with it.
    """
    ours, theirs = socket.socketpair()
    words = (str(theirs.fileno()), log.log_format, log.log_level)
    command = [sys.executable, "-P", "-m", __name__, *words]
    # In a group of its own: what a terminal sends to the web's group is the web's to follow.
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()], process_group=0)
    theirs.close()
    return ours, process


def start_thread() -> tuple[socket.socket, threading.Thread]:
    """Start a thread; return the socket that commands it, and the thread, which ends with it."""
    ours, theirs = socket.socketpair()
    name = "trt-lora-commands"
    thread = threading.Thread(target=serve_engine, args=(theirs,), name=name, daemon=True)
    thread.start()
    return ours, thread


def main() -> None:
    """Run an engine for the process that has the other end of a socket, and end when that does."""
    for ending in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ending, signal.SIG_IGN)
    number, log_format, log_level = sys.argv[1:]
    LogConfig(log_format, log_level).set_up()
    serve_engine(socket.socket(fileno=int(number)))


if __name__ == "__main__":
    main()
