"""Times of a graph's runs, as an answer whose tokens are runs."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter

from trt_lora.runtime.engines.engine import Executor
from trt_lora.runtime.engines.graph_inputs import batch_rows, graph_inputs
from trt_lora.runtime.manifest import Manifest
from trt_lora.runtime.memory.dtypes import Array
from trt_lora.runtime.memory.tensor import TensorMap
from trt_lora.runtime.store.store import AdapterStore
from trt_lora.scripts.measuring.answer_times import AnswerTimes

RUNS = 8  # of a turn, behind the first


@dataclass(frozen=True)
class GraphWorkload:
    """The same inputs, run again and again."""

    rows: int
    inputs: Mapping[str, Array]
    new_tokens: int = RUNS
    prompt_tokens: int = 0

    @classmethod
    def of(cls, manifest: Manifest, inputs: Mapping[str, Array]) -> "GraphWorkload":
        """Count the rows of inputs; a graph without a batch has one."""
        is_batched = any(binding.shape[:1] == (manifest.batch,) for binding in manifest.inputs)
        return cls(batch_rows(manifest, inputs) if is_batched else 1, inputs)


def graph_times(
    engine: Executor,
    adapters: AdapterStore,
    names: list[str | None],
    workload: GraphWorkload,
) -> AnswerTimes:
    """Run a graph, outputs on the host included; the first run comes behind another variant's.

    Args:
        engine: a running engine.
        adapters: of the engine.
        names: the adapter of each row.
        workload: what to run.
    """
    with adapters.bindings.held(names) as lora:
        inputs = TensorMap(lora | graph_inputs(engine.manifest, workload.inputs))
        clock = [perf_counter()]
        for _ in range(1 + workload.new_tokens):
            for output in engine.execute(inputs).values():
                output.numpy()
            clock.append(perf_counter())
    first, *others = (after - before for before, after in pairwise(clock))
    return AnswerTimes(first, tuple(others))
