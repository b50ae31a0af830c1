"""Graphs by other exporters with many adapters in a batch: rows, and what is refused by name."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from support.commands import trt_lora
from support.models.graph_nets import SIZES, Exported

from trt_lora.builder import GraphConfig, build_engine
from trt_lora.builder.build import list_sites
from trt_lora.plugins.errors import ConfigError, ModelError, StateError, TensorError
from trt_lora.runtime import Engine, Manifest, TensorMap, open_engine
from trt_lora.runtime.manifest import Range
from trt_lora.runtime.memory.dtypes import Array
from trt_lora.runtime.memory.tensor import Tensor, tensor_from_numpy

SAMPLE = np.random.default_rng(1).standard_normal((3, 7, 8)).astype(np.float32)


@pytest.fixture(scope="module")
def slotted(exported: Exported, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine of TorchScript's graph with two slots."""
    output = tmp_path_factory.mktemp("slots") / "engine"
    build_engine(
        GraphConfig(
            exported.graphs["torchscript"], output, ("all-linear",), shapes=SIZES,
            max_lora_rank=3, max_loras=2, flavour="none",
        )
    )  # fmt: skip
    return output


def test_every_row_of_torchscripts_graph_takes_its_own_adapter(
    exported: Exported, slotted: Path
) -> None:
    base, adapted = exported.outputs(SAMPLE)
    with open_engine(slotted, "onnxruntime") as engine:
        engine.adapters.load("own", exported.adapter)
        engine.adapters.blend("half", {"own": 0.5})
        half = engine.run({"sample": SAMPLE}, adapter="half")["out"]
        rows = engine.run({"sample": SAMPLE}, adapter=["half", None, "own"])["out"]
        halved = engine.run({"sample": SAMPLE}, adapter=("own", None, "own"), scale=0.5)["out"]
    expected = np.stack([half[0], base[1], adapted[2]])
    assert np.abs(half - adapted).max() > 0.1
    np.testing.assert_allclose(rows, expected, atol=2e-6 * np.abs(expected).max())
    np.testing.assert_allclose(halved, [half[0], base[1], half[2]], atol=2e-6 * np.abs(half).max())


def test_the_manifest_tells_slots_and_ranges(slotted: Path) -> None:
    with open_engine(slotted, "onnxruntime") as engine:
        manifest = engine.manifest
    assert (manifest.max_loras, manifest.max_lora_rank, manifest.batch) == (2, 4, "batch")
    (ranges,) = manifest.profiles.values()
    assert ranges["lora_slot"] == Range((1,), (2,), (4,))
    assert ranges["lora_A_head"] == Range((1, 16, 4), (2, 16, 4), (2, 16, 4))
    assert ranges["lora_rank"] == Range((1, 14), (2, 14), (2, 14))


