"""A tiny Llama served: its engine with two slots, adapters for it, and PEFT's model of the same."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from support.models.quick_build import quick_build
from support.models.tiny_models import save_adapter, save_model, tiny_config

from trt_lora.runtime import AdapterStore, Engine, open_engine
from trt_lora.scripts.verification.peft_reference import PeftReference


@dataclass(frozen=True)
class ServedLlama:
    """An engine with two slots, adapters by name, and the model that they were made for."""

    engine: Engine
    paths: Mapping[str, Path]
    model: Path

    @cached_property
    def reference(self) -> PeftReference:
        """PEFT with the same adapters."""
        return PeftReference(self.model, dict(self.paths))

    def adapters(self) -> AdapterStore:
        """All of them loaded, none of them in a slot yet."""
        adapters = AdapterStore(self.engine)
        for name, path in self.paths.items():
            adapters.load(name, path)
        return adapters

    def expected(self, name: str | None, ids: Sequence[int]) -> Any:
        """Logits [s, vocab] of a sequence by itself."""
        tokens = np.array([ids])
        return self.reference.logits(name or "", tokens, np.ones_like(tokens))[0]


@contextmanager
def served_llama(folder: Path, ranks: Mapping[str, int], rows: int) -> Iterator[ServedLlama]:
    """Build and open an engine of so many rows, with an adapter of each rank."""
    model = save_model("Llama", folder / "model")
    paths = {
        name: save_adapter(model, folder / name, seed=rank, r=rank) for name, rank in ranks.items()
    }
    quick_build(tiny_config(model, folder / "engine", max_loras=2, max_batch_size=rows))
    with open_engine(folder / "engine", "onnxruntime") as engine:
        yield ServedLlama(engine, paths, model)
