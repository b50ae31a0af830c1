"""The plugin in TensorRT-RTX's real bindings: built without a GPU, its callbacks called here."""

import gc
import re
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from support.models.quick_build import quick_build
from support.models.tiny_models import save_model, tiny_config
from support.tensor_descriptions import SHAPES, changed, described, ranges

from trt_lora.plugins.contract.operators import OPERATORS, SLOT_OPERATORS, Operator
from trt_lora.plugins.errors import BackendError, ConfigError, ModelError, TensorError
from trt_lora.plugins.kernels.group_call import GroupBuffers, GroupShape, SiteShape
from trt_lora.plugins.tensorrt import plugin_registry as plugin_v3
from trt_lora.plugins.tensorrt.flavour import TENSORRT_RTX, Flavour
from trt_lora.plugins.tensorrt.plugin_node import PluginNode, safe
from trt_lora.plugins.tensorrt.plugin_registry import LoraPlugins, register_plugins
from trt_lora.plugins.tensorrt.plugin_shapes import group_shape

pytestmark = pytest.mark.needs_torch

pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX has wheels for few platforms")

ADD, DELTA = Operator(2, has_addend=True), Operator(2, has_addend=False)


# ---------------------------------------------------------------------------------------- building


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model("Llama", tmp_path_factory.mktemp("plugin") / "model")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_an_engine_with_the_plugin_builds(dtype: str, model: Path, tmp_path: Path) -> None:
    config = tiny_config(model, tmp_path / "e", flavour="tensorrt-rtx", dtype=dtype)
    manifest = quick_build(config)
    assert manifest.lora_plugin == "plugin"
    assert {site.dtype for site in manifest.sites} == {dtype}
    assert b"LoraDelta3" in (tmp_path / "e" / "engine.plan").read_bytes()
    kept = register_plugins(TENSORRT_RTX.load())._kept
    nodes = [each for each in gc.get_objects() if issubclass(type(each), PluginNode)]
    shells = [node for node in nodes if id(node) not in kept]
    assert shells  # the bindings hold them
    assert not any(map(vars, shells))


@pytest.mark.slow
def test_native_leaves_the_plugin_out(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LoraPlugins, "make", lambda *_: pytest.fail("a plugin was made"))
    config = tiny_config(
        model, tmp_path / "e", flavour="tensorrt-rtx", lora_plugin="native", dtype="float16"
    )
    assert quick_build(config).lora_plugin == "native"


