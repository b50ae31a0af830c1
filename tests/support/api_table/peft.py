"""PEFT's `PeftModel` and `LoraConfig`, as far as they matter to inference."""

from support.api_table.rows import Document, different, present

_MANAGER = "runtime.managers.lora_manager.LoRAManager"
_TESTS = "runtime/managers/test_lora_manager.py"
_MEMORY = "runtime/managers/test_memory.py"
_BLEND = "runtime/adapters/test_blend.py"
_SWITCH = f"{_TESTS}::test_switching_activates_the_named_adapter"
_FIELDS = "end_to_end/test_peft_fields.py"
_TAKEN = f"{_FIELDS}::test_an_adapter_that_is_taken_answers_as_in_peft"
_REFUSED = f"{_FIELDS}::test_an_adapter_that_is_refused_is_refused_by_field_and_value_with_advice"
_ROWS = "end_to_end/test_slots.py::test_every_row_answers_as_peft_does_with_its_adapter_alone"

PEFT = Document(
    "PEFT `PeftModel` and `LoraConfig`",
    (
        different(
            "`get_peft_model`, training",
            "runtime.load_adapter",
            _TAKEN,
            "adapters are trained with PEFT and read from what it saves",
        ),
        different(
            "`PeftModel.from_pretrained(model, path)`",
            f"{_MANAGER}.load_weights",
            f"{_TESTS}::test_a_peft_directory_is_loaded_with_its_scale_folded_in",
            "an engine is built once from the model; `load_weights` activates nothing",
        ),
        present(
            "`load_adapter(path, adapter_name)`",
            f"{_MANAGER}.load_weights",
            f"{_TESTS}::test_a_peft_directory_is_loaded_with_its_scale_folded_in",
            "the name comes first; returns `Coverage`",
        ),
        present("`set_adapter(name)`", f"{_MANAGER}.switch_weights", _SWITCH),
        different(
            "`disable_adapter()`",
            f"{_MANAGER}.reset_weights",
            f"{_TESTS}::test_resetting_deactivates_and_may_be_repeated",
            "no `with`: the base model answers until the next switch",
        ),
        present(
            "`delete_adapter(name)`",
            f"{_MANAGER}.unload",
            f"{_MEMORY}::test_an_active_adapter_is_unloaded_only_by_force",
            "an active adapter needs `force=True`",
        ),
        present("`active_adapter`", f"{_MANAGER}.get_active_adapter_name", _SWITCH),
        present(
            "names of `peft_config`",
            f"{_MANAGER}.get_adapter_names",
            f"{_TESTS}::test_lists_of_names_are_the_callers_own",
        ),
        present(
            '`add_weighted_adapter(..., combination_type="cat")`',
            f"{_MANAGER}.blend",
            f"{_BLEND}::test_a_blend_is_pefts_sum_of_weighted_adapters",
            "exact up to one rounding of B",
        ),
        different(
            "its other combinations (svd, ties, dare, magnitude_prune)",
            "runtime.load_adapter",
            _TAKEN,
            "make them with PEFT, save the adapter, load it",
        ),
        present(
            "`set_scale`, `rescale_adapter_scale`",
            f"{_MANAGER}.switch_weights",
            f"{_BLEND}::test_a_strength_is_pefts_scale",
            "`switch_weights(name, scale=...)`",
        ),
        present(
            "`hotswap_adapter`",
            f"{_MANAGER}.load_weights",
            f"{_MEMORY}::test_a_replaced_active_adapter_is_active_at_its_strength_after_a_refresh",
            "`replace=True`; another rank or other modules are no obstacle",
        ),
        present(
            "`generate(..., adapter_names=[...])`",
            "runtime.generate",
            _ROWS,
            "an engine with slots; None is `__base__`",
        ),
        different(
            "`merge_and_unload()`",
            "trt-lora merge",
            "scripts/commands/test_merge.py::test_a_merged_model_answers_as_peft_does",
            "writes a model to build from, tokenizer included: no engine changes its own weights",
        ),
        present(
            "`save_pretrained(path)`",
            "runtime.save_adapter",
            "runtime/adapters/test_save.py::test_peft_computes_the_same_deltas_from_what_is_written",
            '`save_adapter(adapter, path, "peft")`',
        ),
        different(
            "`adapter_model.bin`",
            "trt-lora convert-adapter",
            "scripts/commands/test_convert_adapter.py::test_a_bin_file_is_converted",
            "a pickle, which can run code: it is converted once and never served",
        ),
        present(
            "`r`, `lora_alpha`, `use_rslora`, `rank_pattern`, `alpha_pattern`",
            "runtime.load_adapter",
            _TAKEN,
            "the scale is folded into B",
        ),
        present(
            "`target_modules`, `exclude_modules`, `layers_to_transform`, `layers_pattern`",
            "runtime.load_adapter",
            _TAKEN,
            "tensors that they do not name are ignored, as in PEFT, and listed",
        ),
        present(
            "`fan_in_fan_out`, `lora_dropout`, `init_lora_weights`, all that training alone reads",
            "runtime.load_adapter",
            _TAKEN,
            "initialisations that change the base weights are refused with PEFT's own conversion",
        ),
        different(
            "`use_dora`, `bias`, `lora_bias`, `modules_to_save`, `trainable_token_indices`, "
            "`layer_replication`, `target_parameters`",
            "plugins.errors.AdapterError",
            _REFUSED,
            "refused by field and value, with the `trt-lora merge` that makes a model of it: they "
            "are no product B A x",
        ),
        different(
            "other tuners than LoRA",
            "plugins.errors.AdapterError",
            _REFUSED,
            "refused by `peft_type`",
        ),
    ),
)
