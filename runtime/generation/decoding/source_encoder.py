"""Sources of sequences: the encoder writes what decoder layers attend to into their rows."""

from trt_lora.plugins.contract.step import CROSS, SOURCE
from trt_lora.runtime.engines.engine import Executor
from trt_lora.runtime.generation.decoding.kv_cache import KVCache
from trt_lora.runtime.generation.sequence import Sequence
from trt_lora.runtime.manifest import EncoderPart
from trt_lora.runtime.memory.dtypes import Array
from trt_lora.runtime.memory.tensor import TensorMap, tensor_from_numpy
from trt_lora.runtime.store.step_bindings import StepBindings


class SourceEncoder:
    """Runs one source at a time, with the adapter of its sequence.

    A row's cross cache is of one source and one version of one adapter, which a sequence keeps from
    its first token to its last. Where it loses its row, its source is run again.
    """

    def __init__(
        self, encoder: Executor, part: EncoderPart, cache: KVCache, bindings: StepBindings
    ) -> None:
        """Run nothing yet.

        Args:
            encoder: a running one.
            part: what the manifest says of it.
            cache: whose rows it writes to.
            bindings: of the engine's adapters.
        """
        self._encoder, self._part, self._cache, self._bindings = encoder, part, cache, bindings

    def encode(self, sequence: Sequence) -> None:
        """Fill the cross cache of a sequence's row.

        Raises:
            BackendError: the run failed.
        """
        assert sequence.source is not None  # nobody submits one without
        row = self._cache.row_of(sequence)
        tensor_map = TensorMap(self._bindings.rows([sequence.lease]))
        tensor_map[SOURCE] = tensor_from_numpy(sequence.source[None])
        views = self._cache.views(row, 1)
        tensor_map.update({name: view for name, view in views.items() if name.startswith(CROSS)})
        self._encoder.execute(tensor_map)
        self._cache.source_lengths[row] = self._positions(sequence.source)

    def _positions(self, source: Array) -> int:
        return self._part.max_source_len if self._part.takes_features else source.size
