"""The scale of a module: alpha / rank, from its own tensor or from diffusers' metadata."""

import json
import math
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from trt_lora.plugins.errors import AdapterError
from trt_lora.plugins.messages import shown
from trt_lora.runtime.adapters.formats.peft_config import PeftConfig, parse_peft_config
from trt_lora.runtime.files.safetensors_file import StoredTensor

METADATA = "lora_adapter_metadata"  # of the file: fields of PEFT's config, `unet.lora_alpha`


class Alphas:
    """The scales of one file.

    Args:
        path: of the file.
        metadata: of the file.
        names: of its modules, which patterns are matched with.
    """

    def __init__(self, path: Path, metadata: Mapping[str, str], names: list[str]) -> None:
        self.path, self._metadata, self._names = path, metadata, names
        self._configs = dict[str, PeftConfig | None]()

    def scale(self, alpha: StoredTensor | None, prefix: str, name: str, rank: int) -> float:
        """Return what a module's factors are multiplied by; 1 where nothing says.

        Args:
            alpha: the module's own, a number in any dtype.
            prefix: of the module, which finds its config.
            name: the module's path behind the prefix.
            rank: the rows of its factor; 0 where its kind has no alpha.

        Raises:
            AdapterError: an alpha is no finite number, or the config is of another rank.
        """
        if not rank:
            return 1.0
        if alpha is not None:
            return self._number(alpha) / rank
        if (config := self._config(prefix)) is None:
            return 1.0
        if config.rank(name) != rank:
            said = config.rank(name)
            raise AdapterError(
                f"{self.path}: {name} has rank {rank}, but {METADATA} says rank {said}"
            )
        return config.scale(name)

    def _number(self, alpha: StoredTensor) -> float:
        value = float(alpha.read().reshape(-1)[0]) if math.prod(alpha.shape) == 1 else math.nan
        if not math.isfinite(value):
            what = f"is {value}" if alpha.shape in ((), (1,)) else f"has shape {[*alpha.shape]}"
            raise AdapterError(f"{self.path}: {alpha.name} {what}, expected a number")
        return value

    def _config(self, prefix: str) -> PeftConfig | None:
        if prefix not in self._configs:
            own = {n.removeprefix(prefix): v for n, v in self._fields.items() if _is_of(n, prefix)}
            config = parse_peft_config(own, self.path) if own else None
            if config:
                config.check_work(self._names, self.path)
            self._configs[prefix] = config
        return self._configs[prefix]

    @cached_property
    def _fields(self) -> dict[str, Any]:
        try:
            fields: object = json.loads(self._metadata.get(METADATA, "{}"))
        except (ValueError, RecursionError) as error:
            raise AdapterError(f"{self.path}: {METADATA} is not JSON: {error}") from error
        if not isinstance(fields, dict):
            raise AdapterError(f"{self.path}: {METADATA} is {shown(fields)}, expected an object")
        return fields


def _is_of(name: str, prefix: str) -> bool:
    return name.startswith(prefix) if prefix else "." not in name
