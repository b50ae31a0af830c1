"""An engine whose logits say nothing, with a token for every byte: what is said, grammars say."""

from pathlib import Path
from typing import Any

import numpy as np
from support.fakes.fake_engine import FakeExecutor, make_manifest
from support.schedulers import scheduler_of
from support.steps import step_of
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from trt_lora.runtime.generation.parameters.sampling_params import SamplingParams
from trt_lora.runtime.generation.text.tokenizer import TextTokenizer
from trt_lora.runtime.generation.token import Token
from trt_lora.runtime.memory.tensor import Tensor, TensorMap, tensor_from_numpy

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
STOP, VOCABULARY = len(BYTES) + 2, 300  # the vocabulary has tokens that the tokenizer has not
LONGEST = 1000


class RandomLogits(FakeExecutor):
    """Answers with logits that say nothing; `}`, `]` and quotes are likely, so that answers end."""

    def __init__(self, seed: int) -> None:
        manifest = make_manifest()
        fields = {**vars(manifest), "max_seq_len": LONGEST + 8}
        fields["outputs"] = tuple(
            type(o)(o.name, o.dtype, ("kept", VOCABULARY) if o.name == "logits" else o.shape)
            for o in manifest.outputs
        )
        fields["inputs"] = tuple(
            type(b)(b.name, b.dtype, tuple(LONGEST + 8 if n == 32 else n for n in b.shape))
            for b in manifest.inputs
        )
        super().__init__(type(manifest)(**fields))
        self._random = np.random.default_rng(seed)

    def execute(self, tensor_map: TensorMap) -> dict[str, Tensor]:
        shape = (tensor_map["kept"].numpy().size, VOCABULARY)
        logits = self._random.normal(0, 3, shape).astype(np.float32)
        logits[:, [BYTES.index(char) for char in '}]"0,']] += 8
        logits[:, STOP] += 9
        return {"logits": tensor_from_numpy(logits)}


def byte_tokenizer(folder: Path) -> TextTokenizer:
    """A token for every byte, two longer ones, and one that ends the answer."""
    tokens = {token: number for number, token in enumerate([*BYTES, '":', "00"])}
    made = Tokenizer(models.BPE(tokens, [('"', ":"), ("0", "0")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<end>"])
    made.save(str(folder / "tokenizer.json"))
    assert made.token_to_id("<end>") == STOP
    return TextTokenizer(folder)


def params_of(**fields: Any) -> SamplingParams:
    """Greedy, as long as the engine has room, and ended by `STOP` alone."""
    given = {
        "max_tokens": LONGEST,
        "temperature": 0.0,
        "stop_token_ids": [STOP],
        "ignore_eos": True,
        "seed": 0,
        **fields,
    }
    return SamplingParams(**given)


def tokens_of(tokenizer: TextTokenizer, params: SamplingParams, seed: int = 0) -> list[Token]:
    batch = scheduler_of(RandomLogits(seed), tokenizer=tokenizer, rows=1)
    batch.submit([3, 4], params)
    tokens: list[Token] = []
    while batch:
        tokens += step_of(batch)
    return tokens
