"""vLLM's data structures, member by member.

The document is a third party's reading; where a name never existed in vLLM, the need is served.
"""

from support.api_table.rows import Document, different, present

_OURS = "runtime.interfaces.vllm"
_DATA = "runtime/interfaces/test_vllm_data.py"
_MANAGER = "runtime/interfaces/test_vllm_manager.py"
_CACHE = "runtime/managers/slots/test_adapter_cache.py"
_SLOTS = "runtime.managers.slots.slot_adapters.SlotAdapters"
_MODEL = f"{_DATA}::test_a_model_of_a_peft_directory_has_its_layers_scale_and_rank"
_CLONE = f"{_DATA}::test_a_clone_has_another_number_and_an_optimized_model_the_same_deltas"
_DELTA = f"{_DATA}::test_the_delta_of_a_layer_is_the_scaled_product_before_and_after_optimize"
_SURPLUS = (
    "runtime/adapters/formats/test_peft.py::"
    "test_a_tensor_that_is_no_factor_of_a_linear_is_set_aside_with_a_reason"
)
_FIELDS = f"{_DATA}::test_a_request_knows_its_fields_by_both_names"
_WRONG_REQUEST = f"{_DATA}::test_a_request_with_a_wrong_or_unsupported_field_is_refused"
_MAPPING = f"{_DATA}::test_a_mapping_of_ids_gives_every_adapter_an_index_and_the_base_zero"
_CONFIG = f"{_DATA}::test_a_config_takes_what_it_leaves_open_from_the_engine"
_OPEN = f"{_DATA}::test_a_config_that_contradicts_the_engine_is_refused"
_WRONG_CONFIG = (
    f"{_DATA}::test_a_config_out_of_range_or_with_an_unsupported_option_is_a_value_error"
)
_HELPER = f"{_DATA}::test_the_helper_reads_what_the_config_says"
_LEGAL = f"{_DATA}::test_the_helper_names_every_field_that_is_not_legal"
_ROWS = (
    "runtime/managers/slots/test_slot_adapters.py::"
    "test_a_step_binds_the_slots_of_its_rows_and_counts_from_the_first"
)
_EVICTION = f"{_CACHE}::test_the_least_recently_used_leaves_the_host_and_is_read_again"
_REFUSED = "the option is refused by name"

