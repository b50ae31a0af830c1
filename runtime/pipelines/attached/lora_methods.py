"""What diffusers' pipelines do with adapters, done by engines: the methods of its LoraBaseMixin.

https://huggingface.co/docs/diffusers/v0.42.0/api/loaders/lora
"""

import inspect
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from trt_lora.plugins.errors import AdapterError, ConfigError, StateError
from trt_lora.plugins.messages import did_you_mean, listed
from trt_lora.runtime.adapters.blend import Strength
from trt_lora.runtime.pipelines.attached.active_adapters import ActiveAdapters
from trt_lora.runtime.pipelines.attached.block_strengths import block_strengths, number


class LoraMethods:
    """The methods that reach into torch modules, in their place.

    Adapters are the engines', and every attached pipeline sees all of them by name; which are
    active, and at what strengths, is the pipeline's own.
    """

    engine_lora: ActiveAdapters
    components: dict[str, Any]  # of DiffusionPipeline
    _lora_loadable_modules: Sequence[str]
    _merged_adapters: set[str] = set()  # noqa: RUF012  # diffusers' own, never changed in place

    def load_lora_weights(
        self,
        pretrained_model_name_or_path_or_dict: str | Path | Mapping[str, Any],
        adapter_name: str | None = None,
        hotswap: bool = False,
        *,
        weight_name: str | None = None,
        subfolder: str | None = None,
        local_files_only: bool = True,
        low_cpu_mem_usage: bool = True,
    ) -> None:
        """Load an adapter into the engines of all components, and apply it alone.

        Args:
            pretrained_model_name_or_path_or_dict: a file or folder on this machine.
            adapter_name: left out, `default_0`, `default_1`, ...
            hotswap: replace the adapter that has the name; strengths stay.
            weight_name: a file of the folder; left out, the only one.
            subfolder: in that folder.
            local_files_only: of no effect: nothing is fetched.
            low_cpu_mem_usage: of no effect.

        Raises:
            AdapterError: there is no such file, the name is taken, or a tensor has no place.
            ConfigError: it is a state dict, or there is no adapter to replace.
        """
        if isinstance(pretrained_model_name_or_path_or_dict, Mapping):
            raise ConfigError(
                "load_lora_weights was given a state dict; write it with "
                "safetensors.torch.save_file, and pass the file"
            )
        path = _file_of(Path(pretrained_model_name_or_path_or_dict), subfolder, weight_name)
        known = self.engine_lora.known()
        free = (name for i in range(len(known) + 1) if (name := f"default_{i}") not in known)
        name = adapter_name or next(free)
        if hotswap:
            self._refuse_unknown([name])
        self.engine_lora.all.load(name, path, replace=hotswap)
        if not hotswap:
            self.engine_lora.loaded.append(name)
            self.set_adapters(name)

    def set_adapters(
        self,
        adapter_names: str | Sequence[str],
        adapter_weights: float | Mapping[str, Any] | Sequence[Any] | None = None,
    ) -> None:
        """Apply adapters at strengths, exactly their weighted sum, from the next run on.

        Args:
            adapter_names: one or several.
            adapter_weights: of all adapters, or a list of one for each: a number, or by component
                a number, or strengths by block (`block_strengths`) or by prefixes of module paths.
                What is left out has 1.0.

        Raises:
            ConfigError: an adapter or component is unknown, there are not as many weights as names,
                or one is no strength.
            AdapterError: ranks exceed the engine's together.
        """
        names = [adapter_names] if isinstance(adapter_names, str) else [*adapter_names]
        weights = adapter_weights if isinstance(adapter_weights, list | tuple) else None
        each = [*weights] if weights is not None else [adapter_weights] * len(names)
        if len(each) != len(names) or len({*names}) != len(names) or not names:
            raise ConfigError(
                f"{len(names)} adapters ({listed(names)}) have {len(each)} weights; pass one for "
                "each of at least one adapter, which is named once"
            )
        self._refuse_unknown(names)
        parts = zip(names, map(self._by_component, each), strict=True)
        self.engine_lora.set(dict(parts))

    def set_adapters_of_pictures(self, adapter_names: Sequence[str | None]) -> None:
        """Let each picture of a batch have its own adapter, until `set_adapters` is called.

        For engines that are built with `--max-loras`. diffusers has no such method.

        Args:
            adapter_names: one for each prompt, in their order; None is the base model.

        Raises:
            ConfigError: an adapter is unknown, or there is none.
        """
        names = [*adapter_names]
        if isinstance(adapter_names, str) or not names:
            raise ConfigError(f"adapter_names is {adapter_names!r}; pass a list of one a picture")
        self._refuse_unknown([name for name in names if name is not None])
        self.engine_lora.set_pictures(names)

    def get_active_adapters(self) -> list[str]:
        """Return the adapters that are applied, unless `disable_lora` was called."""
        return self.engine_lora.names

    def get_list_adapters(self) -> dict[str, list[str]]:
        """Return the adapters that have weights for each component."""
        found: dict[str, list[str]] = {}
        for name in self.engine_lora.known():
            for component, coverage in self.engine_lora.all.coverage(name).items():
                if coverage.adapted:
                    found.setdefault(component, []).append(name)
        return found

    def disable_lora(self) -> None:
        """Run the base model, until `enable_lora`."""
        self.engine_lora.is_enabled = False

    def enable_lora(self) -> None:
        """Apply the active adapters again."""
        self.engine_lora.is_enabled = True

    def delete_adapters(self, adapter_names: str | Sequence[str]) -> None:
        """Unload adapters from the engines; of those that were active the others stay so.

        Raises:
            ConfigError: one is unknown.
            StateError: one is fused.
        """
        names = [adapter_names] if isinstance(adapter_names, str) else [*adapter_names]
        self._refuse_unknown(names)
        self._refuse_fused(names)
        self.engine_lora.drop(names)

    def unload_lora_weights(self) -> None:
        """Run the base model, and unload the adapters that this pipeline has loaded.

        Raises:
            StateError: one is fused.
        """
        names = [name for name in self.engine_lora.loaded if name in self.engine_lora.known()]
        self._refuse_fused([*names, *self.get_active_adapters()])
        self.engine_lora.set({})
        self.engine_lora.drop(names)
        self.engine_lora.is_enabled = True

    def fuse_lora(
        self,
        components: Sequence[str] | None = None,
        lora_scale: float = 1.0,
        safe_fusing: bool = False,
        adapter_names: Sequence[str] | None = None,
    ) -> None:
        """Change nothing: weights stay inputs, and cost as little.

        Raises:
            ConfigError: a component is unknown, or what fusing would change is asked for.
        """
        self._check_components(components)
        active = self.get_active_adapters()
        if lora_scale != 1.0 or not {*active} <= {*(adapter_names or active)}:
            raise ConfigError(
                f"fuse_lora(lora_scale={lora_scale}, adapter_names={adapter_names}): an engine "
                f"applies what set_adapters says, {listed(active) or 'no adapter'}; call that"
            )
        self._merged_adapters = self._merged_adapters | {*active}

    def unfuse_lora(self, components: Sequence[str] | None = None) -> None:
        """Let fused adapters be unloaded again.

        Raises:
            ConfigError: a component is unknown.
        """
        self._check_components(components)
        self._merged_adapters = set()

    def set_lora_device(self, adapter_names: Sequence[str], device: Any) -> None:
        """Refuse: adapters lie where their engine reads them.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            f"set_lora_device({adapter_names!r}, {device!r}): adapters are inputs of the engines, "
            "and lie in their memory; open_pipeline(..., adapters=StoreConfig(...)) limits it"
        )

    def enable_lora_hotswap(self, target_rank: int = 0, check_compiled: str = "error") -> None:
        """Change nothing: an engine takes every adapter up to its own rank.

        Raises:
            ConfigError: that is lower than `target_rank`.
        """
        engines = [self.components[name].engine for name in self._lora_loadable_modules]
        least = min(engine.manifest.max_lora_rank for engine in engines)
        if target_rank > least:
            raise ConfigError(
                f"target_rank is {target_rank}, and the engines take ranks up to {least}; build "
                f"them with --max-lora-rank {target_rank}"
            )

    def encode_prompt(self, *args: Any, **kwargs: Any) -> Any:
        """Encode a prompt as the pipeline's class does, with its `lora_scale` of the encoders."""
        encode = super().encode_prompt  # type: ignore[misc]
        scale = inspect.signature(encode).bind(*args, **kwargs).arguments.get("lora_scale")
        with nullcontext() if scale is None else self.engine_lora.scaled(scale):
            return encode(*args, **kwargs)

    def _by_component(self, weight: Any) -> dict[str, Strength]:
        """The strengths of one adapter."""
        names = self._lora_loadable_modules
        given = weight if isinstance(weight, Mapping) else dict.fromkeys(names, weight)
        self._check_components([*given])
        return {name: self._strength(name, given.get(name)) for name in names}

    def _strength(self, component: str, weight: Any) -> Strength:
        if weight is None:
            return 1.0
        model = self.components[component]
        if isinstance(weight, Mapping) and "down_block_types" in model.config:
            paths = [site.path for site in model.engine.manifest.sites]
            return block_strengths(weight, model.config, paths)
        if isinstance(weight, Mapping):
            return {prefix: number(prefix, value) for prefix, value in weight.items()}
        return number(component, weight)

    def _check_components(self, components: Sequence[str] | None) -> None:
        known = self._lora_loadable_modules
        if unknown := [name for name in components or () if name not in known]:
            raise ConfigError(
                f"{unknown[0]!r} is none of the components that are engines: {listed(known)}"
                f"{did_you_mean(unknown[0], known)}"
            )
        if components is not None and not components:
            raise ConfigError(f"components is empty; choose from: {listed(known)}")

    def _refuse_unknown(self, names: Sequence[str]) -> None:
        known = self.engine_lora.known()
        if unknown := [name for name in names if name not in known]:
            raise ConfigError(
                f"no adapter is called {unknown[0]!r}; loaded: {listed(known) or 'none'}"
                f"{did_you_mean(unknown[0], known)}"
            )

    def _refuse_fused(self, names: Sequence[str]) -> None:
        if fused := [name for name in names if name in self._merged_adapters]:
            raise StateError(
                f"{listed(fused)} was fused, which an engine does not need: without its weights "
                "pictures would be the base model's; call unfuse_lora first"
            )


def _file_of(folder: Path, subfolder: str | None, weight_name: str | None) -> Path:
    """The file or folder that a call of `load_lora_weights` means.

    Raises:
        AdapterError: there is none.
    """
    folder = folder / (subfolder or "")
    if weight_name is not None:
        return folder / weight_name
    if not folder.exists():
        raise AdapterError(
            f"{folder} is no file or folder of this machine; fetch it first, for instance with: "
            f"hf download {folder}"
        )
    return folder
