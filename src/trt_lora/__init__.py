"""TensorRT engines whose LoRA adapters are inputs; the folders beside this file are subpackages."""

TYPE_CHECKING = False  # as type checkers know it; `typing` would be the command's first import

if TYPE_CHECKING:
    __version__: str


def __getattr__(name: str) -> object:
    """Return `__version__`, read from the installed package when it is first asked for, and kept.

    Reading takes a millisecond, and every answer of a server names the version.

    Raises:
        PackageNotFoundError: (an ImportError) the checkout is on the path, and not installed.
    """
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import version

    found = globals()[name] = version("trt-lora")
    return found
