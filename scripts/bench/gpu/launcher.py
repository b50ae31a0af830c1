"""What launches the LoRA kernels: `plugins.kernels.Kernels` on a GPU, an emulation in the tests."""

from typing import Protocol

from trt_lora.plugins.group import GroupBuffers, GroupShape


class Launcher(Protocol):
    """Launches one call of the operator."""

    def launch(self, shape: GroupShape, buffers: GroupBuffers, stream: int) -> None:
        """Enqueue the call on a CUDA stream."""
        ...
