"""MAX's `LoRAManager`, member by member."""

from support.api_table.rows import Document, different, present

_MANAGER = "runtime.interfaces.max.LoRAManager"
_TESTS = "runtime/interfaces/test_max_manager.py"
_REQUESTS = "runtime/interfaces/test_max_requests.py"
_INPUTS = f"{_TESTS}::test_graph_inputs_are_what_a_step_with_these_rows_binds"
_ACTIVE = f"{_TESTS}::test_several_adapters_are_active_and_an_unknown_one_is_a_key_error"
_PATHS = f"{_TESTS}::test_a_path_without_a_name_is_its_own"

MAX = Document(
    "MAX `LoRAManager`",
    (
        different(
            "constructor (config, base_model_path, base_dtype, n_heads, n_kv_heads, head_dim, "
            "zmq_endpoint_base)",
            _MANAGER,
            f"{_TESTS}::test_an_option_holds_or_is_refused",
            "takes the config, the adapters and the manifest of an engine, which knows its model, "
            "dtype and heads; `zmq_endpoint_base` is an option",
        ),
        different(
            "`LoRAConfig`",
            "runtime.interfaces.max.LoRAConfig",
            f"{_TESTS}::test_an_option_holds_or_is_refused",
            "limits are the engine's where they are left out, and refused where they contradict "
            "it; `allowed_roots` is ours",
        ),
        present("`activate_adapter(name)`, KeyError", f"{_MANAGER}.activate_adapter", _ACTIVE),
        present("several active adapters", f"{_MANAGER}.activate_adapter", _ACTIVE),
        different(
            "`get_lora_graph_inputs(batch, offsets, device)`",
            f"{_MANAGER}.get_lora_graph_inputs",
            _INPUTS,
            "tensors by name instead of a tuple; a row is a sequence, so there are no offsets, and "
            "the device is the engine's",
        ),
        different(
            "`get_lora_manager(pipeline)`",
            f"{_MANAGER}.get_lora_manager",
            f"{_TESTS}::test_there_is_a_manager_where_lora_is_on",
            "there is no pipeline object: it takes the config and the adapters",
        ),
        different(
            "`get_symbolic_inputs(device_ref)`",
            f"{_MANAGER}.get_symbolic_inputs",
            _INPUTS,
            "of the engine's device",
        ),
        different(
            "`init_weights(model, state_dict)`",
            "builder.build_engine",
            "builder/test_build_slots.py::test_the_manifest_names_stacks_slots_and_ranks",
            "LoRA is inserted when the engine is built; `AdapterStore` makes its buffers",
        ),
        present("`is_active_lora(name)`", f"{_MANAGER}.is_active_lora", _ACTIVE),
        present("`is_lora(name)`", f"{_MANAGER}.is_lora", _PATHS),
        present(
            '`load_adapter("name=path" or path)`',
            f"{_MANAGER}.load_adapter",
            _PATHS,
            "`trt_lora.runtime.load_adapter` is another: it opens a file and registers nothing",
        ),
        present(
            "`LoRAStatus`",
            "runtime.interfaces.max.LoRAStatus",
            f"{_TESTS}::test_statuses_have_the_values_of_max",
        ),
        present("`loras`", f"{_MANAGER}.loras", _PATHS),
        present(
            "`process_lora_requests()`",
            f"{_MANAGER}.process_lora_requests",
            f"{_REQUESTS}::test_an_adapter_is_loaded_and_unloaded_by_request",
            "only below the config's `allowed_roots`; needs `trt-lora[requests]`",
        ),
        present(
            "ZMQ request and response endpoints",
            "runtime.interfaces.max.request_sockets.RequestSockets",
            f"{_REQUESTS}::test_a_message_is_messagepack_as_it_is_written_down",
            "ipc and inproc; never open to other machines",
        ),
        different(
            "`set_graph_info(...)`, eight routing tensors",
            "runtime.managers.slots.slot_adapters.AdapterStore.rows",
            "runtime/managers/slots/test_slot_adapters.py::"
            "test_a_step_binds_the_slots_of_its_rows_and_counts_from_the_first",
            "two routing tensors, `lora_slot` and `lora_rank`, are inputs of the built graph",
        ),
        present(
            "`sort_lora_batch(batch)`",
            f"{_MANAGER}.sort_lora_batch",
            f"{_TESTS}::test_a_batch_is_sorted_by_slot_from_the_highest_and_the_base_is_last",
        ),
        present(
            "`unload_adapter(name)`",
            f"{_MANAGER}.unload_adapter",
            f"{_TESTS}::test_an_unloaded_adapter_frees_its_name_and_its_slot",
        ),
    ),
)
