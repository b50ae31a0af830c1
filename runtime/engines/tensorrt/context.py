"""Execution context that re-binds only changed inputs."""

from collections.abc import Collection, Mapping
from typing import Any

from trt_lora.plugins.errors import BackendError, TensorError
from trt_lora.plugins.kernels.candidates import launch_candidates
from trt_lora.runtime.engines.tensorrt.run_key import BoundAddress, RunKey, TopKSearch


class BoundContext:
    """Runs of one execution context on one stream.

    The caller keeps the memory of a run until the stream has passed it.
    """

    def __init__(
        self, context: Any, outputs: Collection[str], unread: Mapping[str, int], stream: int
    ) -> None:
        """Take a context.

        Args:
            context: of the plan.
            outputs: names of those whose addresses come with each run.
            unread: addresses of the others, which nobody reads.
            stream: on which all runs are.
        """
        self.context = context
        self._unread = dict(unread)
        self._outputs = frozenset(outputs)
        self._stream = stream
        self._profile = 0
        self._set: dict[str, BoundAddress] = {}
        self._search: TopKSearch | None = None
        self._bind_unread()

    def run(self, key: RunKey) -> None:
        """Set what differs from the run before, and enqueue.

        Raises:
            TensorError: TensorRT refuses a shape or an address.
            BackendError: it refuses the profile or the run.
        """
        if key.profile != self._profile:
            self._use_profile(key.profile)
        for name, address in key.addresses.items():
            if self._set.get(name) != address:
                self._bind(name, address)
        for name in self._outputs:
            self._check_shape(name, key.addresses[name][1])
        self._search = key.search
        self.enqueue()

    def enqueue(self) -> None:
        """Enqueue a run with what is set, and the search for candidates that belongs to it.

        Raises:
            BackendError: TensorRT refuses the run, or CUDA the search.
        """
        if not self.context.execute_async_v3(self._stream):
            raise BackendError("the engine failed to run; its own log says why")
        if self._search is not None:
            launch_candidates(*self._search, self._stream)

    def _use_profile(self, index: int) -> None:
        self._set.clear()  # a switch forgets shapes and addresses
        self._profile = -1  # unknown, should the switch fail
        if not self.context.set_optimization_profile_async(index, self._stream):
            raise BackendError(f"TensorRT refuses optimization profile {index} of this engine")
        self._profile = index
        self._bind_unread()

    def _bind_unread(self) -> None:
        for name, pointer in self._unread.items():
            self._set_address(name, pointer)

    def _bind(self, name: str, address: BoundAddress) -> None:
        pointer, shape = address
        self._set.pop(name, None)  # unknown until both are set
        if name not in self._outputs and not self.context.set_input_shape(name, shape):
            raise TensorError(f"TensorRT refuses shape {list(shape)} for {name}")
        self._set_address(name, pointer)
        self._set[name] = address

    def _set_address(self, name: str, pointer: int) -> None:
        if not self.context.set_tensor_address(name, pointer):
            raise TensorError(f"TensorRT refuses address {pointer:#x} for {name}")

    def _check_shape(self, name: str, expected: tuple[int, ...]) -> None:
        """A smaller buffer than the engine writes would be silent damage."""
        found = tuple(self.context.get_tensor_shape(name))
        if found != expected:
            raise BackendError(
                f"by the engine, {name} has shape {list(found)}; by its manifest and the inputs "
                f"{list(expected)}: the inputs disagree about a dimension, or the plan is of "
                "another engine and has to be built again"
            )
