"""Probe whether TensorRT and TensorRT-RTX work on this GPU: build, load and run one GEMM.

`ask` runs this file in a process of its own, which prints the answer as JSON: where the libraries
are at odds with the driver they end the process.
"""

import contextlib
import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from trt_lora.plugins.errors import BackendError
from trt_lora.plugins.tensorrt.flavour import FLAVOURS, Flavour
from trt_lora.runtime.memory.cuda import call, constant, cuda_obstacle

SECONDS = 90  # TensorRT-RTX compiles for the chip when it first runs
M, K, N = 4, 64, 32


@dataclass
class Answer:
    """The last stage that succeeded in one flavour."""

    flavour: str
    version: str = ""
    reached: str = "nothing"  # nothing, imported, built, loaded, ran
    is_right: bool = False
    reason: str = ""  # why it went no further

    @property
    def runs(self) -> bool:
        """True if engines of this flavour run here."""
        return self.reached == "ran" and self.is_right


def ask(seconds: float = SECONDS) -> list[Answer]:
    """Return the answer for every flavour, whatever happens to the process that finds out."""
    return [_ask(flavour, seconds) for flavour in FLAVOURS]


def _ask(flavour: Flavour, seconds: float) -> Answer:
    if not flavour.installed:
        return Answer(flavour.name, reason="it is not installed")
    command = [sys.executable, __file__, flavour.name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return Answer(flavour.name, reason=f"no answer within {seconds:.0f} s")
    lines = done.stdout.splitlines()
    with contextlib.suppress(IndexError, ValueError, TypeError):
        return Answer(**json.loads(lines[-1]))
    said = done.stderr.strip()[-400:]
    return Answer(flavour.name, reason=f"its process ended with {done.returncode}: {said}")


def probe(flavour: Flavour) -> Answer:
    """Return how far the flavour comes in this process."""
    answer = Answer(flavour.name)
    messages: list[str] = []
    try:
        _go(flavour, answer, messages)
    except (BackendError, RuntimeError, TypeError, AttributeError, ValueError) as error:
        reasons = list(dict.fromkeys(messages))[-4:]
        answer.reason = "; ".join([str(error), *reasons])
    return answer


def _go(flavour: Flavour, answer: Answer, messages: list[str]) -> None:
    trt = flavour.load()
    answer.version, answer.reached = str(trt.__version__), "imported"
    logger = _logger(trt, messages)
    weights = np.random.default_rng(0).standard_normal((K, N)).astype(np.float32)
    plan = _plan(trt, logger, weights)
    answer.reached = "built"
    if obstacle := cuda_obstacle():
        raise BackendError(obstacle)
    runtime = trt.Runtime(logger)
    engine = runtime.deserialize_cuda_engine(plan)
    if engine is None:
        raise BackendError("the plan was refused when it was loaded")
    answer.reached = "loaded"
    x = np.random.default_rng(1).standard_normal((M, K)).astype(np.float32)
    y = _run(engine, x)
    answer.reached = "ran"
    error = float(np.abs(y - x @ weights).max())
    answer.is_right = error < 0.05  # TF32 may multiply
    answer.reason = f"largest error {error:.1e}"


def _plan(trt: Any, logger: Any, weights: Any) -> Any:
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    x = network.add_input("x", trt.float32, (M, K))
    constant_layer = network.add_constant((K, N), trt.Weights(weights))
    none = trt.MatrixOperation.NONE
    product = network.add_matrix_multiply(x, none, constant_layer.get_output(0), none)
    y = product.get_output(0)
    y.name = "y"
    network.mark_output(y)
    plan = builder.build_serialized_network(network, builder.create_builder_config())
    if plan is None:
        raise BackendError("the network was not built")
    return plan


def _run(engine: Any, x: Any) -> Any:
    """Run the plan on x [M, K]; the process ends soon, and its memory with it."""
    context = engine.create_execution_context()
    if context is None:
        raise BackendError("there is no execution context")
    y = np.empty((M, N), np.float32)
    kinds = constant("cudaMemcpyKind")
    stream = int(call("cudaStreamCreate"))
    addresses = {"x": int(call("cudaMalloc", x.nbytes)), "y": int(call("cudaMalloc", y.nbytes))}
    call("cudaMemcpy", addresses["x"], x.ctypes.data, x.nbytes, kinds.cudaMemcpyHostToDevice)
    for name, address in addresses.items():
        context.set_tensor_address(name, address)
    if not context.execute_async_v3(stream):
        raise BackendError("the run was refused")
    call("cudaStreamSynchronize", stream)
    call("cudaMemcpy", y.ctypes.data, addresses["y"], y.nbytes, kinds.cudaMemcpyDeviceToHost)
    return y


def _logger(trt: Any, messages: list[str]) -> Any:
    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.Severity.ERROR, trt.ILogger.Severity.INTERNAL_ERROR):
                messages.append(message)

    return Logger()


def main() -> None:
    """Print the answer for the flavour named."""
    flavour = next(f for f in FLAVOURS if f.name == sys.argv[1])
    print(json.dumps(asdict(probe(flavour))))


if __name__ == "__main__":
    main()
