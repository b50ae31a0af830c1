"""Immutable snapshot of a manager: engine, resident adapters, and the active one."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from trt_lora.plugins.errors import UnknownAdapterError
from trt_lora.plugins.messages import did_you_mean, shown
from trt_lora.runtime.engines.engine import Executor
from trt_lora.runtime.managers.arguments import check_string
from trt_lora.runtime.managers.engine_bindings import EngineBindings
from trt_lora.runtime.managers.loaded_adapter import Bindings, LoadedAdapter


@dataclass(frozen=True)
class Active:
    """An adapter at a strength."""

    name: str
    scale: float
    tensors: Bindings  # as in `LoadedAdapter`, every B times the scale
    bound: Bindings


@dataclass(frozen=True)
class ManagerState:
    """The engine, the adapters, and which of them is active.

    It keeps alive the adapters, the engine's zero buffer, and every B of `scaled`. What is active
    is an adapter as it was loaded, or `scaled`.
    """

    engine: EngineBindings | None = None
    adapters: Mapping[str, LoadedAdapter] = field(default_factory=dict)
    active: Active | None = None  # None is the base model
    scaled: Active | None = None  # the last strength other than 1, for a switch back to it

    def get(self, name: str) -> LoadedAdapter:
        """Return a loaded adapter.

        Raises:
            UnknownAdapterError: there is none of that name.
            AdapterError: the name is no string.
        """
        check_string(name, "the name of an adapter")
        if name not in self.adapters:
            raise UnknownAdapterError(
                f"unknown adapter {shown(name)}; loaded: {', '.join(self.adapters) or 'none'}"
                f"{did_you_mean(name, self.adapters)}"
            )
        return self.adapters[name]

    def switched(self, name: str, scale: float) -> "ManagerState":
        """Activate an adapter at a strength.

        Raises:
            UnknownAdapterError: it is not loaded.
            AdapterError: a B times the scale leaves the range of its dtype.
        """
        loaded = self.get(name)
        if scale == 1:
            return replace(self, active=Active(name, 1.0, loaded.tensors, loaded.bound))
        kept = self.scaled
        if kept is None or (kept.name, kept.scale) != (name, scale):
            kept = Active(name, scale, *loaded.at_strength(scale))
        return replace(self, active=kept, scaled=kept)

    def with_base_active(self) -> "ManagerState":
        """Deactivate any adapter."""
        return replace(self, active=None)

    def with_adapter(self, name: str, loaded: LoadedAdapter) -> "ManagerState":
        """Add an adapter, or put it in the place of one; if that is active, so is the new one.

        Raises:
            AdapterError: the new one does not allow the strength of the old one.
        """
        state = replace(self._without_strength_of(name), adapters={**self.adapters, name: loaded})
        if self.active and self.active.name == name:
            return state.switched(name, self.active.scale)
        return state

    def without(self, name: str) -> "ManagerState":
        """Forget an adapter; if it is active, the base model is active afterwards."""
        rest = {other: loaded for other, loaded in self.adapters.items() if other != name}
        active = self.active if self.active and self.active.name != name else None
        return replace(self._without_strength_of(name), adapters=rest, active=active)

    def bound_to(self, executor: Executor) -> "ManagerState":
        """Fit every adapter to an engine, the active one at its strength.

        Raises:
            AdapterError: the engine cannot take one of them.
        """
        engine = EngineBindings.from_executor(executor)
        adapters = {
            name: engine.load(pending.adapter, strict=pending.strict)
            for name, pending in self.adapters.items()
        }
        state = ManagerState(engine, adapters)
        return state.switched(self.active.name, self.active.scale) if self.active else state

    def _without_strength_of(self, name: str) -> "ManagerState":
        return replace(self, scaled=None) if self.scaled and self.scaled.name == name else self
