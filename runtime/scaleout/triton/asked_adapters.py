"""AskedAdapters: from what a request names to an adapter of the engine's store."""

from pathlib import Path

from trt_lora.plugins.errors import AdapterError, UnknownAdapterError
from trt_lora.runtime.interfaces.trtllm import PeftCacheManager, task_not_cached
from trt_lora.runtime.scaleout.triton.asked import Asked
from trt_lora.runtime.server.adapters.adapter_folder import AdapterFolder, Found
from trt_lora.runtime.server.adapters.names_and_paths import check_served_name
from trt_lora.runtime.store.names import without_strength
from trt_lora.runtime.store.store import AdapterStore


class AskedAdapters:
    """A folder that is looked at when a name is asked for, and TensorRT-LLM's tasks."""

    def __init__(self, store: AdapterStore, folder: str) -> None:
        """Take an engine's adapters, and the folder; empty: there is none."""
        self._store, self._tasks = store, PeftCacheManager(store)
        self._folder = AdapterFolder(Path(folder), []) if folder else None
        self._seen: dict[str, Found] = {}  # what the store has of the folder, by name

    def name(self, asked: Asked) -> str | None:
        """Return the adapter of a request, which the store now has; None is the base model.

        Not for several threads at a time.

        Raises:
            UnknownAdapterError: (a KeyError) there is none; PeftTaskNotCachedError: a task's
                weights are not cached, and did not come.
            AdapterError: it is not whole, or the engine cannot take it.
            HttpError: 400; it cannot be a name.
            OSError: the folder cannot be read.
        """
        if asked.adapter is not None:
            self._follow(without_strength(asked.adapter))
            return asked.adapter
        return self._tasks.take_in(asked.task)

    def told(self, asked: Asked, error: BaseException) -> BaseException:
        """Return what a client is told: a task that was evicted meanwhile is not in the cache."""
        task = asked.task.lora_task_id
        if task is None or not isinstance(error, UnknownAdapterError):
            return error
        return task_not_cached(task)

    def _follow(self, name: str) -> None:
        """Let the store have what the folder has now: the adapter that is asked for alone."""
        check_served_name(name, ())
        if self._folder is None:
            return
        found = self._folder.find(name)
        if found == self._seen.get(name):
            return
        if found is None:
            self._withdraw(name)
        elif found.fault:
            self._withdraw(name)
            raise AdapterError(f"adapter {name!r} {found.fault}")
        else:
            self._store.register(name, found.path, replace=True)
            self._seen[name] = found

    def _withdraw(self, name: str) -> None:
        """Unload what the folder had under a name."""
        if self._seen.pop(name, None) is not None and name in self._store.names:
            self._store.unload(name)
