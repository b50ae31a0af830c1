"""The plugins of a flavour, as a plan knows them: what fails in them, and kernels to load."""

from trt_lora.plugins.tensorrt.plugin_failures import PluginFailures


class FakePlugins:
    """Plugins that run nothing."""

    def __init__(self) -> None:
        """Nothing has failed, and nothing is loaded."""
        self.failures, self.kernels = PluginFailures(), self
        self.loaded: list[tuple[str, bool]] = []

    def load(self, dtype: str, *, has_slots: bool) -> None:
        """Keep what is loaded."""
        self.loaded.append((dtype, has_slots))
