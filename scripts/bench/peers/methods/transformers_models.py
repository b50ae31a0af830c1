"""transformers, with the adapter in PEFT or merged into the weights."""

from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
from transformers.cache_utils import DynamicCache

from trt_lora.scripts.bench.peers.peer import PeerAnswer, Rows, Setup, timed


class WithPeft:
    """Scaled-dot-product attention, a cache that grows, logits of the last token only."""

    def load(self, setup: Setup) -> None:
        """Load the model and wrap it."""
        torch.set_num_threads(setup.threads)
        base: Any = AutoModelForCausalLM.from_pretrained(
            setup.model, dtype=torch.float32, attn_implementation="sdpa"
        )
        self._model = self._adapted(base, setup).eval()

    def answer(self, ids: Rows, steps: int) -> PeerAnswer:
        """Run the prompt into a new cache, then token after token."""
        self._cache, self._last = DynamicCache(), torch.tensor(ids)
        return timed(lambda: self._run(1), lambda: self._run(steps))

    def _adapted(self, base: Any, setup: Setup) -> Any:
        return PeftModel.from_pretrained(base, setup.adapter)

    @torch.inference_mode()
    def _run(self, steps: int) -> Rows:
        tokens = []
        for _ in range(steps):
            out = self._model(
                input_ids=self._last, past_key_values=self._cache, use_cache=True, logits_to_keep=1
            )
            self._last = out.logits[:, -1].argmax(-1)[:, None]
            tokens.append(self._last)
        rows: Rows = torch.cat(tokens, dim=1).tolist()
        return rows


class Merged(WithPeft):
    """The same without LoRA's work: what switching costs is left out."""

    def _adapted(self, base: Any, setup: Setup) -> Any:
        return PeftModel.from_pretrained(base, setup.adapter).merge_and_unload()
