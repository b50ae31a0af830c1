"""Data loader of one engine for polygraphy, and errors in polygraphy's form."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from polygraphy.logger import G_LOGGER

from trt_lora.plugins.errors import LoRAError
from trt_lora.runtime.manifest import read_manifest
from trt_lora.scripts.terminal.console import warnings_shown
from trt_lora.scripts.verification.example_inputs import Inputs, InputSpec, make_inputs


@contextlib.contextmanager
def polygraphy_errors() -> Iterator[None]:
    """Report an input's fault as polygraphy reports its own, and warnings as its own.

    A fault is one message, and ends with exit status 1.
    """
    try:
        with warnings_shown(G_LOGGER.warning):
            yield
    except LoRAError as error:
        message = str(error)
    except OSError as error:
        message = f"{error.strerror or error}: {error.filename}"
    else:
        return
    G_LOGGER.critical(message)  # raises PolygraphyException, whose context says no more


class LoraInputs(list[Inputs]):
    """A data loader: every input of every iteration, for `Comparator.run` and `--gen-script`.

    They are made at once, so that what is wrong is said before a model is loaded.
    """

    def __init__(
        self,
        engine: str,
        *,
        adapter: str | None = None,
        prompt: str | None = None,
        shape: tuple[int, int] | None = None,
        seed: int = InputSpec.seed,
        iterations: int = InputSpec.iterations,
    ) -> None:
        """Make them; the arguments are those of `InputSpec`.

        Raises:
            PolygraphyException: no inputs can be made of them; the message is logged.
        """
        with polygraphy_errors():
            path = Path(adapter) if adapter is not None else None
            spec = InputSpec(path, prompt, shape, seed, iterations)
            super().__init__(make_inputs(Path(engine), read_manifest(Path(engine)), spec))
