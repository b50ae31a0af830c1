"""TensorRT-LLM's LoRA workflow, member by member."""

from support.api_table.rows import Document, Row, different, present

_OURS = "runtime.interfaces.trtllm"
_TESTS = "runtime/interfaces/test_trtllm_cache.py"
_FORMAT = "runtime/adapters/formats/test_trtllm.py"
_SHARD = "runtime/adapters/test_shard.py"
_BUILDS = "scripts/test_build_engine.py::test_the_command_builds_and_says_what_it_built"
_HELP = "scripts/test_build_engine.py::test_the_help_has_every_default"
_IDS = "plugins/contract/test_modules.py::test_the_table_has_the_names_of_tensorrt_llm_at_its_ids"
_ROW = f"{_FORMAT}::test_a_module_id_and_a_layer_name_a_site"
_FIRST = f"{_TESTS}::test_the_first_request_brings_the_weights_and_later_ones_the_id"
_OPTIONS = f"{_TESTS}::test_an_option_of_the_cache_holds_or_is_refused"
_MODULES = "plugins.contract.modules.MODULES"
_CONVERTERS = "as TensorRT-LLM's converter has it; the document's text says the opposite"
_NO_MODEL = "the name and its id are known; of the models that have it, none builds yet"
_FLAG = "accepted and left out, with a sentence why it is not needed"
_IGNORED = "scripts.terminal.trtllm_options.IGNORED"
_TRTLLM_OPTIONS = "scripts/terminal/test_trtllm_options.py"
_LEFT_OUT = f"{_TRTLLM_OPTIONS}::test_an_option_that_means_nothing_is_left_out_with_its_value"


def _module(number: int, name: str) -> Row:
    documented = f"module {number} `{name}`"
    if number in (5, 7):
        linear = "gate_proj" if number == 5 else "up_proj"
        return different(documented, _MODULES, _IDS, f"{linear}, {_CONVERTERS}")
    if number >= 8:
        return different(documented, _MODULES, _IDS, _NO_MODEL)
    return present(documented, _MODULES, _ROW)


_NAMES = (
    *("attn_qkv", "attn_q", "attn_k", "attn_v", "attn_dense", "mlp_h_to_4h", "mlp_4h_to_h"),
    *("mlp_gate", "cross_attn_qkv", "cross_attn_q", "cross_attn_k", "cross_attn_v"),
    *("cross_attn_dense", "moe_h_to_4h", "moe_4h_to_h", "moe_gate", "moe_router", "mlp_router"),
)

