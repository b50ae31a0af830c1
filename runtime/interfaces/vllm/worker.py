"""vLLM's `WorkerLoRAManager`: adapters by request, loaded once `PEFTHelper` has checked them."""

import math
from collections.abc import Collection
from dataclasses import dataclass, fields
from pathlib import Path

from trt_lora.plugins.checked import check_items, checked, typed
from trt_lora.plugins.errors import AdapterError, StateError
from trt_lora.plugins.messages import shown
from trt_lora.plugins.short_repr import short_repr
from trt_lora.runtime.adapters.fitting.base_check import is_other_base
from trt_lora.runtime.adapters.formats.peft_config import CONFIG_FILE
from trt_lora.runtime.files.json_file import read_json
from trt_lora.runtime.files.untrusted_file import file_inside
from trt_lora.runtime.interfaces.vllm.config import LoRAConfig
from trt_lora.runtime.interfaces.vllm.manager import LoRAModelManager
from trt_lora.runtime.interfaces.vllm.mapping import LoRAMapping
from trt_lora.runtime.interfaces.vllm.model import LoRAModel
from trt_lora.runtime.interfaces.vllm.request import LoRARequest

_REQUIRED = ("r", "lora_alpha", "target_modules")


@short_repr
@dataclass(frozen=True)
class PEFTHelper:
    """What vLLM looks at; `load_adapter` checks every other field, and each tensor."""

    r: int
    lora_alpha: float
    target_modules: list[str] | str
    bias: str = "none"
    modules_to_save: list[str] | None = None
    use_rslora: bool = False
    use_dora: bool = False

    @classmethod
    @checked
    def from_local_dir(cls, lora_dir: str | Path) -> "PEFTHelper":
        """Read the config of a PEFT directory.

        Raises:
            FileNotFoundError: there is none.
            AdapterError: (a ValueError) it cannot be read, or a required field is missing.
        """
        directory = Path(lora_dir)
        if not (directory / CONFIG_FILE).is_file():
            raise FileNotFoundError(f"{CONFIG_FILE} not found in {directory}")
        found = read_json(file_inside(directory, CONFIG_FILE))
        if missing := [name for name in _REQUIRED if found.get(name) is None]:
            raise AdapterError(f"{directory}: required PEFT config field missing: {missing[0]}")
        taken = {field.name: found[field.name] for field in fields(cls) if field.name in found}
        try:
            helper: PEFTHelper = typed(cls, taken, f"{directory}: config")
        except ValueError as error:
            raise AdapterError(str(error)) from error
        return helper

    @checked
    def validate_legal(self, lora_config: LoRAConfig) -> None:
        """Refuse what no engine does, or this one's config does not allow.

        Raises:
            AdapterError: (a ValueError) the message names each.
        """
        largest = lora_config.max_lora_rank
        reasons = {
            "modules_to_save must be None: an engine replaces no modules": self.modules_to_save,
            "use_dora must be false: an engine cannot rescale base weights": self.use_dora,
            f"bias is {self.bias!r}, expected 'none'": self.bias != "none",
            f"lora_alpha must be positive, got {self.lora_alpha}": self.lora_alpha <= 0,
            f"r={self.r} must be positive": self.r <= 0,
            f"r={self.r} exceeds max_lora_rank={largest}": largest is not None and self.r > largest,
        }
        if found := [reason for reason, is_wrong in reasons.items() if is_wrong]:
            raise AdapterError("LoRA config validation failed:\n" + "\n".join(found))

    @property
    def scaling_factor(self) -> float:
        """Alpha / r, or for rsLoRA alpha / sqrt(r), where no pattern says otherwise."""
        return self.lora_alpha / (math.sqrt(self.r) if self.use_rslora else self.r)

    vllm_lora_scaling_factor = scaling_factor


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
