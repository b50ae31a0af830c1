"""Which adapters a pipeline applies, and how strongly: its own, though it may share engines."""

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from trt_lora.plugins.errors import ConfigError, LoRAError
from trt_lora.runtime.adapters.blend import Strength
from trt_lora.runtime.generation.parameters.adapter_names import Adapters
from trt_lora.runtime.pipelines.adapters import PipelineAdapters, Weight

Strengths = Mapping[str, Strength]  # of one adapter, by component
_BLEND = "attached pipeline "  # beginning of the names of sums


class ActiveAdapters:
    """The active adapters of one pipeline; what they add up to is one adapter of the engines.

    A single adapter at its own strength is used as it is; else there is a blend, which is made
    anew when a strength changes.
    """

    def __init__(self, adapters: PipelineAdapters) -> None:
        """Take the adapters of all pipelines on the same engines."""
        self.all = adapters
        self.is_enabled = True
        self.loaded: list[str] = []  # by this pipeline
        self._parts: dict[str, Strengths] = {}
        self._scale = 1.0  # that a call multiplies every strength with
        self._pictures: list[str | None] = []  # adapters of the pictures of a batch, or none
        self._made: tuple[dict[str, Strengths], float] = ({}, 1.0)
        self._blend = f"{_BLEND}{id(self):x}"
        weakref.finalize(self, _forget, adapters, self._blend)

    @property
    def names(self) -> list[str]:
        """The active adapters, in the order in which they were named."""
        return [*self._parts, *dict.fromkeys(name for name in self._pictures if name is not None)]

    def known(self) -> list[str]:
        """Return every adapter of the engines, but for the sums of pipelines."""
        return [name for name in self.all.names if not name.startswith(_BLEND)]

    def set(self, parts: Mapping[str, Strengths]) -> None:
        """Make these the active adapters; what is refused leaves them as they were.

        Args:
            parts: adapter -> strengths; none is the base model.

        Raises:
            UnknownAdapterError, AdapterError: as `PipelineAdapters.blend`.
        """
        self._make(dict(parts), 1.0)
        self._parts, self._pictures = dict(parts), []

    def set_pictures(self, names: Sequence[str | None]) -> None:
        """Let each picture of a batch have its own adapter instead; None is the base model."""
        self.set({})
        self._pictures = [*names]

    def drop(self, names: Collection[str]) -> None:
        """Unload adapters from the engines, and apply what is left of the active ones.

        Raises:
            UnknownAdapterError: one is not loaded.
        """
        pictures = [None if name in names else name for name in self._pictures]
        self.set({name: by for name, by in self._parts.items() if name not in names})
        self._pictures = pictures if any(pictures) else []
        for name in names:
            self.all.unload(name)
        self.loaded = [name for name in self.loaded if name not in names]
        if not self._parts and self._blend in self.all.names:
            self.all.unload(self._blend)

    @contextmanager
    def scaled(self, scale: float) -> Iterator[None]:
        """Multiply every strength within, as `lora_scale` of a prompt does."""
        before, self._scale = self._scale, scale
        try:
            yield
        finally:
            self._scale = before

    @contextmanager
    def using(self, component: str, rows: Callable[[], int], scale: float) -> Iterator[Adapters]:
        """Yield what a component's engine is to run, which stays meanwhile; None is the base model.

        Args:
            component: its name.
            rows: counts those of its batch, where pictures have adapters of their own.
            scale: that multiplies every strength.

        Raises:
            UnknownAdapterError: an active adapter was unloaded.
            ConfigError: there is not a row, or as many for each, for every picture's own adapter.
            TensorError: nothing says how many rows there are.
        """
        scale *= self._scale
        adapter = self._of_rows(rows(), scale) if self._pictures else self._current(scale)
        with self.all.using(adapter) as stored:
            yield stored[component]

    def _of_rows(self, rows: int, scale: float) -> Adapters:
        """The adapter of each row: with guidance the pictures' follow one another twice."""
        if not self.is_enabled:
            return None
        times, rest = divmod(rows, len(self._pictures))
        if rest or scale != 1:
            raise ConfigError(
                f"{len(self._pictures)} pictures have adapters of their own, and a model is called "
                f"with {rows} rows at a scale of {scale}; give as many prompts as pictures, "
                "num_images_per_prompt=1, and strengths by blends of the engines' adapters"
            )
        return self._pictures * times

    def _current(self, scale: float) -> str | None:
        """The adapter that all active ones add up to; made anew where it has gone."""
        if not self.is_enabled or not self._parts or scale == 0:
            return None
        if self._is_plain(self._parts, scale):
            return next(iter(self._parts))
        if self._made != (self._parts, scale) or self._blend not in self.all.names:
            self._make(self._parts, scale)
        return self._blend

    def _make(self, parts: dict[str, Strengths], scale: float) -> None:
        if parts and not self._is_plain(parts, scale):
            weights: dict[str, Weight] = {
                name: {component: _times(strength, scale) for component, strength in by.items()}
                for name, by in parts.items()
            }
            self.all.blend(self._blend, weights, replace=True)
            self._made = parts, scale

    @staticmethod
    def _is_plain(parts: Mapping[str, Strengths], scale: float) -> bool:
        strengths = [strength for by in parts.values() for strength in by.values()]
        return scale == 1 and len(parts) == 1 and all(each == 1.0 for each in strengths)


def _forget(adapters: PipelineAdapters, name: str) -> None:
    """Unload the sum of a pipeline that is gone; closed engines have none."""
    with suppress(LoRAError):
        adapters.unload(name)


def _times(strength: Strength, scale: float) -> Strength:
    """A strength times a factor; what no prefix of a mapping names has 1.0 without it."""
    if isinstance(strength, Mapping):
        return {prefix: value * scale for prefix, value in {"": 1.0, **strength}.items()}
    return strength * scale
