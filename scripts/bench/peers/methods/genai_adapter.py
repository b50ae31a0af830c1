"""Make the LoRA weights of a model of onnxruntime-genai's builder inputs, and an adapter file.

    python genai_adapter.py BAKED OUTPUT

The builder's `adapter_path` bakes an adapter in as initializers. OUTPUT is the model with inputs in
their place, which are zeros of rank 1 where no adapter is set, and adapter.onnx_adapter.
"""

import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import numpy_helper


def main() -> None:
    """Convert the folder BAKED to the new folder OUTPUT."""
    baked, output = map(Path, sys.argv[1:])
    shutil.copytree(baked, output, ignore=shutil.ignore_patterns("*.onnx"))
    model = onnx.load(baked / "model.onnx", load_external_data=False)
    del model.graph.value_info[:]  # they state the rank as a number
    names = [t.name for t in model.graph.initializer if ".lora_" in t.name]
    weights = {name: _make_input(model.graph, name, baked) for name in names}
    onnx.save(model, output / "model.onnx")
    adapter = onnxruntime.AdapterFormat()
    adapter.set_adapter_version(1)
    adapter.set_model_version(1)
    values = {n: onnxruntime.OrtValue.ortvalue_from_numpy(w) for n, w in weights.items()}
    adapter.set_parameters(values)
    adapter.export_adapter(str(output / "adapter.onnx_adapter"))  # pyright: ignore[reportArgumentType]
    print(len(weights), "LoRA inputs")


def _make_input(graph: Any, name: str, baked: Path) -> Any:
    """Replace an initializer by an input with a default; return its values [k, r] or [r, n]."""
    (tensor,) = (t for t in graph.initializer if t.name == name)
    values = np.ascontiguousarray(numpy_helper.to_array(tensor, str(baked)))
    rank_axis = 1 if ".lora_A." in name else 0
    shape: list[int | str] = list(values.shape)
    shape[rank_axis] = name.replace(".lora_A.", ".rank.").replace(".lora_B.", ".rank.")
    default = np.zeros_like(values.take([0], rank_axis))
    graph.initializer.remove(tensor)
    graph.initializer.append(numpy_helper.from_array(default, name))
    graph.input.append(onnx.helper.make_tensor_value_info(name, tensor.data_type, shape))
    return values


if __name__ == "__main__":
    main()
