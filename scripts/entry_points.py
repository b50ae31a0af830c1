"""Entry points of the installed commands: Ctrl-C ends them in one line from the first import on.

Nothing is imported at the top but what Python itself has imported: an interrupt there would show a
traceback.
"""

import os
import sys

INTERRUPTED = 130  # exit status: what a shell says of a process that SIGINT ended


def trt_lora() -> None:
    """Run `trt-lora`."""
    _run("trt_lora.scripts.trt_lora_command")


def build_engine() -> None:
    """Run `build-engine`."""
    _run("trt_lora.scripts.build_engine")


def _run(module: str) -> None:
    try:
        import signal
        from importlib import import_module

        # An exception would not do: some modules make an ImportError of it, and go on.
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, lambda *_: _end())
        import_module(module).main()
    except KeyboardInterrupt:
        _end()


def _end() -> None:
    if sys.stderr is not None:
        os.write(2, b"error: interrupted\n")
    os._exit(INTERRUPTED)
