"""vLLM's `LoRARequest`: the name, the number and the path of an adapter."""

from dataclasses import dataclass
from typing import Any

from trt_lora.plugins.checked import check_fields
from trt_lora.plugins.errors import AdapterError
from trt_lora.plugins.messages import shown
from trt_lora.plugins.short_repr import short_repr

_REFUSED = {
    "lora_local_path": "it is deprecated in vLLM too; pass lora_path",
    "long_lora_max_len": "an engine has one rotary scaling; leave it out",
    "tensorizer_config_dict": "adapters are read from files; save it with PEFT, pass lora_path",
}


@short_repr
@dataclass(frozen=True)
class LoRARequest:
    """Which adapter a sequence takes; requests with equal fields are equal."""

    lora_name: str
    lora_int_id: int  # from 1, one for each adapter
    lora_path: str = ""
    lora_local_path: str | None = None
    long_lora_max_len: int | None = None
    base_model_name: str | None = None  # compared with the engine's when the adapter is loaded
    tensorizer_config_dict: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        """Check the fields.

        Raises:
            AdapterError: (a ValueError) the id is below 1, there is no path, or a field asks for
                what is not supported.
        """
        check_fields(self)
        if type(self.lora_int_id) is not int or self.lora_int_id < 1:
            raise AdapterError(f"id must be > 0, got {shown(self.lora_int_id)}")
        for field, instead in _REFUSED.items():
            if (value := getattr(self, field)) is not None:
                raise AdapterError(f"{field} is {shown(value)}: {instead}")
        if not self.lora_path:
            raise AdapterError("lora_path cannot be empty")

    @property
    def adapter_id(self) -> int:
        """`lora_int_id`."""
        return self.lora_int_id

    @property
    def name(self) -> str:
        """`lora_name`."""
        return self.lora_name

    @property
    def path(self) -> str:
        """`lora_path`."""
        return self.lora_path
