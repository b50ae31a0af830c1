"""An encoder-decoder as two modules to trace: an encoder that ends in a cross cache, and a step.

The encoder takes one source at a time, and writes what every decoder layer attends to into a row of
the cross cache. The step reads that beside its own cache. Nothing of transformers is replaced but
what takes one length for all rows: positions, and T5's bias of relative positions.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from transformers.cache_utils import EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from trt_lora.builder.export.attention import ATTENTION, row_mask, seen_mask, set_attention
from trt_lora.builder.export.cache_layout import CacheLayout
from trt_lora.builder.export.static_cache import RowCache, write_rows
from trt_lora.builder.export.static_step import StaticStep
from trt_lora.builder.passes.linears import WRAPPER_ATTRIBUTE
from trt_lora.plugins.contract.step import CROSS, NEW_CROSS, SOURCE, SOURCE_LENGTHS
from trt_lora.runtime.generation.decoding.step_inputs import BATCH, SOURCE_SIZE, cache_names

_CROSS_ATTENTION = ("EncDecAttention", "encoder_attn")  # T5's name, and that of all others


def cross_attentions(model: Any) -> list[Any]:
    """Return the modules by which each decoder layer attends to the source, in their order."""
    found = model.get_decoder().named_modules()
    return [module for path, module in found if path.endswith(_CROSS_ATTENTION)]


def cross_layouts(model: Any) -> tuple[CacheLayout, ...]:
    """Return the sizes of every layer's cross cache, which are those of its own cache too."""
    return tuple(_layout(attention) for attention in cross_attentions(model))


def takes_features(model: Any) -> bool:
    """Whether a source is an array of features [bins, frames], as Whisper's, not token ids."""
    return bool(model.main_input_name == "input_features")


class EncoderStep(torch.nn.Module):
    """The encoder, with the linears by which decoder layers make keys and values of its output."""

    def __init__(self, model: Any, max_source_len: int) -> None:
        """Wrap a `PreTrainedModel`, and set its attention.

        Args:
            model: in evaluation mode.
            max_source_len: positions that a row of the cross cache has room for.
        """
        super().__init__()
        set_attention(model, ATTENTION)
        setattr(self, WRAPPER_ATTRIBUTE, model)
        self.layouts, self.dtype = cross_layouts(model), model.dtype
        self._max_len, self._takes_features = max_source_len, takes_features(model)
        self.input_names = [SOURCE, *cache_names(CROSS, len(self.layouts))]
        self.output_names = cache_names(NEW_CROSS, len(self.layouts))

    def forward(
        self, source: torch.Tensor, cross: list[list[torch.Tensor]]
    ) -> tuple[torch.Tensor, ...]:
        """Write keys and values of a source [1, s] or [1, bins, frames] into the cross cache."""
        model = getattr(self, WRAPPER_ATTRIBUTE)
        all_seen = None
        if not self._takes_features:  # a source by itself has no padding
            batch, size = source.shape
            all_seen = torch.zeros(batch, 1, size, size, dtype=self.dtype)
        hidden = model.get_encoder()(source, attention_mask=all_seen).last_hidden_state
        start = torch.zeros(hidden.shape[0], dtype=torch.long)
        written = []
        for attention, pair in zip(cross_attentions(model), cross, strict=True):
            layout = _layout(attention)
            for linear, old in zip(_keys_and_values(attention), pair, strict=True):
                split = linear(hidden).unflatten(-1, (layout.heads, layout.key_dim))
                written.append(write_rows(old, split.transpose(1, 2), start))
        return tuple(written)

    def example_inputs(self) -> tuple[Any, ...]:
        """Return two sources of one length, so that no dimension is specialised away."""
        model, batch = getattr(self, WRAPPER_ATTRIBUTE), 2
        if self._takes_features:
            frames = source_frames(model, self._max_len)
            source = torch.zeros(batch, model.config.num_mel_bins, frames, dtype=self.dtype)
        else:
            source = torch.zeros(batch, min(5, self._max_len - 1), dtype=torch.long)
        return source, [layout.unset(batch, self._max_len, self.dtype) for layout in self.layouts]

    def dynamic_shapes(self) -> tuple[Any, ...]:
        """Return the names of those dimensions of the example inputs that vary."""
        source = {0: BATCH} if self._takes_features else {0: BATCH, 1: SOURCE_SIZE}
        return source, [[{0: BATCH}, {0: BATCH}] for _ in self.layouts]


