"""Fields of a body that ask for what is not done here: refused by name, and never ignored."""

from typing import Any

import msgspec

from trt_lora.runtime.server.errors import HttpError

# Why, and what to do instead.
_REFUSED = {
    "tools": "no tool is called; describe the format in the prompt, or pass response_format",
    "functions": "no function is called; pass response_format",
    "tool_choice": "no tool is called; pass response_format",
    "audio": "an engine answers with tokens",
    "modalities": "an engine answers with text; pass ['text']",
    "mm_processor_kwargs": "an engine reads text",
    "media_io_kwargs": "an engine reads text",
    "logits_processors": "logits are changed by bias, penalties and grammars alone",
    "kv_transfer_params": "caches stay where they are",
    "ec_transfer_params": "caches stay where they are",
    "suffix": "an answer goes on from its prompt; put what follows into the prompt",
    "prompt_embeds": "an engine reads token ids",
    "best_of": "every answer that is made is returned; pass n",
    "watermarking": "answers carry no watermark",
    "repetition_detection": "no answer is ended for repeating; pass max_tokens or a penalty",
    "thinking_token_budget": "thinking is not told from answering; pass max_tokens",
    "vllm_xargs": "no extension reads it",
    "return_weight_versions": "the list of adapters tells their versions",
    "priority": "clients take turns; pass 0",
    "chat_template": "only the model's own is run; pass chat_template_kwargs",
    **dict.fromkeys(
        ("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
        "vLLM has taken it away, too; pass structured_outputs",
    ),
}

# What asks for nothing, where that is more or less than null, false, 0 and what is empty.
_NOTHING: dict[str, tuple[Any, ...]] = {
    "best_of": (None, 1),
    "tool_choice": (None, "none", "auto"),
    "modalities": (None, ["text"]),
    "thinking_token_budget": (None, -1),
}


class RefusedFields(msgspec.Struct, kw_only=True):
    """Those fields; `chat_template` and the like are refused of any route."""

    tools: Any = None
    functions: Any = None
    tool_choice: Any = None
    audio: Any = None
    modalities: Any = None
    mm_processor_kwargs: Any = None
    media_io_kwargs: Any = None
    logits_processors: Any = None
    kv_transfer_params: Any = None
    ec_transfer_params: Any = None
    suffix: Any = None
    prompt_embeds: Any = None
    best_of: Any = None
    watermarking: Any = None
    repetition_detection: Any = None
    thinking_token_budget: Any = None
    vllm_xargs: Any = None
    return_weight_versions: Any = None
    priority: Any = None
    chat_template: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None

    def check_refused(self) -> None:
        """Look at all of them.

        Raises:
            HttpError: 400, by the name of the first that asks for something.
        """
        for name, why in _REFUSED.items():
            given = getattr(self, name)
            if given not in _NOTHING[name] if name in _NOTHING else given:
                raise HttpError(400, f"{name} is not supported: {why}", name)
