"""vLLM's `LLM` and its answers, member by member: what its LoRA page's program calls."""

from support.api_table.rows import Document, different, present

_OURS = "runtime.interfaces.vllm"
_LLM = f"{_OURS}.LLM"
_TESTS = "runtime/interfaces/test_vllm_llm.py"
_PROGRAM = f"{_TESTS}::test_the_program_of_vllms_page_runs"
_EACH = f"{_TESTS}::test_every_prompt_has_its_own_parameters_and_adapter_and_any_number_is_answered"

VLLM_LLM = Document(
    "vLLM `LLM`",
    (
        different(
            "`LLM(model, enable_lora=True, ...)`",
            _LLM,
            _PROGRAM,
            "the model is an engine directory; limits are the engine's, or refused",
        ),
        present(
            "`LLM.generate(prompts, sampling_params, lora_request=...)`", f"{_LLM}.generate", _EACH
        ),
        present(
            "`LLM.chat(messages, sampling_params, lora_request=...)`",
            f"{_LLM}.chat",
            f"{_TESTS}::test_a_conversation_is_answered_by_its_template",
        ),
        present(
            "`LLM.get_default_sampling_params()`",
            f"{_LLM}.get_default_sampling_params",
            f"{_TESTS}::test_parameters_are_by_default_the_models_over_vllms",
        ),
        different(
            "`LLM.get_tokenizer()`",
            f"{_LLM}.get_tokenizer",
            _EACH,
            "a `TextTokenizer`, which is none of transformers'",
        ),
        present("`RequestOutput.outputs[0].text`", f"{_OURS}.RequestOutput", _PROGRAM),
        present(
            "`CompletionOutput.logprobs`, `cumulative_logprob`",
            f"{_OURS}.CompletionOutput",
            f"{_TESTS}::test_log_probabilities_come_with_text_and_their_sum",
        ),
        present(
            "`RequestOutput.prompt_logprobs`",
            f"{_OURS}.RequestOutput",
            f"{_TESTS}::test_log_probabilities_of_a_prompt_come_with_text_and_none_for_its_first_token",
        ),
    ),
)
