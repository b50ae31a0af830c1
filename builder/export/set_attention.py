"""Choose the attention of a model by its registered name."""

from typing import Any

from trt_lora.builder.suppress_output import suppress_output


def set_attention(model: Any, name: str) -> None:
    """Make a `PreTrainedModel` use an attention, and its mask, from now on.

    `set_attn_implementation` leaves models alone that know no attention interface; their masks are
    made by the name in the config all the same.
    """
    with suppress_output():  # it warns of them
        model.set_attn_implementation(name)
    model.config._attn_implementation = name