VLLM_STRUCTURES = Document(
    "vLLM data structures",
    (
        present("`LoRAModel.id`", f"{_OURS}.LoRAModel", _MODEL),
        present("`LoRAModel.rank`", f"{_OURS}.LoRAModel.rank", _MODEL, "the largest of a layer"),
        different(
            "`LoRAModel.scaling`",
            f"{_OURS}.LoRAModel.scaling",
            f"{_DATA}::test_layers_of_different_scales_have_no_common_one",
            "an error where layers have different scales, which alpha_pattern makes",
        ),
        present("`LoRAModel.loras`", f"{_OURS}.LoRAModel.loras", _MODEL),
        different(
            "`LoRAModel.embeddings_tensor`, `extra_vocab_size`",
            f"{_OURS}.LoRAModel.extra_vocab_size",
            _SURPLUS,
            "always 0: an engine's vocabulary is fixed, such tensors are refused by name",
        ),
        present("`get_lora(module)`", f"{_OURS}.LoRAModel.get_lora", _MODEL),
        present("`check_lora_name(module)`", f"{_OURS}.LoRAModel.check_lora_name", _MODEL),
        present("`clone(new_id)`", f"{_OURS}.LoRAModel.clone", _CLONE),
        different(
            "`LoRAModel.optimize()`",
            f"{_OURS}.LoRAModel.optimize",
            _CLONE,
            "returns the optimized model; loading into an engine always does it",
        ),
        present("`LoRALayerWeights.lora_a` [in, r]", f"{_OURS}.LoRALayerWeights", _MODEL),
        present("`.lora_b` [r, out]", f"{_OURS}.LoRALayerWeights", _MODEL),
        different(
            "`.embeddings_tensor`", f"{_OURS}.LoRALayerWeights", _SURPLUS, "refused by name at load"
        ),
        different(
            "`.bias`",
            f"{_OURS}.LoRALayerWeights",
            "runtime/adapters/formats/test_peft_config.py::test_trained_biases_are_refused",
            "refused by name at load",
        ),
        present("`.rank`", f"{_OURS}.LoRALayerWeights.rank", _DELTA),
        present("`.scaling`", f"{_OURS}.LoRALayerWeights", _DELTA),
        different(
            "`.optimize()`",
            f"{_OURS}.LoRALayerWeights.optimize",
            _DELTA,
            "returns the optimized weights; these are frozen",
        ),
        present(
            "`.compute_delta_weight()`", f"{_OURS}.LoRALayerWeights.compute_delta_weight", _DELTA
        ),
        present(
            "rank 1 to 256",
            "plugins.contract.sites.MAX_RANK",
            "runtime/adapters/fitting/test_fit.py::"
            "test_the_smallest_and_the_largest_rank_are_taken",
            "1 to 512",
        ),
        different(
            "`LoRAModelManager.model, lora_config, device, max_num_seqs, max_num_batched_tokens`",
            f"{_OURS}.LoRAModelManager",
            _CONFIG,
            "`lora_config` is there; the others are the engine's, in its manifest",
        ),
        different(
            "`_registered_adapters`",
            f"{_OURS}.LoRAModelManager.list_adapters",
            f"{_MANAGER}::test_an_adapter_is_added_once_and_removed_once",
            "a method: the dict is a copy",
        ),
        different(
            "`_active_adapters`",
            f"{_OURS}.LoRAModelManager.lora_index_to_id",
            f"{_MANAGER}::test_lru_takes_the_slot_of_the_least_recently_used",
            "by slot",
        ),
        present(
            "`lora_index_to_id` (slots)",
            f"{_OURS}.LoRAModelManager.lora_index_to_id",
            f"{_MANAGER}::test_lru_takes_the_slot_of_the_least_recently_used",
        ),
        different(
            "`punica_wrapper` (batched kernels)",
            f"{_OURS}.LoRAModelManager.step_inputs",
            "end_to_end/test_slots.py::test_every_row_answers_as_peft_does_with_its_adapter_alone",
            "the graph takes the slot of each row; nothing is wrapped at run time",
        ),
        present("`LoRARequest.lora_name`, `name`", f"{_OURS}.LoRARequest.name", _FIELDS),
        present(
            "`LoRARequest.lora_int_id`, `adapter_id`", f"{_OURS}.LoRARequest.adapter_id", _FIELDS
        ),
        present("`LoRARequest.lora_path`, `path`", f"{_OURS}.LoRARequest.path", _FIELDS),
        different(
            "`LoRARequest.lora_local_path`",
            f"{_OURS}.LoRARequest",
            _WRONG_REQUEST,
            "refused by name: it is deprecated there",
        ),
        different(
            "`LoRARequest.long_lora_max_len`",
            f"{_OURS}.LoRARequest",
            _WRONG_REQUEST,
            "refused by name: an engine has one rotary scaling",
        ),
        present(
            "`LoRARequest.base_model_name`",
            f"{_OURS}.LoRARequest",
            f"{_MANAGER}::test_a_request_that_cannot_be_served_registers_nothing",
            "another than the engine's is refused",
        ),
        different(
            "`LoRARequest.tensorizer_config_dict`",
            f"{_OURS}.LoRARequest",
            _WRONG_REQUEST,
            "refused by name: adapters are read from files",
        ),
        present("`LoRARequest` validation", f"{_OURS}.LoRARequest", _WRONG_REQUEST),
        present(
            "`LoRAMapping.index_mapping, prompt_mapping`",
            f"{_OURS}.LoRAMapping.prompt_mapping",
            _MAPPING,
        ),
        present(
            "`LoRAMapping.lora_index_mapping, lora_set, max_lora_id`",
            f"{_OURS}.LoRAMapping.lora_set",
            _MAPPING,
            "the last two are derived",
        ),
        present("`LoRAMapping.is_prefill`", f"{_OURS}.LoRAMapping", _MAPPING),
        present(
            "`LoRAMapping` validation",
            f"{_OURS}.LoRAMapping",
            f"{_DATA}::test_a_mapping_that_leads_nowhere_is_a_value_error",
        ),
        present("`get_lora_id_for_index`", f"{_OURS}.LoRAMapping.get_lora_id_for_index", _MAPPING),
        present(
            "`create_batch_indices`",
            f"{_OURS}.LoRAMapping.create_batch_indices",
            _MAPPING,
            "numpy int32",
        ),
        present("`LoRAConfig.max_loras`", f"{_OURS}.LoRAConfig", _CONFIG),
        present(
            "`LoRAConfig.max_lora_rank`, (0, 512]",
            f"{_OURS}.LoRAConfig",
            _WRONG_CONFIG,
            "and the engine's, or refused",
        ),
        present(
            "`LoRAConfig.lora_dtype`", f"{_OURS}.LoRAConfig", _OPEN, "the engine's, or refused"
        ),
        different(
            "`LoRAConfig.lora_extra_vocab_size`", f"{_OURS}.LoRAConfig", _WRONG_CONFIG, _REFUSED
        ),
        present(
            "`LoRAConfig.max_cpu_loras`",
            f"{_OURS}.LoRAConfig",
            f"{_MANAGER}::test_a_full_registry_is_a_runtime_error_and_lru_forgets_the_oldest",
        ),
        different(
            "`LoRAConfig.fully_sharded_loras`", f"{_OURS}.LoRAConfig", _WRONG_CONFIG, _REFUSED
        ),
        different("`LoRAConfig.bias_enabled`", f"{_OURS}.LoRAConfig", _WRONG_CONFIG, _REFUSED),
        different(
            "`LoRAConfig.long_lora_scaling_factors`",
            f"{_OURS}.LoRAConfig",
            _WRONG_CONFIG,
            _REFUSED,
        ),
        different(
            "`LoRAConfig.effective_dtype`",
            f"{_OURS}.LoRAConfig.effective_dtype",
            _CONFIG,
            "a name and no torch dtype; None, which is the engine's, instead of float32",
        ),
        present("`PEFTHelper.r, lora_alpha, target_modules`", f"{_OURS}.PEFTHelper", _HELPER),
        present("`PEFTHelper.use_rslora`", f"{_OURS}.PEFTHelper", _HELPER),
        present(
            "`PEFTHelper.bias`, `modules_to_save`, `use_dora` refused",
            f"{_OURS}.PEFTHelper.validate_legal",
            _LEGAL,
        ),
        different(
            "`PEFTHelper.vllm_*` fields",
            f"{_OURS}.PEFTHelper.vllm_lora_scaling_factor",
            _HELPER,
            "the scaling factor is derived; the positions are the engine's",
        ),
        present("`PEFTHelper.from_local_dir`", f"{_OURS}.PEFTHelper.from_local_dir", _HELPER),
        present("`PEFTHelper.validate_legal`", f"{_OURS}.PEFTHelper.validate_legal", _LEGAL),
        present("`PEFTHelper.scaling_factor`", f"{_OURS}.PEFTHelper.scaling_factor", _HELPER),
        different(
            "`LoRAMemoryManager` limits for GPU and CPU",
            "runtime.managers.slots.cache_config.CacheConfig",
            f"{_CACHE}::test_a_share_of_the_devices_memory_makes_fewer_slots",
            "options of the one cache: `host_memory`, `device_memory`",
        ),
        different(
            "`LoRAMemoryManager` memory used",
            f"{_SLOTS}.stats",
            f"{_CACHE}::test_memory_of_an_unloaded_adapter_is_free_at_its_last_lease",
            "`host_bytes`, `slot_bytes`, `in_slots`",
        ),
        different(
            "`gpu_cache`, `cpu_cache`, `lru_order`",
            f"{_SLOTS}.slots",
            _EVICTION,
            "`slots`, `is_on_host` and `stats`; the order is the cache's own",
        ),
        different(
            "`allocate_adapter`, eviction",
            f"{_SLOTS}.activate",
            _EVICTION,
            "returns the slot, and an error where everything is in use",
        ),
        different(
            "`LoRABatchProcessor` buffers",
            "runtime.managers.slots.slot_stacks.SlotStacks",
            "runtime/managers/slots/test_slot_stacks.py::test_addresses_stay_whatever_is_placed",
            "stacks on the device, filled once for an adapter and not for every batch",
        ),
        different(
            "`prepare_batch`", f"{_SLOTS}.rows", _ROWS, "tensors by the engine's binding names"
        ),
        present(
            "`lora_computation_flow`",
            "builder.build_engine",
            "builder/passes/test_insert_lora.py::test_the_result_is_base_plus_x_a_b",
            "in the graph",
        ),
        different(
            "`BatchLoRADataMapper.map_sequence_to_adapters`",
            f"{_OURS}.LoRAMapping.map_sequence_to_adapters",
            _MAPPING,
            "a constructor of the mapping; takes the ids of the rows",
        ),
        different(
            "`OptimizedLoRAWeights` alignment",
            "runtime.memory.host.ALIGNMENT",
            "runtime/managers/slots/test_slot_stacks.py::"
            "test_the_memory_is_known_before_it_is_taken",
            "one packed range, each tensor at a multiple of 256 bytes",
        ),
        different(
            "`LoRAMemoryPool.get_intermediate_buffer`",
            "runtime.memory.pool.DevicePool",
            "runtime/memory/test_pool.py::test_the_lowest_free_address_of_a_size_is_taken_first",
            "the engine's own buffers; intermediates are the kernels' workspace",
        ),
    ),
)
