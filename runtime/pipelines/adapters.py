"""PipelineAdapters: adapters by name over the engines of a pipeline, on all of them or on none."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from threading import Lock

from trt_lora.plugins.checked import check_choice, checked
from trt_lora.plugins.errors import AdapterError, LoRAError, UnknownAdapterError
from trt_lora.plugins.messages import did_you_mean, shown
from trt_lora.runtime.adapters.adapter import Adapter
from trt_lora.runtime.adapters.blend import Strength
from trt_lora.runtime.adapters.fitting.coverage import Coverage
from trt_lora.runtime.adapters.fitting.coverage_warnings import log_warnings
from trt_lora.runtime.adapters.load import file_versions
from trt_lora.runtime.generation.parameters.adapter_names import Adapters
from trt_lora.runtime.pipelines.adapter_parts import adapter_parts
from trt_lora.runtime.pipelines.versions import Version, Versions
from trt_lora.runtime.store.names import check_parts
from trt_lora.runtime.store.store import AdapterStore

_LOG = logging.getLogger(__name__)

Weight = float | Mapping[str, Strength]  # of all components, or by component

_Action = Callable[[AdapterStore, str], Coverage]  # of a store, and the name to give in it


class PipelineAdapters:
    """Named adapters of a pipeline's engines; any thread may call it.

    Every call takes effect on all components or on none: what is new comes into each store under a
    name that only this object knows, then the name of the adapter means it everywhere at once, and
    then the stores forget what was there before. An adapter that has nothing for a component leaves
    it the base model. A blend is gone when one of its parts is unloaded or replaced.
    """

    @checked
    def __init__(self, stores: Mapping[str, AdapterStore]) -> None:
        """Take the stores of the engines, by component."""
        self._stores, self._versions, self._numbers = stores, Versions(), count(1)
        self._lock, self._unwanted = Lock(), dict[tuple[str, str], None]()

    def __repr__(self) -> str:
        """Return how many adapters there are, over which components."""
        return f"<PipelineAdapters: {len(self.names)} over {', '.join(self._stores)}>"

    @property
    def names(self) -> tuple[str, ...]:
        """The adapters, in the order of loading."""
        return self._versions.names

    @checked
    def coverage(self, name: str) -> dict[str, Coverage]:
        """Return what became of an adapter's tensors, by component that it changes.

        Raises:
            UnknownAdapterError: no adapter has that name.
        """
        return dict(self._versions.get(name).coverage)

    @checked
    def load(
        self, name: str, path: str | Path, *, strict: bool = True, replace: bool = False
    ) -> dict[str, Coverage]:
        """Read an adapter into the memory of every engine that it has tensors for.

        Args:
            name: what it is called from then on.
            path: what `load_adapter` reads; or a directory with a directory for each component,
                `unet/` and `text_encoder/`, as PEFT's examples save them.
            strict: False leaves tensors that no component takes out and lists them, instead of
                refusing the adapter.
            replace: take the place of an adapter of that name, if there is one.

        Returns:
            The coverage of each component that it changes; `unexpected_keys` are the tensors that
            no component takes.

        Raises:
            AdapterError: the name is taken or is no name, the adapter cannot be read, or no
                component, or more than one, takes one of its tensors.
            StateError: memory has no room.
        """
        self._versions.check_new(name, replace=replace)
        path = Path(path).absolute()
        manifests = {component: store.manifest for component, store in self._stores.items()}
        parts = adapter_parts(path, manifests, strict=strict)
        before = [file_versions(each) for each in parts.paths.values()]

        def action(own: Path) -> _Action:
            return lambda store, stored: parts.told(store.load(stored, own, strict=False))

        actions = {component: action(own) for component, own in parts.paths.items()}
        with self._coming(name, actions) as version:
            if [file_versions(each) for each in parts.paths.values()] != before:
                raise AdapterError(f"{path} changed while it was read; load it again")
            retired = self._versions.set(version, replace=replace)
        self._forget(retired)
        if parts.left_over:
            log_warnings(
                str(path), [f"{len(parts.left_over)} of its tensors are taken by no engine"]
            )
        return dict(version.coverage)

    @checked
    def add(self, name: str, adapters: Mapping[str, Adapter], *, replace: bool = False) -> None:
        """Keep adapters whose weights are in memory, one for each component that it changes.

        Raises:
            AdapterError, StateError: as `load`.
            ConfigError: the pipeline has no such component.
        """
        self._versions.check_new(name, replace=replace)
        for component in adapters:
            check_choice("component", component, self._stores)

        def action(adapter: Adapter) -> _Action:
            return lambda store, stored: store.add(stored, adapter)

        with self._coming(name, {c: action(each) for c, each in adapters.items()}) as version:
            retired = self._versions.set(version, replace=replace)
        self._forget(retired)

    @checked
    def blend(self, name: str, parts: Mapping[str, Weight], *, replace: bool = False) -> None:
        """Let a name mean a weighted sum of adapters, on every component that one of them changes.

        It is made at once. One that replaces a blend of the same adapters takes the memory of the
        one before that, so that a strength may change between any two runs.

        Args:
            name: what the sum is called from then on.
            parts: adapter -> its weight, or its strengths by component (see `AdapterStore.blend`),
                which are 1 where they are left out, as in diffusers:
                `{"a": 0.7, "b": {"unet": {"up_blocks": 0.5}, "text_encoder": 0.0}}`.
            replace: as `load`.

        Raises:
            UnknownAdapterError: no adapter has the name of a part.
            AdapterError: the name is taken, is no name or that of a part, a weight is no finite
                number or of no component, there are no parts, or a sum leaves an engine's limits.
            StateError: memory has no room.
        """
        self._versions.check_new(name, replace=replace)
        check_parts(name, dict.fromkeys(parts, 1.0))
        for weight in parts.values():
            self._check_components(name, weight)
        with self._held(parts) as versions:
            weights = list(zip(versions, parts.values(), strict=True))
            actions = {c: _blending(c, weights) for c in self._stores if _changes(c, versions)}
            with self._coming(name, actions, tuple(versions)) as version:
                retired = self._versions.set(version, replace=replace)
            self._forget(retired)

    @checked
    def unload(self, name: str) -> None:
        """Forget an adapter, and blends of it; runs that hold it end with it.

        Raises:
            UnknownAdapterError: no adapter has that name.
        """
        self._forget(self._versions.remove(name))

    @checked
    def on(self, component: str, name: str | None) -> str | None:
        """Return what `Engine.run(adapter=)` of a component takes for an adapter; None: the base.

        It is a name in that engine's store, of the version that the adapter's name means at this
        moment. It promises nothing for later: once another thread has replaced the adapter the run
        may not find it, and two calls may be of two versions. `using` resolves a name once for all
        components, and keeps what it means.

        Raises:
            ConfigError: the pipeline has no such component.
            UnknownAdapterError: no adapter has that name.
        """
        check_choice("component", component, self._stores)
        return None if name is None else self._versions.get(name).stored.get(component)

    @checked
    @contextmanager
    def using(self, adapter: Adapters) -> Iterator[dict[str, Adapters]]:
        """Yield what `Engine.run(adapter=)` takes for every component, of one version of each name.

        Another thread that replaces, blends or unloads an adapter changes nothing for the block.

        Args:
            adapter: of all rows, or a list of one for each; None is the base model.

        Raises:
            UnknownAdapterError: no adapter has a name.
        """
        names = [adapter] if adapter is None or isinstance(adapter, str) else adapter
        known = dict.fromkeys(name for name in names if name is not None)
        with self._held(known) as versions:
            stored = {name: each.stored for name, each in zip(known, versions, strict=True)}
            rows = {
                component: [stored.get(name or "", {}).get(component) for name in names]
                for component in self._stores
            }
            yield {c: own[0] if len({*own}) == 1 else own for c, own in rows.items()}

    @contextmanager
    def _held(self, names: Iterable[str]) -> Iterator[list[Version]]:
        versions = self._versions.hold(names)
        try:
            yield versions
        finally:
            self._forget(self._versions.release(versions))

    @contextmanager
    def _coming(
        self, name: str, actions: Mapping[str, _Action], parts: tuple[Version, ...] = ()
    ) -> Iterator[Version]:
        """Do something in the store of each component, and undo all of it if the block fails."""
        spare = self._versions.take_spare(name, parts) if parts else None
        stored = dict(spare.stored) if spare else {}
        fresh = f"{name} ({next(self._numbers)})"
        stored = {component: stored.get(component, fresh) for component in actions}
        version = Version(name, stored, parts=parts)
        try:
            for component, action in actions.items():
                coverage = action(self._stores[component], stored[component])
                version.coverage[component] = coverage
            yield version
        except BaseException:
            if not version.is_named:
                self._drop(stored)
            raise

    def _forget(self, versions: list[Version]) -> None:
        for version in versions:
            self._drop(version.stored)

    def _drop(self, stored: Mapping[str, str]) -> None:
        """Let stores forget adapters that nothing means; one that cannot is asked again later."""
        with self._lock:
            self._unwanted |= dict.fromkeys(stored.items())
            unwanted = list(self._unwanted)
        for component, own in unwanted:
            try:
                self._stores[component].unload(own)
            except UnknownAdapterError:  # it never came, or went with a part
                pass
            except LoRAError as error:
                _LOG.warning("%s: %s has no name, and stays in memory: %s", component, own, error)
                continue
            with self._lock:
                self._unwanted.pop((component, own), None)

    def _check_components(self, name: str, weight: Weight) -> None:
        for component in weight if isinstance(weight, Mapping) else ():
            if component not in self._stores:
                raise AdapterError(
                    f"blend {name!r}: {shown(component)} is no component of this pipeline; it has: "
                    f"{', '.join(self._stores)}{did_you_mean(component, self._stores)}"
                )


def _changes(component: str, versions: list[Version]) -> bool:
    return any(component in version.stored for version in versions)


def _blending(component: str, parts: list[tuple[Version, Weight]]) -> _Action:
    weights = {
        version.stored[component]: weight.get(component, 1.0)
        if isinstance(weight, Mapping)
        else weight
        for version, weight in parts
        if component in version.stored
    }
    return lambda store, stored: store.blend(stored, weights, replace=True, at_once=True)
