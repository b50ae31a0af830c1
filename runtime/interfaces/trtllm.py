"""TensorRT-LLM's LoRA requests, and the cache of their tasks, over `AdapterStore`."""

import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

import numpy as np

from trt_lora.plugins.checked import check_fields, check_range, checked
from trt_lora.plugins.errors import AdapterError, ConfigError, UnknownAdapterError
from trt_lora.plugins.messages import shown
from trt_lora.plugins.short_repr import short_repr
from trt_lora.runtime.adapters.formats.trtllm import adapter_from_trtllm_arrays
from trt_lora.runtime.interfaces.agreed_limits import check_rank
from trt_lora.runtime.manifest import Manifest
from trt_lora.runtime.memory.dtypes import Array
from trt_lora.runtime.memory.interop import tensor_from
from trt_lora.runtime.store.config import StoreConfig
from trt_lora.runtime.store.entry import Lease
from trt_lora.runtime.store.store import AdapterStore

__all__ = ["LoraCacheOptions", "PeftCacheManager", "PeftTaskNotCachedError", "TrtllmLoraRequest"]

_TASK_IDS = range(1 << 64)  # TensorRT-LLM's are unsigned integers of 64 bits


@short_repr
@dataclass(frozen=True, eq=False)
class TrtllmLoraRequest:
    """`lora_task_id`, `lora_weights` and `lora_config`; none of them asks for the base model."""

    lora_task_id: int | None = None
    # Each a numpy array, or what `tensor_from` takes, such as a torch tensor.
    lora_weights: object | None = None  # [rows, width] or [1, rows, width]
    lora_config: object | None = None  # int32 [rows, 3 or 4] or [1, rows, 3 or 4]

    def __post_init__(self) -> None:
        """Check that what must come together does.

        Raises:
            AdapterError: weights come without a config or the reverse, or without an id, or the id
                is none.
        """
        has_weights, has_config = self.lora_weights is not None, self.lora_config is not None
        if has_weights != has_config:
            missing = "lora_config" if has_weights else "lora_weights"
            raise AdapterError(f"{missing} is missing: lora_weights and lora_config come together")
        if self.lora_task_id is None:
            if has_weights:
                raise AdapterError("lora_task_id must be set for LoRA inference")
        else:
            _check_task_id("lora_task_id", self.lora_task_id)

    @property
    def arrays(self) -> tuple[Array, Array] | None:
        """Weights and config on the host; None if they did not come.

        Raises:
            TensorError: one is no tensor, or of a dtype or layout that is not supported.
        """
        if self.lora_weights is None or self.lora_config is None:
            return None
        weights, config = (
            given if isinstance(given, np.ndarray) else tensor_from(given).read_storage()
            for given in (self.lora_weights, self.lora_config)
        )
        return weights, config


@short_repr
@dataclass(frozen=True)
class LoraCacheOptions:
    """The four `lora_cache_*` parameters; None is the engine's own, or no limit.

    An "adapter size" is a rank. TensorRT-LLM sizes the pages of its cache by the two; slots have
    the engine's maximum rank, and its profiles the optimal one, so both have to be the engine's.
    """

    lora_cache_optimal_adapter_size: int | None = None
    lora_cache_max_adapter_size: int | None = None
    lora_cache_gpu_memory_fraction: float | None = None  # (0, 1] of the free memory of the device
    lora_cache_host_memory_bytes: int | None = 1 << 30

    def __post_init__(self) -> None:
        """Refuse what is no value of an option.

        Raises:
            ConfigError: a field has another type.
        """
        check_fields(self)

    @checked
    def store_config(self, manifest: Manifest) -> StoreConfig:
        """Return the two sizes as an `AdapterStore` takes them.

        Raises:
            ConfigError: an option is not what the engine has, or no size.
        """
        check_rank("lora_cache_max_adapter_size", self.lora_cache_max_adapter_size, manifest)
        optimal = self.lora_cache_optimal_adapter_size
        if optimal not in (None, manifest.opt_lora_rank):
            raise ConfigError(
                f"lora_cache_optimal_adapter_size is {optimal}, this engine is fastest at rank "
                f"{manifest.opt_lora_rank}, by the adapters that it was built for (--lora-dir); "
                "leave it out"
            )
        fraction, host = self.lora_cache_gpu_memory_fraction, self.lora_cache_host_memory_bytes
        if fraction is not None and not 0 < fraction <= 1:
            raise ConfigError(
                f"lora_cache_gpu_memory_fraction is {fraction}, expected more than 0, up to 1"
            )
        check_range("lora_cache_host_memory_bytes", host, 1)
        share = None if fraction is None else float(fraction)  # 1 is all of it and not a byte
        return StoreConfig(host_memory=host, device_memory=share)


class PeftTaskNotCachedError(UnknownAdapterError):
    """A task's weights were never sent, or have left the cache: send them with the request."""


