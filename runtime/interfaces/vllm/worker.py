"""vLLM's `WorkerLoRAManager`: adapters by request, loaded from their path."""

from collections.abc import Collection
from pathlib import Path

from trt_lora.plugins.checked import check_items, checked
from trt_lora.plugins.errors import AdapterError, StateError
from trt_lora.plugins.messages import shown
from trt_lora.runtime.adapters.fitting.base_check import is_other_base
from trt_lora.runtime.adapters.formats.peft_config import CONFIG_FILE
from trt_lora.runtime.interfaces.vllm.manager import LoRAModelManager
from trt_lora.runtime.interfaces.vllm.mapping import LoRAMapping
from trt_lora.runtime.interfaces.vllm.model import LoRAModel
from trt_lora.runtime.interfaces.vllm.peft_helper import PEFTHelper
from trt_lora.runtime.interfaces.vllm.request import LoRARequest


class WorkerLoRAManager:
    """Loads the adapters that requests name; also vLLM's `LLMEngine.add_lora` and `remove_lora`."""

    @checked
    def __init__(self, manager: LoRAModelManager) -> None:
        """Take a manager; with a `LRUCacheLoRAModelManager` it is vLLM's LRU worker."""
        self.manager = manager

    @checked
    def add_adapter(self, adapter_request: LoRARequest) -> bool:
        """Load an adapter and activate it; False if its number is registered.

        Raises:
            FileNotFoundError: there is nothing at its path.
            AdapterError: (a ValueError) it cannot be read, or the engine cannot take it.
            StateError: (a RuntimeError) as many adapters are registered as can be.
            ConfigError: (a ValueError) all slots are taken by active adapters.
        """
        adapter_id = adapter_request.adapter_id
        is_new = adapter_id not in self.list_adapters()
        if is_new:
            self.manager.add_adapter(self._load_adapter(adapter_request))
        self.manager.activate_adapter(adapter_id)
        return is_new

    add_lora = add_adapter

    @checked
    def remove_adapter(self, adapter_id: int) -> bool:
        """Forget an adapter; False if it is not registered."""
        return self.manager.remove_adapter(adapter_id)

    remove_lora = remove_adapter

    @checked
    def pin_adapter(self, adapter_id: int) -> bool:
        """As `LoRAModelManager.pin_adapter`."""
        return self.manager.pin_adapter(adapter_id)

    def list_adapters(self) -> set[int]:
        """Return the numbers of the registered adapters."""
        return set(self.manager.list_adapters())

    def remove_all_adapters(self) -> None:
        """Forget all adapters."""
        self.manager.remove_all_adapters()

    @checked
    def set_active_adapters(
        self, requests: Collection[LoRARequest], mapping: LoRAMapping | None
    ) -> None:
        """Have the adapters of a batch active and no others, then take its mapping.

        Raises:
            StateError: (a RuntimeError) they are more than there are slots.
            FileNotFoundError, AdapterError: as `add_adapter`.
        """
        check_items("requests", requests, LoRARequest)
        wanted = {request.adapter_id for request in requests}
        if len(wanted) > self.manager.lora_slots:
            raise StateError(
                f"Number of requested models ({len(wanted)}) is greater than the number of GPU "
                f"model slots ({self.manager.lora_slots})."
            )
        registered = self.list_adapters()
        for adapter_id in registered - wanted:
            self.manager.deactivate_adapter(adapter_id)
        # Registered ones first: they then count as used, and make no room for the others.
        for request in sorted(requests, key=lambda r: r.adapter_id not in registered):
            self.add_adapter(request)
        if mapping is not None:
            self.manager.set_adapter_mapping(mapping)

    def _load_adapter(self, lora_request: LoRARequest) -> LoRAModel:
        path, manifest = Path(lora_request.lora_path), self.manager.manifest
        model = LoRAModel.from_local_checkpoint(
            path,
            lora_model_id=lora_request.lora_int_id,
            name=lora_request.lora_name,
            manifest=manifest,
        )
        if (path / CONFIG_FILE).is_file():
            PEFTHelper.from_local_dir(path).validate_legal(self.manager.lora_config)
        base = lora_request.base_model_name
        if base is not None and is_other_base(base, manifest):
            raise AdapterError(
                f"base_model_name of {lora_request.lora_name} is {shown(base)}, this engine was "
                f"built from {manifest.base_model.name}; leave it out if they are one model"
            )
        return model