def test_bench_has_rows_with_another_adapter_each(
    slotted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--backend", "onnxruntime", "--rounds", "1", "--ranks", "1", "2")
    assert "(another in every row)" in trt_lora(capsys, "bench", slotted, *words)


def test_lists_that_no_run_can_take_are_refused(
    exported: Exported, slotted: Path, tmp_path: Path
) -> None:
    with open_engine(slotted, "onnxruntime") as engine:
        for name in ("own", "other", "third"):
            engine.adapters.load(name, exported.adapter)
        with pytest.raises(ConfigError, match="there are 2 adapter for 3 rows; give one for each"):
            engine.run({"sample": SAMPLE}, adapter=["own", None])
        with pytest.raises(StateError, match=r"3 adapters in one step .* this engine's 2 slots"):
            engine.run({"sample": SAMPLE}, adapter=["own", "other", "third"])
        with pytest.raises(TensorError, match="inputs with rows are: none; pass"):
            engine.run({}, adapter=["own"])
        lease = engine.adapters.lease("third")
        with pytest.raises(StateError, match=r"finds all 2 slots in use by .*'third'"):
            engine.run({"sample": SAMPLE}, adapter=["own", "other", None])
        engine.adapters.release(lease)
        assert engine.run({"sample": SAMPLE}, adapter=["own", "other", None])["out"].any()
        assert engine.adapters.stats.leased == 0
    build_engine(GraphConfig(exported.graphs["dynamo"], tmp_path / "e", ("head",), flavour="none"))
    with open_engine(tmp_path / "e", "onnxruntime") as engine:
        engine.adapters.load("own", exported.adapter, strict=False)
        alike = engine.run({"sample": SAMPLE}, adapter=["own"] * 3)["out"]
        assert np.array_equal(alike, engine.run({"sample": SAMPLE}, adapter="own")["out"])
        with pytest.raises(StateError, match=r"2 adapters in one run.*build with --max-loras"):
            engine.run({"sample": SAMPLE}, adapter=["own", None, None])


def test_a_run_keeps_its_adapters_in_their_slots(
    exported: Exported, slotted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_engine(slotted, "onnxruntime") as engine:
        for name in ("own", "other"):
            engine.adapters.load(name, exported.adapter)
        expected = engine.run({"sample": SAMPLE}, adapter=["own", "other", None])["out"]

        def execute(inputs: TensorMap) -> dict[str, Tensor]:
            assert not engine.adapters.bindings.deactivate("own")
            engine.adapters.unload("other")
            return Engine.execute(engine, inputs)

        monkeypatch.setattr(engine, "execute", execute)
        found = engine.run({"sample": SAMPLE}, adapter=["own", "other", None])["out"]
        assert np.array_equal(found, expected)
        assert engine.adapters.names == ("own",)
        assert engine.adapters.bindings.deactivate("own")


# ------------------------------------------------------------------------------ graphs as text


def built(
    tmp_path: Path, body: str, *, inputs: str, opset: int = 18, **options: object
) -> Manifest:
    """An engine of a graph whose only linear, fc, reads x [.., 3]; its weight is zero."""
    model = ir.from_onnx_text(f"""
        <ir_version: 10, opset_import: ["" : {opset}]>
        g ({inputs}) => (float z)
        <float[3, 2] w = {{0, 0, 0, 0, 0, 0}},
         int64[2] flat = {{-1, 3}}, int64[3] one = {{1, -1, 3}}>
        {{ {body} z = MatMul(x, w) }}
    """)
    model.graph.outputs[0].shape = None
    model.graph[-1].name = "/fc/MatMul"
    ir.save(model, tmp_path / "small.onnx")
    fields = {"flavour": "none", "max_loras": 2, "max_lora_rank": 1, **options}
    config = GraphConfig(tmp_path / "small.onnx", tmp_path / "engine", ("fc",), **fields)  # type: ignore[arg-type]
    list_sites(config)
    return build_engine(config)


def added(engine: Path, inputs: Mapping[str, Array], slots: Sequence[int]) -> list[float]:
    """What the adapters add to each token of ones: slot 0 adds 3, slot 1 adds 6."""
    factors = {
        "lora_A_fc": np.array([[[1.0]] * 3, [[2.0]] * 3], np.float32).reshape(2, 3, 1),
        "lora_B_fc": np.ones((2, 1, 2), np.float32),
        "lora_slot": np.array(slots, np.int32),
        "lora_rank": np.ones((2, 1), np.int32),
    }
    tensors = {name: tensor_from_numpy(array) for name, array in {**inputs, **factors}.items()}
    with open_engine(engine, "onnxruntime") as opened:
        z = opened.execute(TensorMap(tensors))["z"].numpy()
    return [float(value) for value in z[..., 0].reshape(-1)]


@pytest.mark.parametrize(
    ("body", "shape", "tokens"),
    [
        ("x = Relu(h)", (2, 3), [1, 1]),
        ("x = Relu(h)", (2, 2, 3), [2, 2]),
        ("t = Relu(h) x = Reshape(t, flat)", (2, 2, 3), [2, 2]),
        ("x = Reshape(h, one)", (2, 2, 3), [2, 2]),
    ],
)
def test_a_flattened_batch_is_told_where_the_graph_proves_it(
    body: str, shape: tuple[int, ...], tokens: list[int], tmp_path: Path
) -> None:
    sizes = ", ".join(["rows", *map(str, shape[1:])])
    with pytest.raises(ConfigError, match=r"begins with a dimension batch or batch_size.*: rows\."):
        built(tmp_path, body, inputs=f"float[{sizes}] h")
    built(tmp_path, body, inputs=f"float[{sizes}] h", batch="rows")
    ones = {"h": np.ones(shape, np.float32)}
    expected = [6.0] * tokens[0] + [0.0] * tokens[1]
    assert added(tmp_path / "engine", ones, [1, -1]) == expected
    assert added(tmp_path / "engine", ones, [0]) == [3.0] * sum(tokens)


@pytest.mark.parametrize(
    ("body", "inputs"),
    [
        ("t = Transpose <perm = [1, 0, 2]> (h) x = Reshape(t, flat)", "float[batch, t, 3] h"),
        ("x = Relu(ids)", "float[batch, 3] h, float[1, t, 3] ids"),
        ("x = Concat <axis = 0> (h, h)", "float[batch, 3] h"),
    ],
)
def test_a_site_whose_rows_cannot_be_told_is_refused_by_its_path(
    body: str, inputs: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=r"^the input of fc has shape .* or leave out --max-loras"):
        built(tmp_path, body, inputs=inputs)


def test_old_operators_and_a_plugin_without_slots_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="has opset 13, and many adapters in a batch need 15"):
        built(tmp_path, "x = Relu(h)", inputs="float[batch, 3] h", opset=13)
    with pytest.raises(ConfigError, match="--lora-plugin aot takes one adapter at a time"):
        built(tmp_path, "x = Relu(h)", inputs="float[batch, 3] h", lora_plugin="aot")