class PeftCacheManager:
    """Tasks in the adapters of an engine with slots; it holds none itself.

    A task is an adapter with a name that nobody else gives, `adapter_names` says which. Any thread
    may call it.
    """

    BASE_TASK = -1  # of `run.py --lora_task_uids`: the base model

    @checked
    def __init__(self, adapters: AdapterStore) -> None:
        """Take an engine's adapters.

        Args:
            adapters: made with `LoraCacheOptions.store_config`.
        """
        self.adapters = adapters
        self._prefix = f"peft-{secrets.token_hex(4)}"  # of names: "task 5" may be somebody's
        self._lock = Lock()  # two first requests of a task may come at once

    @checked
    def add_request_peft(self, request: TrtllmLoraRequest) -> Lease | None:
        """Take the weights of a request in, and hold its task until its sequence has ended.

        Weights that come again are compared with the cached ones: TensorRT-LLM goes on with those
        it has, whatever came.

        Args:
            request: of a sequence.

        Returns:
            What the sequence is submitted with (`Scheduler.submit(..., adapter=lease)`), and owns
            from then on; None is the base model.

        Raises:
            PeftTaskNotCachedError: (a KeyError) the task is not cached and no weights came.
            AdapterError: the weights do not fit the engine, or others are cached under this id.
            TensorError: weights or config are no tensor.
            StateError: other sequences use all slots.
        """
        task_id = request.lora_task_id
        if task_id is None:
            return None
        with self._lock:
            self._take_in(task_id, request)
            try:
                return self.adapters.lease(self._name(task_id))
            except UnknownAdapterError as error:  # evicted ones among them
                raise task_not_cached(task_id) from error

    @checked
    def take_in(self, request: TrtllmLoraRequest) -> str | None:
        """Take the weights of a request in, for a sequence that waits for a slot in its turn.

        Args:
            request: of a sequence.

        Returns:
            The adapter by name, as `Scheduler.submit` takes it; None is the base model. Until the
            sequence has joined, the task may be evicted: it then ends with UnknownAdapterError.

        Raises:
            PeftTaskNotCachedError, AdapterError, TensorError, StateError: as `add_request_peft`;
                a StateError is that host memory has no room.
        """
        task_id = request.lora_task_id
        if task_id is None:
            return None
        with self._lock:
            self._take_in(task_id, request)
            return self._cached_name(task_id)

    @checked
    def load_task(self, task_id: int, path: str | Path) -> None:
        """Load the adapter of a task from its files, as `run.py --lora_dir` does.

        Args:
            task_id: its number; what it has meant before is replaced.
            path: what `load_adapter` reads.

        Raises:
            AdapterError: it is no number of a task, or the adapter cannot be read or taken.
            StateError: host memory has no room.
        """
        self.adapters.load(self._name(task_id), path, replace=True)

    @checked
    def adapter_names(self, task_ids: Iterable[int]) -> list[str | None]:
        """Return the adapter of each prompt, as `run.py --lora_task_uids` has their tasks.

        Args:
            task_ids: of each prompt; -1 is the base model.

        Returns:
            What `Engine.generate` takes as `adapter`.

        Raises:
            PeftTaskNotCachedError: (a KeyError) a task is not cached.
            AdapterError: one is no number of a task.
        """
        return [None if i == self.BASE_TASK else self._cached_name(i) for i in task_ids]

    @checked
    def mark_request_done(self, lease: Lease | None) -> None:
        """Let the task of a request go that no batch has taken.

        Raises:
            StateError: it was let go before.
        """
        if lease is not None:
            self.adapters.release(lease)

    @checked
    def is_task_cached(self, task_id: int) -> bool:
        """Return whether the task's weights are in memory: its id is enough."""
        name = self._name(task_id)
        return name in self.adapters.names and self.adapters.info(name).is_loaded

    @checked
    def is_task_cached_device(self, task_id: int) -> bool:
        """Return whether the task lies where a step can bind it."""
        return self._name(task_id) in self.adapters.bindings.resident

    def _take_in(self, task_id: int, request: TrtllmLoraRequest) -> None:
        """Add the weights that came; compare them with the cached ones, where there are some."""
        if (arrays := request.arrays) is None:
            return
        name, adapters = self._name(task_id), self.adapters
        source = f"request of LoRA task {task_id}"
        adapter = adapter_from_trtllm_arrays(source, *arrays, adapters.manifest)
        if not self.is_task_cached(task_id):
            adapters.add(name, adapter, replace=True)
        elif adapters.info(name).content_hash != adapters.hash_of(adapter):
            raise AdapterError(
                f"LoRA task {task_id} is cached with other weights; send them under "
                "another lora_task_id"
            )

    def _cached_name(self, task_id: int) -> str:
        name = self._name(task_id)
        if name not in self.adapters.names:
            raise task_not_cached(task_id)
        return name

    def _name(self, task_id: int) -> str:
        _check_task_id("a LoRA task", task_id)
        return f"{self._prefix} task {task_id}"


def task_not_cached(task_id: int) -> PeftTaskNotCachedError:
    """Return TensorRT-LLM's error of a task that is not, or no longer, cached."""
    return PeftTaskNotCachedError(
        f"LoRA task {task_id} not found in cache. Please send LoRA weights with request"
    )


def _check_task_id(what: str, task_id: int) -> None:
    if type(task_id) is not int or task_id not in _TASK_IDS:
        raise AdapterError(
            f"{what} is {shown(task_id)}, expected a whole number from 0 to {_TASK_IDS[-1]}"
        )
