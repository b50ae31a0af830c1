"""A base model on disk: config fields, weight headers and token ids, each parsed once."""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trt_lora.builder.checkpoint.gguf_weights import GgufWeights, gguf_weights
from trt_lora.builder.checkpoint.model_directory import CONFIG_FILE, check_directory, read_object
from trt_lora.builder.checkpoint.quantisation import Quantisation, stated_quantisation
from trt_lora.builder.checkpoint.weight_files import (
    StoredWeight,
    lone_gguf,
    read_header,
    read_weights,
    weight_files,
)
from trt_lora.plugins.errors import ModelError
from trt_lora.plugins.messages import shown
from trt_lora.runtime.generation.parameters.default_sampling import GENERATION_FILE

if TYPE_CHECKING:  # torch takes seconds to import, and headers need none
    import torch

# The encoder-decoders that are built, by their types, and their classes.
ENCODER_DECODERS: Mapping[str, str] = {
    "bart": "BartForConditionalGeneration",
    "marian": "MarianMTModel",
    "mbart": "MBartForConditionalGeneration",
    "t5": "T5ForConditionalGeneration",
    "whisper": "WhisperForConditionalGeneration",
}


@dataclass(frozen=True)
class Checkpoint:
    """The directory of a base model; every property is read when it is first asked for.

    Raises:
        ModelError: it is no such directory, or a download left it unfinished. The properties raise
            it where their files are missing or damaged.
    """

    directory: Path

    def __post_init__(self) -> None:
        """Look at the directory and its small files."""
        check_directory(self.directory)

    @property
    def config_path(self) -> Path:
        """Path of the config.json."""
        return self.directory / CONFIG_FILE

    @cached_property
    def fields(self) -> Mapping[str, Any]:
        """What is in the config.json."""
        return read_object(self.config_path)

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether it is one of `ENCODER_DECODERS`."""
        named = self.fields.get("architectures")
        own = ENCODER_DECODERS.get(str(self.fields.get("model_type")))
        return isinstance(named, list) and own in named

    @cached_property
    def quantisation(self) -> Quantisation | None:
        """The codes that the weights are in; None: they are floats."""
        stated = stated_quantisation(self.config_path, self.fields)
        if self.gguf is None:
            return stated
        if stated is not None:
            raise stated.refusal(f"the weights beside it are in {self.gguf.file.path.name}")
        return self.gguf.quantisation

    @cached_property
    def gguf(self) -> GgufWeights | None:
        """The weights in a GGUF file; None: they are in files of another kind."""
        path = lone_gguf(self.directory)
        return None if path is None else gguf_weights(path, self.fields)

    @cached_property
    def headers(self) -> Mapping[Path, tuple[StoredWeight, ...]]:
        """What each file of the weights says that it holds; the files that transformers reads."""
        if self.gguf is not None:
            return {self.gguf.file.path: self.gguf.header}
        return {path: read_header(path) for path in weight_files(self.directory)}

    @property
    def weights(self) -> tuple[StoredWeight, ...]:
        """The header entries of all files."""
        return tuple(weight for header in self.headers.values() for weight in header)

    @cached_property
    def homes(self) -> Mapping[str, Path]:
        """The file of each tensor, by the tensor's name."""
        return {weight.name: path for path, header in self.headers.items() for weight in header}

    def read(
        self, path: Path, is_wanted: Callable[[str], object]
    ) -> "Iterator[tuple[str, torch.Tensor]]":
        """Yield tensors of one of the files, one at a time, by name."""
        read = partial(read_weights, path) if self.gguf is None else self.gguf.read
        return read(is_wanted)

    def tensor(self, name: str) -> "torch.Tensor":
        """Read one of the tensors."""
        return next(self.read(self.homes[name], name.__eq__))[1]

    def stop_token_ids(self, config: Any) -> tuple[int, ...]:
        """Return the tokens that end an answer; none where the model names none.

        Args:
            config: transformers' config of the model.

        Raises:
            ModelError: generation_config.json is damaged, or what it names are no tokens.
        """
        return self._token_ids(config, "eos_token_id", several=True)

    def pad_token_id(self, config: Any) -> int:
        """Return a token for positions that count for nothing: the model's, a stop token, else 0.

        A token that the embeddings do not have is passed over; some models name one.

        Args:
            config: transformers' config of the model.

        Raises:
            ModelError: generation_config.json is damaged, or what it names is no token.
        """
        named = self._token_ids(config, "pad_token_id", several=False)
        vocabulary = config.get_text_config(decoder=True).vocab_size
        candidates = (*named, *self.stop_token_ids(config))
        return next((token for token in candidates if token < vocabulary), 0)

    @cached_property
    def generation(self) -> Mapping[str, Any]:
        """What is in the generation_config.json; nothing where there is none."""
        path = self.directory / GENERATION_FILE
        return read_object(path) if os.path.lexists(path) else {}

    def _token_ids(self, config: Any, name: str, *, several: bool) -> tuple[int, ...]:
        has_own = name in self.generation
        value = self.generation[name] if has_own else getattr(config, name, None)
        tokens = value if several and isinstance(value, list) else [] if value is None else [value]
        if not all(type(token) is int for token in tokens):
            path = self.directory / (GENERATION_FILE if has_own else CONFIG_FILE)
            expected = "a token or a list of tokens" if several else "a token"
            raise ModelError(
                f"{path}: {name} is {shown(value)}, expected {expected}, as whole numbers"
            )
        return tuple(token for token in tokens if token >= 0)  # -1 means that there is none
