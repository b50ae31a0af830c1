"""TensorRT-LLM's `PeftCacheManager`: a task's first request brings weights, later ones its id."""

import secrets
from collections.abc import Iterable
from pathlib import Path
from threading import Lock

from trt_lora.plugins.checked import checked
from trt_lora.plugins.errors import AdapterError, UnknownAdapterError
from trt_lora.runtime.adapters.adapter import Adapter
from trt_lora.runtime.adapters.formats.trtllm import adapter_from_trtllm_arrays
from trt_lora.runtime.interfaces.trtllm.request import TrtllmLoraRequest, check_task_id
from trt_lora.runtime.store.entry import Lease
from trt_lora.runtime.store.store import AdapterStore


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
            if (arrays := request.arrays) is not None:
                source, manifest = f"request of LoRA task {task_id}", self.adapters.manifest
                self._put(task_id, adapter_from_trtllm_arrays(source, *arrays, manifest))
            try:
                return self.adapters.lease(self._name(task_id))
            except UnknownAdapterError as error:  # evicted ones among them
                raise _not_cached(task_id) from error

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

    def _put(self, task_id: int, adapter: Adapter) -> None:
        name = self._name(task_id)
        if not self.is_task_cached(task_id):
            self.adapters.add(name, adapter, replace=True)
        elif self.adapters.info(name).content_hash != self.adapters.hash_of(adapter):
            raise AdapterError(
                f"LoRA task {task_id} is cached with other weights; send them under another "
                "lora_task_id"
            )

    def _cached_name(self, task_id: int) -> str:
        name = self._name(task_id)
        if name not in self.adapters.names:
            raise _not_cached(task_id)
        return name

    def _name(self, task_id: int) -> str:
        check_task_id("a LoRA task", task_id)
        return f"{self._prefix} task {task_id}"


def _not_cached(task_id: int) -> PeftTaskNotCachedError:
    return PeftTaskNotCachedError(
        f"LoRA task {task_id} not found in cache. Please send LoRA weights with request"
    )