class DecoderStep(StaticStep):
    """A step that reads the cross cache of every row as far as its source goes."""

    def __init__(self, model: Any, max_len: int, max_source_len: int) -> None:
        """As `StaticStep`; `max_source_len` as in `EncoderStep`."""
        super().__init__(model, cross_layouts(model), max_len)
        self._max_source_len = max_source_len
        self.input_names += [SOURCE_LENGTHS, *cache_names(CROSS, len(self.layouts))]

    def forward(  # type: ignore[override] # only the exporter calls it
        self,
        input_ids: torch.Tensor,
        lengths: torch.Tensor,
        kept: torch.Tensor,
        bound: torch.Tensor,
        caches: list[list[torch.Tensor]],
        source_lengths: torch.Tensor,
        cross: list[list[torch.Tensor]],
    ) -> tuple[torch.Tensor, ...]:
        """Run the decoder; return logits [kept, vocab] and its own caches as written."""
        model, (batch, new_tokens) = getattr(self, WRAPPER_ATTRIBUTE), input_ids.shape
        own = RowCache(caches, lengths, bound.shape[0], new_tokens)
        full = RowCache(cross, source_lengths, self._max_source_len, 0)
        positions = lengths[:, None] + torch.arange(new_tokens)
        keys = torch.arange(self._max_source_len)
        seen = keys < source_lengths[:, None, None, None]
        seen = seen.expand(batch, 1, new_tokens, self._max_source_len)
        with self._only(kept), _positions_of_rows(model.get_decoder(), positions):
            out = model(
                decoder_input_ids=input_ids,
                decoder_attention_mask=row_mask(positions, bound.shape[0], self.dtype),
                attention_mask=seen_mask(seen, self.dtype),
                # Only its sizes are read: all keys and values of it are in the cache.
                encoder_outputs=BaseModelOutput(
                    torch.zeros(batch, self._max_source_len, 1, dtype=self.dtype)
                ),
                past_key_values=EncoderDecoderCache(own, full),
                use_cache=True,
            )
        return out.logits[0], *own.written

    def example_inputs(self) -> tuple[Any, ...]:
        """As `StaticStep`, with two sources of different lengths."""
        cross = [layout.unset(2, self._max_source_len, self.dtype) for layout in self.layouts]
        return *super().example_inputs(), torch.tensor([1, 2]), cross

    def dynamic_shapes(self) -> tuple[Any, ...]:
        """Return the names of those dimensions of the example inputs that vary."""
        *tokens, caches = super().dynamic_shapes()
        return *tokens, caches, {0: BATCH}, caches


def source_frames(model: Any, positions: int) -> int:
    """Return the frames of features that a model makes so many positions of."""
    encoder = model.get_encoder()
    return positions * int(encoder.conv1.stride[0] * encoder.conv2.stride[0])


def _layout(attention: Any) -> CacheLayout:
    is_t5 = hasattr(attention, "n_heads")
    heads = attention.n_heads if is_t5 else attention.num_heads
    dim = attention.key_value_proj_dim if is_t5 else attention.head_dim
    return CacheLayout(heads, dim, dim)


def _keys_and_values(attention: Any) -> tuple[Any, Any]:
    is_t5 = hasattr(attention, "n_heads")
    return (attention.k, attention.v) if is_t5 else (attention.k_proj, attention.v_proj)


@contextmanager
def _positions_of_rows(decoder: Any, positions: torch.Tensor) -> Iterator[None]:
    """Give each row positions [batch, s] of its own, by a table of them or by T5's bias."""
    with ExitStack() as stack:
        if table := getattr(decoder, "embed_positions", None):
            given = table.register_forward_pre_hook(
                lambda module, args, options: (
                    args,
                    {**options, "position_ids": positions.reshape(-1)},
                ),
                with_kwargs=True,
            )
            found = table.register_forward_hook(
                lambda module, args, output: output.reshape(*positions.shape, -1)
            )
            stack.callback(given.remove)
            stack.callback(found.remove)
        else:
            attention = decoder.block[0].layer[0].SelfAttention  # layers share what it returns
            attention.compute_bias = partial(_bias_of_rows, attention, positions)
            stack.callback(delattr, attention, "compute_bias")
        yield


def _bias_of_rows(
    attention: Any,
    positions: torch.Tensor,
    query_length: int,
    key_length: int,
    device: object = None,
    past_seen_tokens: object = 0,
) -> torch.Tensor:
    """T5's bias [batch, heads, s, keys]; the signature behind `positions` is transformers'."""
    del query_length, device, past_seen_tokens  # of one length for all rows
    relative = torch.arange(key_length) - positions[:, :, None]
    buckets = attention._relative_position_bucket(
        relative,
        bidirectional=False,
        num_buckets=attention.relative_attention_num_buckets,
        max_distance=attention.relative_attention_max_distance,
    )
    bias: torch.Tensor = attention.relative_attention_bias(buckets).permute(0, 3, 1, 2)
    return bias
