"""TensorRT-LLM's `PeftCacheManager`: a task's first request brings weights, later ones its id."""

from threading import Lock

from trt_lora.plugins.errors import AdapterError, UnknownAdapterError
from trt_lora.runtime.adapters.adapter import Adapter
from trt_lora.runtime.adapters.fitting.fit import fit_adapter
from trt_lora.runtime.adapters.formats.trtllm import adapter_from_trtllm_arrays
from trt_lora.runtime.managers.interfaces.trtllm.request import TrtllmLoraRequest
from trt_lora.runtime.managers.slots.cache.adapter_source import content_hash
from trt_lora.runtime.managers.slots.cache.entry import Lease
from trt_lora.runtime.managers.slots.slot_adapters import SlotAdapters
from trt_lora.runtime.manifest import Manifest


class PeftTaskNotCachedError(UnknownAdapterError):
    """A task's weights were never sent, or have left the cache: send them with the request."""


class PeftCacheManager:
    """Tasks in the adapters of an engine with slots; it holds none itself.

    A task is the adapter named `task_name(id)`. Any thread may call it.
    """

    def __init__(self, adapters: SlotAdapters, manifest: Manifest) -> None:
        """Take an engine's adapters.

        Args:
            adapters: made with `LoraCacheOptions.cache_config`.
            manifest: of the same engine; its sites say how the weights are divided.
        """
        self.adapters = adapters
        self._manifest = manifest
        self._lock = Lock()  # two first requests of a task may come at once

    def add_request_peft(self, request: TrtllmLoraRequest) -> Lease | None:
        """Take the weights of a request in, and hold its task until its sequence has ended.

        Weights that come again are compared with the cached ones: TensorRT-LLM goes on with those
        it has, whatever came.

        Args:
            request: of a sequence.

        Returns:
            What the sequence is added with, `Batch.add(..., adapter=lease)`, and owns from then on;
            None is the base model.

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
                source = f"request of LoRA task {task_id}"
                self._put(task_id, adapter_from_trtllm_arrays(source, *arrays, self._manifest))
            return self._lease(task_id)

    def mark_request_done(self, lease: Lease | None) -> None:
        """Let the task of a request go that no batch has taken.

        Raises:
            StateError: it was let go before.
        """
        if lease is not None:
            self.adapters.release(lease)

    def is_task_cached(self, task_id: int) -> bool:
        """Return whether the task's weights are on the host: its id is enough."""
        name = task_name(task_id)
        return name in self.adapters.names and self.adapters.is_on_host(name)

    def is_task_cached_device(self, task_id: int) -> bool:
        """Return whether the task is in a slot of the device."""
        return task_name(task_id) in self.adapters.slots

    def _put(self, task_id: int, adapter: Adapter) -> None:
        name = task_name(task_id)
        if not self.is_task_cached(task_id):
            self.adapters.add_adapter(name, adapter, replace=True)
        elif self.adapters.content_hash(name) != content_hash(fit_adapter(adapter, self._manifest)):
            raise AdapterError(
                f"LoRA task {task_id} is cached with other weights; send them under another "
                "lora_task_id"
            )

    def _lease(self, task_id: int) -> Lease:
        try:
            return self.adapters.lease(task_name(task_id))
        except UnknownAdapterError as error:  # evicted ones among them
            raise PeftTaskNotCachedError(
                f"LoRA task {task_id} not found in cache. Please send LoRA weights with request"
            ) from error


def task_name(task_id: int) -> str:
    """Return the adapter name of a task."""
    return f"task {task_id}"