TRTLLM = Document(
    "TensorRT-LLM LoRA workflow",
    (
        different(
            "`convert_checkpoint.py --model_dir --output_dir --dtype`",
            "build-engine --model",
            _BUILDS,
            "there is no such step: a model is read as transformers saved it",
        ),
        different(
            "`trtllm-build`",
            "build-engine",
            _BUILDS,
            "another name; underscores in options are accepted",
        ),
        different(
            "`--checkpoint_dir`",
            "scripts.terminal.trtllm_options.REFUSED",
            f"{_TRTLLM_OPTIONS}::test_an_option_that_asks_for_what_is_not_there_is_refused",
            "there is no converted checkpoint; the message names `--model`",
        ),
        present("`--output_dir`", "build-engine --output-dir", _BUILDS),
        different("`--remove_input_padding enable`", _IGNORED, _LEFT_OUT, _FLAG),
        different("`--gpt_attention_plugin float16`", _IGNORED, _LEFT_OUT, _FLAG),
        different("`--context_fmha enable`", _IGNORED, _LEFT_OUT, _FLAG),
        different("`--paged_kv_cache enable`", _IGNORED, _LEFT_OUT, _FLAG),
        different("`--gemm_plugin float16`", _IGNORED, _LEFT_OUT, _FLAG),
        different(
            "`--lora_plugin float16`",
            "build-engine --lora-plugin",
            _HELP,
            "the same name with other values: which nodes a plan has",
        ),
        present("`--max_batch_size`", "build-engine --max-batch-size", _BUILDS),
        present("`--max_input_len`", "build-engine --max-input-len", _BUILDS),
        present(
            "`--max_seq_len`",
            "build-engine --max-seq-len",
            _HELP,
            "not taken from the model where it is left out",
        ),
        present(
            "`--lora_dir`",
            "build-engine --lora-dir",
            "builder/test_resolved_lora.py::test_real_adapters_decide_modules_and_ranks",
            "several",
        ),
        present("`--max_lora_rank`", "build-engine --max-lora-rank", _BUILDS),
        present(
            "`--lora_target_modules`",
            "build-engine --lora-target-modules",
            "plugins/contract/test_modules.py::test_a_module_name_means_itself",
            "and Hugging Face's names, and all-linear",
        ),
        different(
            "`hf_lora_convert.py -i IN -o OUT`",
            "trt-lora convert-adapter --format",
            "scripts/commands/test_convert_adapter.py::test_any_format_becomes_any_other",
            "`trt-lora convert-adapter IN OUT --format trtllm`",
        ),
        different(
            "`--storage-type float16`",
            "trt-lora convert-adapter --dtype",
            "runtime/adapters/formats/test_trtllm_writing.py::"
            "test_the_dtype_is_kept_unless_another_is_asked_for",
            "`--dtype float16`",
        ),
        different(
            "GptManager, in-flight batching",
            "runtime.serving.scheduler.Scheduler",
            "runtime/serving/test_scheduler.py::"
            "test_every_request_is_answered_as_alone_with_its_adapter",
            "in Python: requests join and leave at every step, each with its own adapter; a "
            "`Scheduler` takes the lease of a task",
        ),
        present(
            "Triton multi-LoRA",
            "runtime.serving.scheduler.Scheduler",
            "examples/test_triton.py::"
            "test_requests_of_more_adapters_than_slots_are_answered_as_alone",
            "`examples/triton`: a model of Triton's Python backend with `lora_name`; tested with a "
            "stand-in for that backend, not run inside Triton yet",
        ),
        present(
            "`lora_weights` [rows, D x Hi + Ho x D]",
            f"{_OURS}.TrtllmLoraRequest",
            f"{_FORMAT}::test_the_documented_example_is_read",
            "read and written",
        ),
        present(
            "`lora_config` [rows, 3]",
            f"{_OURS}.TrtllmLoraRequest",
            f"{_FORMAT}::test_the_documented_example_is_read",
            "three or four columns are read, four written (the last is DoRA's)",
        ),
        present(
            "rows of different rank, layers left out",
            f"{_OURS}.TrtllmLoraRequest",
            f"{_FORMAT}::test_the_documented_example_fits_its_engine_and_leaves_two_sites_alone",
        ),
        present("`lora_task_id`", f"{_OURS}.TrtllmLoraRequest", _FIRST),
        present(
            "weights once, then only the id",
            f"{_OURS}.PeftCacheManager.add_request_peft",
            _FIRST,
            "other weights under a cached id are refused, where TensorRT-LLM ignores them",
        ),
        present(
            "`run.py --lora_dir A B --lora_task_uids -1 0 1`",
            f"{_OURS}.PeftCacheManager.adapter_names",
            f"{_TESTS}::test_the_tasks_of_prompts_are_names_and_minus_one_is_the_base_model",
            "after `load_task` for each directory",
        ),
        present(
            "eviction of the oldest; error if not cached",
            f"{_OURS}.PeftTaskNotCachedError",
            f"{_TESTS}::test_the_oldest_task_leaves_a_full_cache_and_comes_back_with_its_weights",
            "the same message",
        ),
        different(
            "weights of all TP and PP ranks in one file",
            "runtime.adapters.shard.shard_adapter",
            f"{_SHARD}::test_column_parallel_ranks_compute_the_columns_in_order",
            "a file for each rank",
        ),
        *(_module(number, name) for number, name in enumerate(_NAMES)),
        present("host cache of a given size", f"{_OURS}.LoraCacheOptions", _OPTIONS),
        present("GPU cache, share of free memory", f"{_OURS}.LoraCacheOptions", _OPTIONS),
        present(
            "loaded into the GPU cache when scheduled",
            "runtime.managers.slots.slot_adapters.AdapterStore.activate",
            _FIRST,
        ),
        present(
            "ColumnLinear: B split, A whole",
            "runtime.adapters.shard.shard_adapter",
            f"{_SHARD}::test_column_parallel_ranks_compute_the_columns_in_order",
        ),
        present(
            "RowLinear: A split, B whole",
            "runtime.adapters.shard.shard_adapter",
            f"{_SHARD}::test_row_parallel_ranks_sum_up_to_the_whole",
        ),
        different(
            "running tensor parallel",
            "runtime.adapters.shard.shard_adapter",
            f"{_SHARD}::test_row_parallel_ranks_sum_up_to_the_whole",
            "adapters alone: it makes each rank's share, for ranks that another runtime runs; "
            "`build-engine` makes an engine for one GPU, and nothing here runs several together",
        ),
    ),
)
