"""vLLM's `PEFTHelper`: the fields of `adapter_config.json` that decide whether an adapter fits."""

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path

from trt_lora.plugins.checked import checked, typed
from trt_lora.plugins.errors import AdapterError
from trt_lora.plugins.short_repr import short_repr
from trt_lora.runtime.adapters.formats.peft_config import CONFIG_FILE
from trt_lora.runtime.files.json_file import read_json
from trt_lora.runtime.files.untrusted_file import file_inside
from trt_lora.runtime.interfaces.vllm.config import LoRAConfig

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
        fields = read_json(file_inside(directory, CONFIG_FILE))
        if missing := [name for name in _REQUIRED if fields.get(name) is None]:
            raise AdapterError(f"{directory}: required PEFT config field missing: {missing[0]}")
        known = {field.name for field in dataclasses.fields(cls)}
        taken = {name: value for name, value in fields.items() if name in known}
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
