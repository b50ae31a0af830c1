"""Locked updates of a manager's state: slow work outside the lock, then one swap."""

from threading import Lock

from trt_lora.plugins.errors import AdapterError, StateError
from trt_lora.runtime.adapters.adapter import Adapter
from trt_lora.runtime.adapters.fitting.coverage import Coverage
from trt_lora.runtime.adapters.fitting.coverage_warnings import log_warnings
from trt_lora.runtime.engines.engine import Executor
from trt_lora.runtime.managers.arguments import check_new_name
from trt_lora.runtime.managers.engine_bindings import EngineBindings
from trt_lora.runtime.managers.loaded_adapter import LoadedAdapter, PendingAdapter
from trt_lora.runtime.managers.manager_state import ManagerState
from trt_lora.runtime.memory.host import Stream


class AdapterRegistry:
    """The current state of a manager; readers take `state` once and hold no lock."""

    def __init__(self) -> None:
        self.state = ManagerState()  # replaced as a whole, by whoever has the lock
        self._lock = Lock()

    def check_name(self, name: str, *, replace: bool) -> None:
        """Refuse a name that cannot be registered.

        Raises:
            AdapterError: it is no name, or is taken and `replace` is not given.
        """
        check_new_name(name)
        adapters = self.state.adapters
        if name in adapters and not replace:
            raise AdapterError(
                f"an adapter named {name!r} is loaded already; choose another name than "
                f"{', '.join(adapters)}, or pass replace=True"
            )

    def add(
        self,
        name: str,
        adapter: Adapter,
        stream: Stream = None,
        *,
        strict: bool = True,
        replace: bool,
    ) -> Coverage | None:
        """Fit an adapter without the lock, then publish it under the name.

        Raises:
            AdapterError: the name was taken meanwhile, or the engine cannot take the adapter.
        """
        engine = self.state.engine
        loaded = _load(engine, adapter, stream, strict=strict)
        with self._lock:
            if self.state.engine is not engine:  # bound by another thread meanwhile
                loaded = _load(self.state.engine, adapter, stream, strict=strict)
            self.check_name(name, replace=replace)
            replaces = name in self.state.adapters
            self.state = self.state.with_adapter(name, loaded)
            if replaces:
                self._release_inputs()
        _log(loaded)
        return loaded.coverage

    def remove(self, name: str, *, force: bool) -> None:
        """Forget an adapter; see `LoRAManager.unload`."""
        with self._lock:
            self.state.get(name)
            active = self.state.active
            if active and active.name == name and not force:
                raise StateError(
                    f"adapter {name!r} is active; switch to another or call reset_weights first, "
                    "or pass force=True, which leaves the base model active"
                )
            self.state = self.state.without(name)
            self._release_inputs()

    def switch(self, name: str, scale: float) -> None:
        """Activate an adapter at a strength; see `LoRAManager.switch_weights`."""
        with self._lock:
            self.state = self.state.switched(name, scale)

    def activate_base(self) -> None:
        """Deactivate any adapter."""
        with self._lock:
            self.state = self.state.with_base_active()

    def bind(self, executor: Executor) -> None:
        """Fit every adapter to an engine; see `LoRAManager.initialize_engine_bindings`."""
        with self._lock:
            if self.state.engine is not None:
                raise StateError(
                    "this manager has an engine already; make a LoRAManager per engine"
                )
            self.state = self.state.bound_to(executor)
            for loaded in self.state.adapters.values():
                _log(loaded)

    def _release_inputs(self) -> None:
        """Let the engine go of its last inputs, or their memory would wait for its next run."""
        if self.state.engine is not None:
            self.state.engine.release_inputs()


def _load(
    engine: EngineBindings | None, adapter: Adapter, stream: Stream, *, strict: bool
) -> LoadedAdapter:
    if engine is None:
        return PendingAdapter.from_adapter(adapter, strict=strict)
    return engine.load(adapter, strict=strict, stream=stream)


def _log(loaded: LoadedAdapter) -> None:
    if loaded.coverage is not None:
        log_warnings(loaded.coverage.source, loaded.coverage.warnings)