@pytest.mark.slow
@pytest.mark.parametrize(
    "callback",
    ["get_output_shapes", "supports_format_combination", "get_workspace_size", "configure_plugin"],
)
def test_a_callback_that_fails_fails_the_build_with_its_reason(
    callback: str,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(self: Any, *args: Any) -> Any:
        raise TensorError("out of luck")

    fallback = False if callback.startswith("supports") else 0 if "size" in callback else ()
    monkeypatch.setattr(PluginNode, callback, safe(fallback)(fail))
    config = tiny_config(model, tmp_path / "e", flavour="tensorrt-rtx", dtype="float16")
    with pytest.raises(ModelError, match=r"Lora\w+ \S+: out of luck"):
        quick_build(config)
    assert not (tmp_path / "e").exists()


def test_registering_twice_is_registering_once(trt: Any, plugins: LoraPlugins) -> None:
    assert register_plugins(trt) is plugins
    names = {creator.name for creator in trt.get_plugin_registry().all_creators}
    assert {operator.name for operator in (*OPERATORS, *SLOT_OPERATORS)} <= names


def test_threads_that_register_at_once_register_once() -> None:
    registered: list[str] = []

    def register_creator(creator: Any, namespace: str) -> bool:
        time.sleep(0.001)  # another thread goes on here, if it may
        registered.append(creator.name)
        return registered.count(creator.name) == 1

    registry = SimpleNamespace(register_creator=register_creator)
    flavour = ModuleType("a flavour of its own")
    for name, value in vars(TENSORRT_RTX.load()).items():
        setattr(flavour, name, value)
    flavour.get_plugin_registry = lambda: registry  # type: ignore[attr-defined]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(register_plugins, [flavour] * 4))
    assert len(set(map(id, found))) == 1
    assert registered == [operator.name for operator in (*OPERATORS, *SLOT_OPERATORS)]


def test_a_registry_that_refuses_is_an_error(trt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = SimpleNamespace(register_creator=lambda creator, namespace: False)
    monkeypatch.setattr(trt, "get_plugin_registry", lambda: registry)
    with pytest.raises(BackendError, match=r"refuses the plugin LoraDelta1"):
        plugin_v3._registered.__wrapped__(trt)


def test_the_plugin_is_refused_or_left_out_where_it_cannot_be(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Flavour, "plugin_obstacle", lambda self: "the moon is full")
    config = tiny_config(model, tmp_path / "e", flavour="tensorrt-rtx", lora_plugin="plugin")
    with pytest.raises(ConfigError, match=r"the moon is full; pass --lora-plugin native"):
        quick_build(config)


# --------------------------------------------------------------------------------------- callbacks


def test_a_node_has_one_output_for_a_site(trt: Any, plugins: LoraPlugins) -> None:
    plugin = plugins.make(ADD)
    assert plugin.num_outputs == 2
    assert plugin.get_output_data_types([trt.DataType.HALF] * 7) == [trt.DataType.HALF] * 2


@pytest.mark.parametrize("dtype", ["HALF", "BF16", "FLOAT"])
def test_row_major_tensors_of_one_type_are_taken(
    dtype: str, trt: Any, plugins: LoraPlugins
) -> None:
    plugin = plugins.make(ADD)
    tensors = [SimpleNamespace(desc=item) for item in described(trt, SHAPES, dtype)]
    assert all(plugin.supports_format_combination(i, tensors, 7) for i in range(len(tensors)))
    tensors[3].desc.type = trt.DataType.INT8
    assert not plugin.supports_format_combination(3, tensors, 7)
    tensors[3].desc.type = getattr(trt.DataType, dtype)
    tensors[3].desc.format = trt.TensorFormat.CHW32
    assert not plugin.supports_format_combination(3, tensors, 7)


def test_integers_are_not_taken(trt: Any, plugins: LoraPlugins) -> None:
    tensors = [SimpleNamespace(desc=item) for item in described(trt, SHAPES, "INT32")]
    assert not plugins.make(ADD).supports_format_combination(0, tensors, 7)


SHAPE = GroupShape(
    6, 8, (SiteShape(16, 4), SiteShape(6, 1)), "float16", has_addend=True
)  # of SHAPES
ADDRESSES = ([10, 11, 12, 21, 22, 13, 23], [14, 24], 99)
BUFFERS = GroupBuffers(10, [11, 21], [12, 22], [13, 23], [14, 24], 99)


@pytest.fixture
def calls(plugins: LoraPlugins, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What nodes have planned and launched."""
    found: list[tuple[Any, ...]] = []

    def planned(shape: GroupShape, stream: int) -> Any:
        found.append(("planned", shape, stream))
        return SimpleNamespace(launch=lambda *args: found.append(("launched", *args)))

    monkeypatch.setattr(plugins, "kernels", SimpleNamespace(planned=planned))
    return found


def test_a_call_launches_the_group_with_its_addresses(
    trt: Any, plugins: LoraPlugins, calls: list[tuple[Any, ...]]
) -> None:
    plugin = plugins.make(ADD)
    plugin.on_shape_change(described(trt, SHAPES), described(trt, SHAPES[5:]))
    clone = plugin.attach_to_context(None)
    clone.enqueue(described(trt, SHAPES), [], *ADDRESSES, 7)
    assert calls == [("planned", SHAPE, 7), ("launched", BUFFERS, 7)]


def test_a_node_plans_once_for_its_shapes_and_a_clone_for_itself(
    trt: Any, plugins: LoraPlugins, calls: list[tuple[Any, ...]]
) -> None:
    plugin = plugins.make(ADD)
    plugin.on_shape_change(described(trt, SHAPES), [])
    for _ in range(3):
        plugin.enqueue(described(trt, SHAPES), [], *ADDRESSES, 7)
    plugin.attach_to_context(None).enqueue(described(trt, SHAPES), [], *ADDRESSES, 8)
    smaller = [(1, 3, 8), *SHAPES[1:5], (1, 3, 16), (1, 3, 6)]
    plugin.on_shape_change(described(trt, smaller), [])
    plugin.enqueue(described(trt, smaller), [], *ADDRESSES, 7)
    assert [call for call in calls if call[0] == "planned"] == [
        ("planned", SHAPE, 7),
        ("planned", SHAPE, 8),
        ("planned", replace(SHAPE, m=3), 7),
    ]
    assert len(calls) == 3 + 5


def test_shapes_told_again_unchanged_recompute_nothing(
    trt: Any,
    plugins: LoraPlugins,
    calls: list[tuple[Any, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checked: list[str] = []

    def counted(*args: Any) -> GroupShape:
        checked.append("a group shape")
        return group_shape(*args)

    monkeypatch.setattr("trt_lora.plugins.tensorrt.plugin_node.group_shape", counted)
    plugin = plugins.make(ADD)
    wider = changed(3, (8, 5))
    wider[4] = (5, 6)
    others = ([30, *ADDRESSES[0][1:]], [34, 24], 39)
    for shapes, addresses in ((SHAPES, ADDRESSES), (SHAPES, others), (wider, others)) * 2:
        plugin.on_shape_change(described(trt, shapes), [])
        plugin.enqueue(described(trt, shapes), [], *addresses, 7)
    wide = replace(SHAPE, sites=(SHAPE.sites[0], SiteShape(6, 5)))
    moved = BUFFERS._replace(x=30, out=[34, 24], workspace=39)
    assert calls == 2 * [
        ("planned", SHAPE, 7),
        ("launched", BUFFERS, 7),
        ("launched", moved, 7),
        ("planned", wide, 7),
        ("launched", moved, 7),
    ]
    assert len(checked) == 4


def test_a_call_computes_the_shapes_that_it_is_given_whichever_were_told(
    trt: Any, plugins: LoraPlugins, failures: list[str], calls: list[tuple[Any, ...]]
) -> None:
    plugin = plugins.make(DELTA)
    longer = [(2, 4, 8), *SHAPES[1:5]]
    plugin.on_shape_change(described(trt, SHAPES[:5]), [])
    plugin.enqueue(described(trt, SHAPES[:5]), [], ADDRESSES[0][:5], *ADDRESSES[1:], 7)
    for shapes in (SHAPES[:5], longer):
        plugin.on_shape_change(described(trt, longer), [])
        plugin.enqueue(described(trt, shapes), [], ADDRESSES[0][:5], *ADDRESSES[1:], 7)
    assert not failures
    again = ["planned", "launched"]
    assert [call[0] for call in calls] == ["planned", "launched", "launched", *again]


def test_a_node_that_is_configured_anew_reads_its_type_anew(
    trt: Any, plugins: LoraPlugins, calls: list[tuple[Any, ...]]
) -> None:
    plugin = plugins.make(ADD)
    for dtype in ("HALF", "BF16"):
        plugin.configure_plugin(ranges(trt, SHAPES, SHAPES), [])
        plugin.on_shape_change(described(trt, SHAPES, dtype), [])
        plugin.enqueue(described(trt, SHAPES, dtype), [], *ADDRESSES, 7)
    shapes = [call[1] for call in calls if call[0] == "planned"]
    assert shapes == [SHAPE, replace(SHAPE, dtype="bfloat16")]


def test_shapes_that_are_refused_are_refused_as_often_as_they_come(
    trt: Any, plugins: LoraPlugins, failures: list[str]
) -> None:
    plugin = plugins.make(ADD)
    for _ in range(2):
        plugin.on_shape_change(described(trt, changed(1, (7, 4))), [])
        plugin.enqueue(described(trt, changed(1, (7, 4))), [], *ADDRESSES, 7)
    assert len(failures) == 2
    assert all("do not fit x" in failure for failure in failures)


@pytest.mark.parametrize(
    ("index", "shape", "message"),
    [
        (0, (2, 4, 8), r"x has shape \[2, 4, 8\], planned was \[2, 3, 8\]"),
        (1, (8, 2), r"a_0 has shape \[8, 2\], planned was \[8, 4\]"),
        (4, (2, 6), r"b_1 has shape \[2, 6\], planned was \[1, 6\]"),
        (4, (1, 6, 1), r"b_1 has shape \[1, 6, 1\], planned was \[1, 6\]"),
        (5, (2, 4, 16), r"c_0 has shape \[2, 4, 16\], planned was \[2, 3, 16\]"),
    ],
)
def test_a_call_with_other_shapes_and_none_told_is_refused_by_name_and_not_launched(
    index: int,
    shape: tuple[int, ...],
    message: str,
    trt: Any,
    plugins: LoraPlugins,
    failures: list[str],
    calls: list[tuple[Any, ...]],
) -> None:
    plugin = plugins.make(ADD, "/layers.3/qkv")
    plugin.on_shape_change(described(trt, SHAPES), [])
    clone = plugin.attach_to_context(None)
    clone.enqueue(described(trt, SHAPES), [], *ADDRESSES, 7)
    del calls[:]
    clone.enqueue(described(trt, changed(index, shape)), [], *ADDRESSES, 7)
    assert not calls
    (failure,) = failures
    assert re.match(rf"LoraAdd2 /layers\.3/qkv: TensorRT .* than it told: {message}\.", failure)
    clone.enqueue(described(trt, SHAPES), [], *ADDRESSES, 7)
    assert calls[-1] == ("launched", BUFFERS, 7)


def test_a_call_with_fewer_inputs_is_refused(
    trt: Any, plugins: LoraPlugins, failures: list[str], calls: list[tuple[Any, ...]]
) -> None:
    plugin = plugins.make(ADD)
    plugin.on_shape_change(described(trt, SHAPES), [])
    for _ in range(2):
        plugin.enqueue(described(trt, SHAPES[:3]), [], *ADDRESSES, 7)
    assert "3 inputs, expected 7" in failures[0]
    assert failures[0] == failures[1]
    assert not calls


def test_a_call_before_the_shapes_are_known_is_an_error(
    plugins: LoraPlugins, failures: list[str]
) -> None:
    plugins.make(DELTA).enqueue([], [], [0] * 5, [0] * 2, 0, 0)
    assert failures == ["LoraDelta2: TensorRT runs the node before it has told the shapes"]


def test_an_empty_batch_is_refused_clearly(
    trt: Any, plugins: LoraPlugins, failures: list[str], calls: list[tuple[Any, ...]]
) -> None:
    shapes = [(0, 3, 8), *SHAPES[1:5], (0, 3, 16), (0, 3, 6)]
    plugin = plugins.make(ADD)
    for each in (SHAPES, shapes):
        plugin.on_shape_change(described(trt, each), [])
        plugin.enqueue(described(trt, each), [], *ADDRESSES, 7)
    (failure,) = failures
    assert "LoraAdd2: x has shape [0, 3, 8], an empty batch" in failure
    assert [call[0] for call in calls] == ["planned", "launched"]


def test_the_workspace_is_that_of_the_largest_shapes(trt: Any, plugins: LoraPlugins) -> None:
    plugin = plugins.make(ADD)
    small = plugin.get_workspace_size(ranges(trt, SHAPES, SHAPES), [])
    large = [(2, 300, 8), (8, 64), (64, 16), (8, 32), (32, 6), (2, 300, 16), (2, 300, 6)]
    assert plugin.get_workspace_size(ranges(trt, SHAPES, large), []) > small > 0


def test_a_plan_says_all_that_makes_the_plugin_again(
    trt: Any, plugins: LoraPlugins, failures: list[str]
) -> None:
    creators = {creator.operator: creator for creator in plugins.creators}
    for operator in OPERATORS:
        fields = plugins.make(operator).get_fields_to_serialize()
        assert {field.name: int(field.data[0]) for field in fields} == {
            "sites": operator.sites,
            "adds": int(operator.has_addend),
        }
        again = creators[operator].create_plugin("node", fields, trt.TensorRTPhase.RUNTIME)
        assert again.label == f"{operator.name} node"
        assert failures == []
        assert again.operator == operator
    other = plugins.make(DELTA).get_fields_to_serialize()
    empty = trt.PluginFieldCollection([])
    for fields in (other, empty):
        assert creators[ADD].create_plugin("node", fields, trt.TensorRTPhase.RUNTIME) is None
    first, second = failures
    assert "of a LoraAdd2, expected" in first
    assert "build the engine again" in first
    assert "the plan says {}" in second
    assert creators[ADD].create_plugin("node", empty, trt.TensorRTPhase.BUILD).operator == ADD
