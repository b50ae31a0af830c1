"""A call for each error of the package that raises it, in the folder of `page_checkout`."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np

from trt_lora.builder import BuildConfig, build_engine
from trt_lora.runtime import (
    AdapterStore,
    Engine,
    LoRAManager,
    StoreConfig,
    TensorMap,
    load_adapter,
    open_engine,
)
from trt_lora.runtime.interfaces.trtllm import PeftCacheManager, TrtllmLoraRequest

_JSON = "tests/adapters/json"


def _manager(engine: Engine) -> LoRAManager:
    manager = LoRAManager()
    manager.initialize_engine_bindings(engine)
    manager.load_weights("json", _JSON)
    return manager


def _option() -> None:
    StoreConfig(host_memory=-1)


def _model() -> None:
    build_engine(BuildConfig(Path(_JSON), Path("engines/new"), ("attn_q",), flavour="none"))


def _engine() -> None:
    open_engine(_JSON)


def _adapter() -> None:
    with open_engine("engines/many") as engine:
        _manager(engine).load_weights("other", "tests/adapters/other")


def _changed() -> None:
    path = Path(shutil.copytree(_JSON, "changed/json"))
    try:
        with open_engine("engines/many") as engine:
            engine.adapters.register("json", path)
            config = path / "adapter_config.json"
            config.write_text(f"{config.read_text()} ")
            engine.adapters.release(engine.adapters.lease("json"))
    finally:
        shutil.rmtree("changed")


def _tensor() -> None:
    with open_engine("engines/smollm2") as engine:
        engine.execute(TensorMap())


def _unknown_adapter() -> None:
    with open_engine("engines/smollm2") as engine:
        _manager(engine).switch_weights("jason")


def _evicted() -> None:
    with open_engine("engines/many") as engine:
        both = _with_two_in_memory(engine).stats.memory_bytes
        _with_two_in_memory(engine, StoreConfig(host_memory=both - 1)).lease("first")


def _with_two_in_memory(engine: Engine, config: StoreConfig | None = None) -> AdapterStore:
    adapter, adapters = load_adapter(Path(_JSON)), AdapterStore(engine, config)
    adapters.add("first", adapter)
    adapters.add("second", adapter)
    return adapters


def _task() -> None:
    with open_engine("engines/many") as engine:
        PeftCacheManager(engine.adapters).add_request_peft(TrtllmLoraRequest(7))


def _binding() -> None:
    with open_engine("engines/smollm2") as engine:
        manager = _manager(engine)
        manager.switch_weights("json")
        manager.get_active_weight("lora_A_lm_head")


def _backend() -> None:
    open_engine("engines/smollm2", "tensorrt")


def _output() -> None:
    with open_engine("engines/smollm2") as engine, np.errstate(all="ignore"):
        manager = LoRAManager(engine.adapters)
        bindings = engine.manifest.lora_bindings.items()
        large = {n: np.full(site.shape(f, 1), 1e30, np.float32) for n, (site, f) in bindings}
        manager.add_weights("large", large)
        engine.generate("w5 w6", adapter="large")


def _state() -> None:
    LoRAManager().refresh_tensor_map(TensorMap())


PROVOKED: dict[str, Callable[[], None]] = {
    "ConfigError": _option,
    "ModelError": _model,
    "ManifestError": _engine,
    "AdapterError": _adapter,
    "ChangedAdapterError": _changed,
    "TensorError": _tensor,
    "UnknownAdapterError": _unknown_adapter,
    "EvictedAdapterError": _evicted,
    "PeftTaskNotCachedError": _task,
    "UnknownBindingError": _binding,
    "BackendError": _backend,
    "OutputError": _output,
    "StateError": _state,
}
