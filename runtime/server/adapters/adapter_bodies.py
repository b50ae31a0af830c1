"""Bodies of the routes that change adapters: vLLM's and SageMaker's, and what we add."""

import msgspec

from trt_lora.runtime.server.json_values import Number


class LoadBody(msgspec.Struct):
    """`POST /v1/load_lora_adapter`; `expected_version` is ours."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False
    is_3d_lora_weight: bool = False  # of experts: refused
    expected_version: Number | None = None  # replace this version and no other; 0 is none
    expected_generation: Number | None = None  # the same, as mistral.rs calls it


class UnloadBody(msgspec.Struct):
    """`POST /v1/unload_lora_adapter`; `wait` is ours."""

    lora_name: str
    lora_int_id: int | None = None
    wait: bool = False  # answer when its memory is free


class AddBody(msgspec.Struct):
    """SageMaker's `POST /adapters`."""

    name: str
    src: str
