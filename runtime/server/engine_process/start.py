"""Start the engine's half of a server: in a process of its own, or in a thread of this one."""

import signal
import socket
import subprocess
import sys
import threading

from trt_lora.runtime.server.engine_process.engine_side import serve_engine


def start_process() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Start a process; return the socket that commands it, and the process, which ends with it."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-P", "-m", __name__, str(theirs.fileno())]
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
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    serve_engine(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    main()
