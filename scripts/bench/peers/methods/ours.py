"""This project: an engine directory on ONNX Runtime, through `Batch`."""

from trt_lora.runtime import LoRAManager, SamplingParams, open_engine
from trt_lora.runtime.generation.batch import Batch
from trt_lora.scripts.bench.peers.peer import Setup, Timed, timed


class Ours:
    """Files: the engine directory. ONNX Runtime takes a thread for every core by default."""

    def load(self, setup: Setup) -> None:
        """Open the engine; load and activate the adapter."""
        (directory,) = setup.files
        self._engine = open_engine(directory, "onnxruntime").__enter__()  # until the process ends
        self._manager = LoRAManager()
        self._manager.initialize_engine_bindings(self._engine)
        self._manager.load_weights("adapter", setup.adapter)
        self._manager.switch_weights("adapter")

    def prompt(self, ids: list[list[int]], steps: int) -> Timed:
        """Step until every row has a token."""
        self._batch = Batch(self._engine, manager=self._manager, rows=len(ids))
        sampling = SamplingParams(max_new_tokens=steps + 1, stop_token_ids=())
        self._rows = [self._batch.add(row, sampling) for row in ids]
        return timed(lambda: self._steps(1))

    def decode(self) -> Timed:
        """Step until no row is left."""
        return timed(lambda: self._steps(None))

    def _steps(self, count: int | None) -> list[list[int]]:
        """Make `count` steps that give tokens, or all that are left."""
        tokens: dict[int, list[int]] = {row: [] for row in self._rows}
        while self._batch and count != min(map(len, tokens.values())):
            for token in self._batch.step():
                assert token.token_id is not None  # there are no stop tokens
                tokens[token.row].append(token.token_id)
        return [tokens[row] for row in self._rows]
