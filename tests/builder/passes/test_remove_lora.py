"""An engine without LoRA, for comparison: the same forms of the graph, the same logits."""

from pathlib import Path

import numpy as np
from conftest import TinyEngine

from trt_lora.builder.passes.remove_lora import engine_without_lora
from trt_lora.runtime import LoRAManager, TensorMap, open_engine
from trt_lora.runtime.generation.decoding.static_decoder import StaticDecoder
from trt_lora.runtime.generation.decoding.step_inputs import Ids
from trt_lora.runtime.generation.sampling import Logits
from trt_lora.runtime.manifest import ONNX_CPU_FILE, read_manifest


def logits(directory: Path, ids: Ids) -> Logits:
    with open_engine(directory, "onnxruntime") as engine:
        manager = LoRAManager()
        manager.initialize_engine_bindings(engine)
        tensor_map = TensorMap()
        manager.refresh_tensor_map(tensor_map)
        found: Logits = StaticDecoder(engine, tensor_map, len(ids)).run(ids)
        return found


def test_what_runs_on_a_cpu_is_the_engines_own_form_less_lora(
    tiny_engine: TinyEngine, tmp_path: Path
) -> None:
    plain = engine_without_lora(tiny_engine.engine, tmp_path)
    assert set(read_manifest(plain).files) == {ONNX_CPU_FILE}
    assert not read_manifest(plain).lora_bindings
    ids = np.arange(1, 7).reshape(2, 3)
    assert np.array_equal(logits(plain, ids), logits(tiny_engine.engine, ids))
