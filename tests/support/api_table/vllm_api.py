"""vLLM's LoRA API, member by member.

The document is a third party's reading: its error codes L001 to L005 never existed in vLLM; the
exceptions they stand for are served.
"""

from support.api_table.rows import Document, different, present

_OURS = "runtime.interfaces.vllm"
_MANAGER = f"{_OURS}.LoRAModelManager"
_WORKER = f"{_OURS}.WorkerLoRAManager"
_TESTS = "runtime/interfaces/test_vllm_manager.py"
_ADDED = f"{_TESTS}::test_an_adapter_is_added_once_and_removed_once"
_ACTIVATED = f"{_TESTS}::test_an_adapter_is_activated_once_stays_in_its_slot_and_is_let_go_once"
_FULL = f"{_TESTS}::test_a_full_registry_is_a_runtime_error_and_lru_forgets_the_oldest"
_REQUEST = f"{_TESTS}::test_a_request_loads_its_adapter_and_activates_it"
_REFUSED = f"{_TESTS}::test_a_request_that_cannot_be_served_registers_nothing"
_MODULES = f"{_TESTS}::test_the_manager_knows_the_modules_of_the_engine"
_METRICS = f"{_TESTS}::test_metrics_have_the_documents_sections_and_count"

VLLM_API = Document(
    "vLLM API",
    (
        different(
            "`LoRAModelManager(model, max_num_seqs, ..., device)`",
            _MANAGER,
            "runtime/interfaces/test_vllm_data.py::"
            "test_a_config_that_contradicts_the_engine_is_refused",
            "takes the config, the adapters and the manifest of an engine, whose limits the other "
            "arguments are",
        ),
        present("`add_adapter(adapter) -> bool`", f"{_MANAGER}.add_adapter", _ADDED),
        present("`remove_adapter(id) -> bool`", f"{_MANAGER}.remove_adapter", _ADDED),
        present("`activate_adapter(id) -> bool`", f"{_MANAGER}.activate_adapter", _ACTIVATED),
        present("`deactivate_adapter(id)`", f"{_MANAGER}.deactivate_adapter", _ACTIVATED),
        present("`list_adapters()`", f"{_MANAGER}.list_adapters", _ADDED),
        present(
            "`set_adapter_mapping(mapping)`",
            f"{_MANAGER}.set_adapter_mapping",
            f"{_TESTS}::test_rows_take_the_adapters_of_the_mapping",
            "`step_inputs` then returns what a step binds",
        ),
        present("`capacity`, `lora_slots`", f"{_MANAGER}.capacity", _FULL),
        present("`LRUCacheLoRAModelManager`", f"{_OURS}.LRUCacheLoRAModelManager", _FULL),
        present(
            "`remove_oldest_adapter()`",
            f"{_OURS}.LRUCacheLoRAModelManager.remove_oldest_adapter",
            f"{_TESTS}::test_the_oldest_that_is_not_pinned_is_removed",
        ),
        present("`supported_lora_modules`", f"{_MANAGER}.supported_lora_modules", _MODULES),
        present("`packed_modules_mapping`", f"{_MANAGER}.packed_modules_mapping", _MODULES),
        present("`WorkerLoRAManager.add_adapter(request)`", f"{_WORKER}.add_adapter", _REQUEST),
        present("`WorkerLoRAManager._load_adapter`", f"{_WORKER}._load_adapter", _REFUSED),
        present(
            "`set_active_adapters(requests, mapping)`",
            f"{_WORKER}.set_active_adapters",
            f"{_TESTS}::test_a_batch_has_its_adapters_active_and_no_others",
        ),
        different(
            "`LLMEngine.add_lora`",
            f"{_WORKER}.add_lora",
            _REQUEST,
            "of the worker: an engine is one process, nothing is broadcast",
        ),
        different(
            "`LLMEngine.remove_lora`",
            f"{_WORKER}.remove_lora",
            _REQUEST,
            "of the worker: an engine is one process, nothing is broadcast",
        ),
        different(
            "`LoRAModel.from_local_checkpoint(...)`",
            f"{_OURS}.LoRAModel.from_local_checkpoint",
            "runtime/interfaces/test_vllm_data.py::"
            "test_a_checkpoint_that_is_missing_or_adapts_other_modules_is_refused",
            "without arguments for device, dtype and embeddings, which are the engine's; any "
            "format that `load_adapter` reads",
        ),
        different(
            "- falls back to `.bin`",
            "trt-lora convert-adapter",
            "scripts/commands/test_convert_adapter.py::test_a_bin_file_is_converted",
            "a `.bin` is a pickle, which can run code: it is converted once and never served",
        ),
        present("error L001 no free slot (RuntimeError)", "plugins.errors.StateError", _FULL),
        present("error L002 FileNotFoundError", f"{_WORKER}.add_adapter", _REFUSED),
        present("error L003 ValueError", "plugins.errors.AdapterError", _REFUSED),
        different(
            "error L004 out of memory",
            "plugins.errors.StateError",
            "runtime/managers/slots/test_adapter_cache.py::"
            "test_one_that_is_larger_than_the_budget_is_refused",
            "slots are allocated once; an adapter without room is refused before it is read, and "
            "who holds the memory is named",
        ),
        present(
            "error L005 validation",
            f"{_OURS}.PEFTHelper.validate_legal",
            "runtime/interfaces/test_vllm_data.py::"
            "test_the_helper_names_every_field_that_is_not_legal",
        ),
        different(
            "`download_lora_adapter(path)`",
            "scripts.terminal.adapters.hub_path",
            "scripts/terminal/test_hub.py::test_a_name_is_where_the_cache_has_it",
            "the commands take org/name; the runtime, which has no network, takes paths",
        ),
        present("`get_lora_metrics()` adapters", f"{_MANAGER}.get_lora_metrics", _METRICS),
        present("`get_lora_metrics()` memory", f"{_MANAGER}.get_lora_metrics", _METRICS),
        present("`get_lora_metrics()` performance", f"{_MANAGER}.get_lora_metrics", _METRICS),
    ),
)
