"""Answer with one token; print seconds since a moment and what is in memory, as JSON.

    python -m trt_lora.scripts.bench.cold_start ENGINE ADAPTER MOMENT

Run by cpu.py. MOMENT is a `time.monotonic` of the process that starts this one. Imports, opening
the engine, loading the adapter and running the prompt are in the time.
"""

import json
import sys
import time
from pathlib import Path

from trt_lora.runtime import LoRAManager, open_engine
from trt_lora.runtime.generation.decoding.kv_cache import KVCache
from trt_lora.runtime.generation.text.tokenizer import TextTokenizer
from trt_lora.runtime.manifest import ONNX_WEIGHTS_FILE
from trt_lora.runtime.serving.scheduler import Scheduler
from trt_lora.scripts.measuring.process_memory import resident_bytes

PROMPT = "What is the capital of Portugal?"


def measure(directory: Path, adapter: Path, moment: float) -> dict[str, float]:
    """Return seconds since `moment` and bytes; the cache has one row."""
    with open_engine(directory) as engine:
        manager = LoRAManager()
        manager.initialize_engine_bindings(engine)
        manager.load_weights("adapter", adapter)
        manager.switch_weights("adapter")
        batch = Scheduler(engine, manager=manager, rows=1)
        batch.submit(TextTokenizer(directory).encode(PROMPT))
        batch.step()
        seconds, resident = time.monotonic() - moment, resident_bytes()
        cache = KVCache(engine.manifest, engine.memory, 1).nbytes
    weights = (directory / ONNX_WEIGHTS_FILE).stat().st_size
    return {
        "first_token_seconds": seconds,
        "resident": resident,
        "weights_and_cache": weights + cache,
    }


if __name__ == "__main__":
    directory, adapter, moment = sys.argv[1:]
    print(json.dumps(measure(Path(directory), Path(adapter), float(moment))))
