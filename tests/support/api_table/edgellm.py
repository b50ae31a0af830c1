"""TensorRT-Edge-LLM's `LoRAManager`, member by member."""

from support.api_table.rows import Document, different, present

_MANAGER = "runtime.managers.lora_manager.LoRAManager"
_TESTS = "runtime/managers/test_lora_manager.py"
_REFUSALS = "runtime/managers/test_refusals.py"
_SWITCH = f"{_TESTS}::test_switching_activates_the_named_adapter"
_DUPLICATE = f"{_REFUSALS}::test_a_manager_cannot_be_duplicated"
_DUMMIES = f"{_TESTS}::test_dummies_are_rank_1_zeros_of_the_engines_other_dimension"
_KEPT = "runtime/adapters/test_load.py::test_a_file_keeps_names_shapes_and_values"

EDGELLM = Document(
    "TensorRT-Edge-LLM `LoRAManager` (C++)",
    (
        present("class `LoRAManager`, named adapters, at most one active", _MANAGER, _SWITCH),
        present(
            "O(1) switch, no GPU copy",
            f"{_MANAGER}.switch_weights",
            "end_to_end/test_real_model.py::"
            "test_switching_420_bindings_moves_pointers_and_copies_nothing",
        ),
        present("`LoRAManager()`", _MANAGER, f"{_TESTS}::test_nothing_is_active_at_first"),
        present(
            "copy constructor deleted",
            f"{_MANAGER}.__copy__",
            _DUPLICATE,
            "`copy`, `deepcopy` and pickle raise TypeError",
        ),
        present(
            "copy assignment deleted",
            f"{_MANAGER}.__deepcopy__",
            _DUPLICATE,
            "assignment in Python copies nothing",
        ),
        different(
            "move constructor, move assignment",
            _MANAGER,
            _DUPLICATE,
            "hand the object over: Python moves references",
        ),
        present(
            "`loadWeights(name, path, stream)`",
            f"{_MANAGER}.load_weights",
            f"{_TESTS}::test_the_stream_of_a_load_is_the_stream_of_the_upload",
            "also directories of five formats; returns `Coverage`",
        ),
        present(
            "- tensor name = binding name",
            f"{_MANAGER}.load_weights",
            f"{_TESTS}::test_the_tensor_names_of_a_safetensors_file_become_binding_names",
            "`lora_A_<path>` or `<path>.lora_A.weight`",
        ),
        different(
            "- throws `std::runtime_error`",
            "plugins.errors.AdapterError",
            f"{_REFUSALS}::test_a_load_that_fails_leaves_the_manager_as_it_was",
            "of the ValueError family: it is the input's fault",
        ),
        present(
            "`addWeights(name, map)`",
            f"{_MANAGER}.add_weights",
            f"{_TESTS}::test_a_numpy_array_is_registered_in_place",
            "numpy, torch, CuPy through DLPack",
        ),
        different(
            "- tensors are moved from",
            f"{_MANAGER}.add_weights",
            f"{_TESTS}::test_memory_lives_as_long_as_the_manager_and_no_longer",
            "taken in place; the caller must not write to them",
        ),
        present("`switchWeights(name)`", f"{_MANAGER}.switch_weights", _SWITCH),
        present(
            "- throws if not found",
            "plugins.errors.UnknownAdapterError",
            f"{_TESTS}::test_an_unknown_adapter_is_refused_and_the_active_one_stays",
            "a KeyError",
        ),
        present(
            "`resetWeights()`, dummy of shape [1]",
            f"{_MANAGER}.reset_weights",
            f"{_TESTS}::test_resetting_deactivates_and_may_be_repeated",
        ),
        different(
            "`getActiveWeight(binding)`",
            f"{_MANAGER}.get_active_weight",
            "runtime/adapters/fitting/test_fit.py::"
            "test_ranks_are_padded_with_zeros_where_the_executor_wants_it",
            "where the plan has the plugin, ranks come back padded to a multiple of 8",
        ),
        present(
            "- throws if the binding is unknown",
            "plugins.errors.UnknownBindingError",
            f"{_TESTS}::test_a_binding_that_the_active_adapter_lacks_is_an_error",
            "a KeyError",
        ),
        present("`getActiveAdapterName()`", f"{_MANAGER}.get_active_adapter_name", _SWITCH),
        present(
            "`getBindingNames()`",
            f"{_MANAGER}.get_binding_names",
            f"{_TESTS}::test_binding_names_are_those_of_all_adapters_each_once",
        ),
        present(
            "`getAdapterNames()`",
            f"{_MANAGER}.get_adapter_names",
            f"{_TESTS}::test_lists_of_names_are_the_callers_own",
        ),
        present(
            "`hasActiveAdapter()`",
            f"{_MANAGER}.has_active_adapter",
            f"{_TESTS}::test_registering_an_adapter_does_not_activate_it",
        ),
        present(
            "`hasWeightFor(binding)`",
            f"{_MANAGER}.has_weight_for",
            f"{_TESTS}::test_only_the_active_adapter_has_weights",
        ),
        present(
            "`initializeEngineBindings(runner)`, once",
            f"{_MANAGER}.initialize_engine_bindings",
            f"{_TESTS}::test_a_second_engine_is_refused_and_changes_nothing",
        ),
        present(
            "- rank-1 dummies, A [k, 1], B [1, n]",
            f"{_MANAGER}.initialize_engine_bindings",
            _DUMMIES,
            "all in one zero buffer",
        ),
        present(
            "`refreshTensorMap(map)`",
            f"{_MANAGER}.refresh_tensor_map",
            "runtime/managers/test_tensor_maps.py::"
            "test_every_binding_gets_the_adapters_tensor_or_the_dummy",
        ),
        present(
            "`EngineExecutor`, `rt::Tensor`, `TensorMap`",
            "runtime.engines.open_engine.open_engine",
            "runtime/engines/test_open_engine.py::test_an_opened_engine_runs_inside_with",
            "also `Executor`, `Tensor`, `TensorMap`",
        ),
        different(
            "the C++ header itself",
            "plugins.contract.sites.BindingNames",
            "examples/test_cpp.py::test_the_header_gives_the_bytes_that_are_bound",
            "`examples/cpp/trt_lora.hpp` has the contract (names, shapes, checks, padding), and a "
            "program that binds an adapter by hand; the manager, a class, is in Python alone",
        ),
    ),
)
