"""Every field of vLLM 0.33's requests is read here, or changes no answer of an engine."""

import msgspec
import pytest

from trt_lora.runtime.server.answers.bodies import ChatBody, CompletionBody
from trt_lora.runtime.server.answers.tokenizing import DetokenizeBody, TokenizeBody

# vllm/entrypoints/openai/completion/protocol.py, chat_completion/protocol.py and
# vllm/entrypoints/serve/tokenize/protocol.py
BOTH = """model frequency_penalty logit_bias logprobs max_tokens n presence_penalty response_format
    seed stop stream stream_options temperature top_p user use_beam_search top_k min_p
    repetition_penalty watermarking length_penalty stop_token_ids include_stop_str_in_output
    ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens
    truncation_side allowed_token_ids prompt_logprobs logprob_token_ids bad_words echo
    add_special_tokens structured_outputs priority request_id session_id
    return_tokens_as_token_ids return_token_ids return_weight_versions routed_experts_prompt_start
    return_token_offsets mm_payload return_mm_kwargs cache_salt kv_transfer_params
    ec_transfer_params vllm_xargs repetition_detection thinking_token_budget stream_interval"""
FIELDS: dict[type[msgspec.Struct], str] = {
    CompletionBody: f"{BOTH} prompt suffix prompt_embeds",
    ChatBody: f"""{BOTH} messages top_logprobs max_completion_tokens tools tool_choice
        reasoning_effort include_reasoning parallel_tool_calls add_generation_prompt
        continue_final_message documents chat_template chat_template_kwargs media_io_kwargs
        mm_processor_kwargs return_prompt_text""",
    TokenizeBody: """model prompt messages add_special_tokens return_token_strs
        add_generation_prompt continue_final_message chat_template chat_template_kwargs tools
        media_io_kwargs mm_processor_kwargs""",
    DetokenizeBody: "model tokens",
}
WITHOUT_EFFECT: dict[type[msgspec.Struct], set[str]] = {
    CompletionBody: {
        "length_penalty",  # of several beams
        "session_id",  # rows are no one's
        "routed_experts_prompt_start",  # no engine has experts
        *("return_token_offsets", "mm_payload", "return_mm_kwargs"),  # of routes that only render
    },
    TokenizeBody: {"media_io_kwargs", "mm_processor_kwargs"},  # of pictures, which are refused
}
WITHOUT_EFFECT[ChatBody] = WITHOUT_EFFECT[CompletionBody] | {
    "include_reasoning",  # no reasoning is told from an answer
    "parallel_tool_calls",  # nor is a tool called
}


@pytest.mark.parametrize("kind", FIELDS)
def test_no_field_that_changes_an_answer_is_ignored(kind: type[msgspec.Struct]) -> None:
    names = {field.name for field in msgspec.structs.fields(kind)}
    assert set(FIELDS[kind].split()) - names == WITHOUT_EFFECT.get(kind, set())
