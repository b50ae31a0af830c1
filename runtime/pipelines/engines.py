"""PipelineEngines: the engines of a pipeline's components, open or closed together."""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self

from trt_lora.plugins.checked import check_choice, checked
from trt_lora.plugins.errors import StateError
from trt_lora.plugins.extras import extra
from trt_lora.plugins.short_repr import clipped, short_value
from trt_lora.runtime.engine import Engine, open_engine
from trt_lora.runtime.generation.parameters.adapter_names import Adapters
from trt_lora.runtime.memory.dtypes import Array
from trt_lora.runtime.pipelines.adapters import PipelineAdapters
from trt_lora.runtime.pipelines.pipeline_file import read_pipeline
from trt_lora.runtime.store.config import StoreConfig


class PipelineEngines:
    """A directory of `build_pipeline` as a context manager: an engine for each component.

    Any number of threads may call its methods while it is open.
    """

    @checked
    def __init__(self, directory: Path, kind: str, engines: Mapping[str, Engine]) -> None:
        """Take what `open_pipeline` has read."""
        self.directory, self.kind = directory, kind
        self.engines = MappingProxyType(dict(engines))  # by component
        self._adapters: PipelineAdapters | None = None
        self._open = ExitStack()

    def __repr__(self) -> str:
        """Return where it is from, and its components."""
        state = "closed" if self._adapters is None else "open"
        names = ", ".join(self.engines)
        return clipped(f"<PipelineEngines {short_value(str(self.directory))}: {names}, {state}>")

    def __enter__(self) -> Self:
        """Load every engine, or none.

        Raises:
            BackendError, ConfigError: one cannot be loaded.
            StateError: they are open already.
        """
        with ExitStack() as stack:
            stores = {n: stack.enter_context(e).adapters for n, e in self.engines.items()}
            self._open = stack.pop_all()
        self._adapters = PipelineAdapters(stores)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close every engine, whatever one of them raises; see `Engine`."""
        self._adapters = None
        self._open.__exit__(kind, error, traceback)

    @property
    def adapters(self) -> PipelineAdapters:
        """The adapters of all engines.

        Raises:
            StateError: the engines are closed.
        """
        if self._adapters is None:
            raise StateError("the engines are closed; use them inside `with open_pipeline(...)`")
        return self._adapters

    @checked
    def attach(self, pipe: Any) -> Any:
        """Return a pipeline of diffusers that runs on the engines, and shares the rest with `pipe`.

        Its class is made of that of `pipe`; its LoRA methods load into `adapters`, and which of
        these are active, and how strongly, is its own. `pipe` stays as it is.

        Args:
            pipe: a `DiffusionPipeline` with the components of `engines`.

        Raises:
            BackendError: diffusers is not installed.
            ConfigError: `pipe` has no such component, or an engine was built from another kind of
                model.
            StateError: the engines are closed.
        """
        with extra("diffusion", "running diffusers' pipelines"):
            from trt_lora.runtime.pipelines.attached.attach import attach
        return attach(self.engines, self.adapters, pipe)

    @checked
    def run(
        self, component: str, inputs: Mapping[str, Array], *, adapter: Adapters = None
    ) -> dict[str, Array]:
        """Run one component with an adapter of the pipeline, which stays until it has run.

        Args:
            component: one of `engines`.
            inputs: as `Engine.run`.
            adapter: of all rows, or one for each, which may differ where the engine is built with
                `--max-loras`; None is the base model, as is one that has nothing for this
                component.

        Raises:
            ConfigError: there is no such component.
            TensorError, StateError, UnknownAdapterError: as `Engine.run`.
        """
        check_choice("component", component, self.engines)
        with self.adapters.using(adapter) as names:
            return self.engines[component].run(inputs, adapter=names[component])


@checked
def open_pipeline(
    directory: str | Path,
    backend: str = "auto",
    *,
    check: str = "fast",
    adapters: StoreConfig | None = None,
) -> PipelineEngines:
    """Return the engines of a pipeline, to be used as a context manager.

    Args:
        directory: what `build-engine --model PIPELINE_DIR --output` made, with pipeline.json.
        backend: of every engine; see `open_engine`.
        check: "fast" or "full"; see `open_executor`.
        adapters: how much memory the adapters of each engine may take.

    Raises:
        ManifestError: pipeline.json is missing or says what is not so, or an engine is incomplete.
        ConfigError, BackendError: as `open_engine`.
    """
    directory = Path(directory)
    file = read_pipeline(directory)
    engines = {
        component: open_engine(directory / name, backend, check=check, adapters=adapters)
        for component, name in file.components.items()
    }
    return PipelineEngines(directory, file.kind, engines)
