"""Runner `--lora-float64`: ONNX's reference evaluator with LoRA nodes in float64.

Nothing in it is ONNX Runtime's or TensorRT's: ONNX's own reference evaluator runs the graph in the
model's dtype, and every LoRA node by its definition (`plugins/contract/operators.py`), not by the
function body that the others inline. What a node returns is what the nodes after it read.
"""

import time
from collections import OrderedDict
from typing import Any

import numpy as np
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from polygraphy import util
from polygraphy.backend.base import BaseRunner
from polygraphy.backend.onnx.util import get_input_metadata

from trt_lora.plugins.contract.operators import DOMAIN, OPERATORS, Operator
from trt_lora.runtime.memory.dtypes import Array
from trt_lora.scripts.verification.numpy_or_torch import storage_of


def lora_float64(operator: Operator, *operands: Array) -> tuple[Array, ...]:
    """Evaluate an operator in float64; the results are rounded once, to the dtype of x.

    Args:
        operator: which.
        operands: x [..., k], then A [k, r] and B [r, n] of every site, then what is added to.
    """
    x, *_ = wide = [operand.astype(np.float64) for operand in operands]
    results = []
    for site in range(operator.sites):
        a, b = (wide[index] for index in operator.factors(site))
        delta = x @ a @ b
        result = wide[operator.addend(site)] + delta if operator.has_addend else delta
        results.append(result.astype(operands[0].dtype))
    return tuple(results)


def _evaluator_of(operator: Operator) -> type[Any]:
    def evaluate(_: Any, *operands: Array) -> tuple[Array, ...]:
        return lora_float64(operator, *operands)

    return type(operator.name, (OpRun,), {"op_domain": DOMAIN, "_run": evaluate})


class LoraReferenceRunner(BaseRunner):  # type: ignore[misc] # polygraphy has no types
    """Runs an ONNX model, or what a loader of polygraphy returns."""

    def __init__(self, model: Any, name: str | None = None) -> None:
        """Keep the model, or the callable that loads it."""
        super().__init__(name=name, prefix="lora-float64-runner")
        self._model = model

    def activate_impl(self) -> None:
        """Load the model; see `BaseRunner.activate`."""
        model: Any = util.invoke_if_callable(self._model)[0]
        operators = [_evaluator_of(operator) for operator in OPERATORS]
        self.inputs = get_input_metadata(model.graph)
        self.outputs = [value.name for value in model.graph.output]
        self.evaluator = ReferenceEvaluator(model, new_ops=operators)
        for weight in model.graph.initializer:  # the evaluator has arrays of its own
            weight.ClearField("raw_data")

    def get_input_metadata_impl(self) -> Any:
        """Return names, dtypes and shapes of the inputs; see `BaseRunner.get_input_metadata`."""
        return self.inputs

    def infer_impl(self, feed_dict: dict[str, Any]) -> OrderedDict[str, Array]:
        """Run the model once, bfloat16 outputs as float32; see `BaseRunner.infer`."""
        arrays = {name: storage_of(value) for name, value in feed_dict.items()}
        start = time.perf_counter()
        outputs: Any = self.evaluator.run(None, arrays)
        self.inference_time = time.perf_counter() - start
        return OrderedDict(zip(self.outputs, map(_without_bfloat16, outputs), strict=True))

    def deactivate_impl(self) -> None:
        """Let go of the model; see `BaseRunner.deactivate`."""
        del self.evaluator, self.inputs, self.outputs


def _without_bfloat16(output: Array) -> Array:
    return output.astype(np.float32) if output.dtype.name == "bfloat16" else output
