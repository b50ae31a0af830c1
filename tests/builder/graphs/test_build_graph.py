"""Engines of graphs that torch's exporters wrote: sites, numbers against PEFT, and refusals."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
from support.models.graph_nets import SIZES, TARGETS, Built, Exported

from trt_lora.builder import GraphConfig, build_engine
from trt_lora.builder.build import list_sites
from trt_lora.builder.passes import graph_values as gv
from trt_lora.plugins.errors import ConfigError, ModelError, TensorError
from trt_lora.runtime import LoRAManager, TensorMap, open_engine, read_manifest
from trt_lora.runtime.memory.tensor import tensor_from_numpy

EXPORTERS = ("dynamo", "dynamo_optimized", "torchscript")
SAMPLE = np.random.default_rng(0).standard_normal((3, 7, 8)).astype(np.float32)
PATHS = {
    "proj_in": (8, 16),
    "head": (16, 4),
    **{f"blocks.{n}.{name}": (16, 16) for n in (0, 1) for name in ("to_q", "to_k", "to_v")},
    **{f"blocks.{n}.to_out.0": (16, 16) for n in (0, 1)},
    **{f"blocks.{n}.ff.0": (16, 24) for n in (0, 1)},
    **{f"blocks.{n}.ff.2": (24, 16) for n in (0, 1)},
}


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_every_linear_is_a_site_at_its_own_path(built: dict[str, Built], exporter: str) -> None:
    sites = built[exporter].manifest.sites
    assert {site.path: (site.k, site.n) for site in sites} == PATHS
    assert len(sites) == len(PATHS)


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_the_engine_computes_what_peft_does(
    exported: Exported, built: dict[str, Built], exporter: str
) -> None:
    base, adapted = exported.outputs(SAMPLE)
    with open_engine(built[exporter].engine, "onnxruntime") as engine:
        engine.adapters.load("a", exported.adapter)
        before = engine.run({"sample": SAMPLE})["out"]
        with_adapter = engine.run({"sample": SAMPLE}, adapter="a")["out"]
        again = engine.run({"sample": SAMPLE})["out"]
        half = engine.run({"sample": SAMPLE}, adapter="a", scale=0.5)["out"]
        engine.adapters.blend("half", {"a": 0.5})
        blended = engine.run({"sample": SAMPLE}, adapter="half")["out"]
    assert np.abs(adapted - base).max() > 0.1
    np.testing.assert_allclose(before, base, atol=2e-6 * np.abs(base).max())
    np.testing.assert_allclose(with_adapter, adapted, atol=2e-6 * np.abs(adapted).max())
    assert np.array_equal(before, again)  # what a refit does not promise
    assert np.array_equal(half, blended)


def test_a_manager_switches_adapters_for_a_runtime_of_ones_own(
    exported: Exported, built: dict[str, Built]
) -> None:
    with open_engine(built["torchscript"].engine, "onnxruntime") as engine:
        manager, inputs = LoRAManager(engine.adapters), TensorMap(sample=tensor_from_numpy(SAMPLE))
        manager.load_weights("a", exported.adapter)
        manager.switch_weights("a")
        manager.refresh_tensor_map(inputs)
        out = engine.execute(inputs)["out"].numpy()
        expected = engine.run({"sample": SAMPLE}, adapter="a")["out"]
    assert np.array_equal(out, expected)


def test_the_manifest_of_a_graph_has_nothing_of_language(built: dict[str, Built]) -> None:
    directory = built["dynamo"].engine
    fields = json.loads((directory / "manifest.json").read_text())
    assert fields["kind"] == "graph"
    assert not {"max_batch_size", "max_input_len", "max_seq_len"} & fields.keys()
    assert not {"stop_token_ids", "pad_token_id"} & fields["base_model"].keys()
    manifest = read_manifest(directory)
    assert manifest == built["dynamo"].manifest
    assert manifest.base_model.name.endswith("/dynamo")
    (ranges,) = manifest.profiles.values()
    assert (ranges["sample"].min, ranges["sample"].opt) == ((1, 1, 8), (2, 5, 8))
    assert ranges["lora_A_head"].max == (16, 8)


def test_tensorrt_rtx_builds_the_graph_with_the_plugin(built: dict[str, Built]) -> None:
    manifest = built["dynamo"].manifest
    assert (manifest.flavour, manifest.lora_plugin) == ("tensorrt-rtx", "plugin")
    assert manifest.files["engine.plan"].size_bytes > 10_000


def test_prompts_are_refused_by_name_and_inputs_too(built: dict[str, Built]) -> None:
    with open_engine(built["torchscript"].engine, "onnxruntime") as engine:
        for call in (engine.generate, lambda prompt: next(engine.stream(prompt))):
            with pytest.raises(ConfigError, match=r"is of language models.*call Engine\.run"):
                call("a cat")
        with pytest.raises(ConfigError, match="serve is of language models"):
            engine.serve()
        with pytest.raises(TensorError, match=r"no input 'sampel'.*did you mean 'sample'"):
            engine.run({"sampel": SAMPLE})
        with pytest.raises(TensorError, match="lacks sample"):
            engine.run({})


def test_a_language_models_manifest_keeps_its_fields(
    tmp_path: Path, built: dict[str, Built]
) -> None:
    fields = json.loads((built["dynamo"].engine / "manifest.json").read_text())
    (tmp_path / "manifest.json").write_text(json.dumps({**fields, "kind": "picture"}))
    with pytest.raises(
        ValueError, match="kind is 'picture', expected one of language_model, graph"
    ):
        read_manifest(tmp_path)
    del fields["kind"]  # a language model's says nothing of it
    (tmp_path / "manifest.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match="max_batch_size is missing"):
        read_manifest(tmp_path)


# ------------------------------------------------------------------------------------------ options


def config(exported: Exported, output: Path, *targets: str, **options: object) -> GraphConfig:
    fields = {"flavour": "none", **options}
    return GraphConfig(exported.graphs["torchscript"], output, targets, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("targets", "count"),
    [
        (("to_q",), 2),
        (("to_out.0", "ff.0"), 4),
        (("blocks.1.ff.2",), 1),
        (("all-linear",), 14),
    ],
)
def test_targets_are_ends_of_paths(
    exported: Exported, tmp_path: Path, targets: tuple[str, ...], count: int
) -> None:
    listing = list_sites(config(exported, tmp_path / "engine", *targets))
    assert len(listing.sites) == count
    assert not (tmp_path / "engine").exists()


def test_an_unknown_target_names_what_is_spelled_alike(exported: Exported, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ends with 'to_qq'; did you mean 'to_q'\?; its paths"):
        list_sites(config(exported, tmp_path / "engine", "to_qq"))
    with pytest.raises(ConfigError, match=r"its paths end with: .*head"):
        list_sites(config(exported, tmp_path / "engine", "o_q"))  # no whole end


def test_adapters_tell_which_linears_take_lora(exported: Exported, tmp_path: Path) -> None:
    manifest = build_engine(config(exported, tmp_path / "e", lora_dirs=(exported.adapter,)))
    ends = {path for path in PATHS if any(path.endswith(target) for target in TARGETS)}
    assert {site.path for site in manifest.sites} == ends
    assert (manifest.max_lora_rank, manifest.profiles) == (3, {})


def test_a_plan_needs_a_range_for_every_size(exported: Exported, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"how large tokens \(of sample\) may be; pass --shapes"):
        build_engine(config(exported, tmp_path / "e", "to_q", shapes=("batch=1:2:4",)))
    with pytest.raises(ConfigError, match=r"--shapes bach: .*did you mean 'batch'"):
        build_engine(config(exported, tmp_path / "e", "to_q", shapes=(*SIZES, "bach=1")))
    for wrong in ("batch", "batch=0:1:2", "batch=2:1:4", "batch=1:2", "batch=x"):
        with pytest.raises(ConfigError, match=f"--shapes {wrong}: expected"):
            build_engine(config(exported, tmp_path / "e", "to_q", shapes=(wrong, "tokens=4")))
    assert not (tmp_path / "e").exists()


def test_nothing_without_targets_and_nothing_over_what_stands_there(
    exported: Exported, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="nothing says which linears take LoRA"):
        config(exported, tmp_path / "e")
    with pytest.raises(ConfigError, match="exists; choose another --output"):
        build_engine(config(exported, tmp_path, "to_q"))


# -------------------------------------------------------------------------------------------- files


def save(
    tmp_path: Path,
    body: str,
    *names: str,
    inputs: str = "float[b, 3] x",
    output: str = "float[b, n]",
) -> Path:
    model = ir.from_onnx_text(f"""
        <ir_version: 10, opset_import: ["" : 18, "com.microsoft" : 1]>
        g ({inputs}) => ({output} z)
        <float[3, 4] w = {{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}}> {{ {body} }}
    """)
    for node, name in zip(model.graph, names, strict=False):
        node.name = name
    ir.save(model, tmp_path / "small.onnx")
    return tmp_path / "small.onnx"


def build(onnx: Path, *targets: str, **options: object) -> object:
    fields = {"flavour": "none", **options}
    return build_engine(GraphConfig(onnx, onnx.parent / "engine", targets, **fields))  # type: ignore[arg-type]


def test_a_linear_that_is_the_output_keeps_its_name(tmp_path: Path) -> None:
    build(save(tmp_path, "z = MatMul(x, w)", "/fc/MatMul"), "fc")
    x, ones = np.ones((2, 3), np.float32), np.ones((3, 1), np.float32)
    with open_engine(tmp_path / "engine", "onnxruntime") as engine:
        base = engine.run({"x": x})["z"]
        factors = {"lora_A_fc": ones, "lora_B_fc": np.ones((1, 4), np.float32)}
        tensors = {name: tensor_from_numpy(array) for name, array in {"x": x, **factors}.items()}
        adapted = engine.execute(TensorMap(tensors))["z"].numpy()
    assert base.tolist() == [[15, 18, 21, 24]] * 2
    assert np.array_equal(adapted, base + 3)


def test_unnamed_linears_are_listed_and_a_site_map_names_them(tmp_path: Path) -> None:
    path = save(tmp_path, "y = MatMul(x, w) z = Relu(y)", "node_MatMul_12")
    with pytest.raises(ConfigError, match=r"nothing in the graph names its module; --site-map can"):
        build(path, "all-linear")
    site_map = tmp_path / "map.json"
    site_map.write_text('{"rename": {"node_MatMul_12": "first.fc"}, "parts": {"fc": [1, 3]}}')
    manifest = build(path, "fc", site_map=site_map)
    (site,) = manifest.sites  # type: ignore[attr-defined]
    assert (site.path, site.parts) == ("first.fc", (1, 3))
    site_map.write_text('{"rename": {"node_MatMul_12": "first.fc"}, "parts": {"fc": [1, 1]}}')
    with pytest.raises(ConfigError, match=r"the parts \[1, 1\] of first\.fc are not 4 together"):
        build(path, "fc", site_map=site_map, force=True)


def test_a_model_in_one_if_is_refused_with_that_reason(tmp_path: Path) -> None:
    one, two = (
        "g1 () => (float[b, 4] t) { t = MatMul(x, w) }",
        "g2 () => (float[b, 4] e) { e = MatMul(x, w) }",
    )
    body = f"z = If (c) <then_branch = {one}, else_branch = {two}>"
    with pytest.raises(ConfigError, match="it is inside another node's subgraph"):
        build(save(tmp_path, body, inputs="float[b, 3] x, bool c"), "all-linear")


def test_an_adapted_value_reaches_a_subgraph_that_reads_it(tmp_path: Path) -> None:
    one, two = (
        "g1 () => (float[b, 4] t) { t = Neg(y) }",
        "g2 () => (float[b, 4] e) { e = Identity(y) }",
    )
    body = f"y = MatMul(x, w) z = If (c) <then_branch = {one}, else_branch = {two}>"
    build(save(tmp_path, body, "/fc/MatMul", inputs="float[b, 3] x, bool c"), "fc")
    with open_engine(tmp_path / "engine", "onnxruntime") as engine:
        inputs = {"x": np.ones((1, 3), np.float32), "c": np.array(True)}
        base = engine.run(inputs)["z"]
        factors = {
            "lora_A_fc": np.ones((3, 1), np.float32),
            "lora_B_fc": np.ones((1, 4), np.float32),
        }
        tensors = {n: tensor_from_numpy(array) for n, array in {**inputs, **factors}.items()}
        adapted = engine.execute(TensorMap(tensors))["z"].numpy()
    assert np.array_equal(adapted, base - 3)


def test_functions_of_the_models_own_are_looked_into(tmp_path: Path) -> None:
    model = ir.from_onnx_text(
        """
        <ir_version: 10, opset_import: ["" : 18, "own" : 1]>
        g (float[b, 3] x) => (float[b, n] z)
        <float[3, 4] w = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}>
        { z = own.Linear(x, fc_weight) }
        <domain: "own", opset_import: ["" : 18]>
        Linear (x, w) => (y) { y = MatMul(x, w) }
    """.replace(" w = {", " fc_weight = {")
    )
    model.graph.initializers["fc_weight"].name = "fc.weight"
    ir.save(model, tmp_path / "small.onnx")
    manifest = build(tmp_path / "small.onnx", "fc")
    assert [site.path for site in manifest.sites] == ["fc"]  # type: ignore[attr-defined]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "double"])
def test_the_dtype_of_a_site_is_that_of_its_linear(tmp_path: Path, dtype: str) -> None:
    model = ir.from_onnx_text(f"""
        <ir_version: 10, opset_import: ["" : 18]>
        g ({dtype}[b, 3] x) => ({dtype}[b, n] z)
        <{dtype}[3, 4] w = {{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}}> {{ z = MatMul(x, w) }}
    """)
    model.graph[0].name = "/fc/MatMul"
    ir.save(model, tmp_path / "small.onnx")
    if dtype == "double":
        with pytest.raises(ModelError, match=r"x is float64 .*an engine takes"):
            build(tmp_path / "small.onnx", "fc")
        return
    manifest = build(tmp_path / "small.onnx", "fc")
    assert {b.dtype for b in manifest.inputs} == {dtype}  # type: ignore[attr-defined]


def test_weights_beside_the_file_are_taken_along(exported: Exported, tmp_path: Path) -> None:
    model = ir.load(exported.graphs["torchscript"])
    ir.save(model, tmp_path / "outside.onnx", external_data="weights.bin")
    manifest = build(tmp_path / "outside.onnx", "to_q")
    (tmp_path / "weights.bin").unlink()
    assert manifest.files["model.onnx.data"].size_bytes > 10_000  # type: ignore[attr-defined]
    with open_engine(tmp_path / "engine", "onnxruntime") as engine:
        out = engine.run({"sample": SAMPLE})["out"]
    np.testing.assert_allclose(out, exported.outputs(SAMPLE)[0], atol=1e-5)
    with pytest.raises(ModelError, match=r"weights in .*weights\.bin, which is not there"):
        build(tmp_path / "outside.onnx", "to_q", force=True)


def test_what_is_no_graph_or_has_lora_already_is_refused(
    built: dict[str, Built], tmp_path: Path
) -> None:
    (tmp_path / "text.onnx").write_text("no graph")
    for path in (tmp_path / "text.onnx", tmp_path / "none.onnx"):
        with pytest.raises(ModelError, match="cannot be read as an ONNX file"):
            build(path, "fc")
    onnx = built["torchscript"].engine / "model.onnx"
    with pytest.raises(ModelError, match=r"has LoRA inputs already \(lora_A_.*\)"):
        build_engine(GraphConfig(onnx, tmp_path / "e", ("head",), flavour="none"))


def test_a_plan_refuses_what_tensorrt_does_not_read(tmp_path: Path) -> None:
    path = save(tmp_path, "y = MatMul(x, w) z = com.microsoft.QuickGelu(y)", "/fc/MatMul")
    with pytest.raises(ConfigError, match=r"ONNX Runtime's own \(QuickGelu\)"):
        build(path, "fc", flavour="tensorrt-rtx", shapes=("b=1:2:4",))
    build(path, "fc")


def test_a_plan_refuses_an_output_of_a_size_that_no_input_has(tmp_path: Path) -> None:
    path = save(tmp_path, "y = MatMul(x, w) z = Compress <axis = 0> (y, c)", "/fc/MatMul",
                inputs="float[b, 3] x, bool[b] c", output="float[m, 4]")  # fmt: skip
    with pytest.raises(ConfigError, match=r"output z has a size .* that no input has"):
        build(path, "fc", flavour="tensorrt-rtx", shapes=("b=1:2:4",))


def test_behind_quantised_activations_lora_reads_x_before_it_is_rounded(tmp_path: Path) -> None:
    model = ir.from_onnx_text("""
        <ir_version: 10, opset_import: ["" : 21]>
        g (float[b, 3] x) => (float[b, n] z)
        <int8[3, 4] w = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}, float s = {0.5}, float t = {1.0}>
        { q = QuantizeLinear <output_dtype = 3> (x, t) d = DequantizeLinear (q, t)
          v = DequantizeLinear (w, s) z = MatMul(d, v) }
    """)
    model.graph[3].name = "/fc/MatMul"
    ir.save(model, tmp_path / "small.onnx")
    build(tmp_path / "small.onnx", "fc")
    x = np.array([[0.25, 0.75, 2.25]], np.float32)  # rounded: 0, 1, 2
    factors = {"lora_A_fc": np.ones((3, 1), np.float32), "lora_B_fc": np.ones((1, 4), np.float32)}
    with open_engine(tmp_path / "engine", "onnxruntime") as engine:
        base = engine.run({"x": x})["z"]
        tensors = {name: tensor_from_numpy(array) for name, array in {"x": x, **factors}.items()}
        adapted = engine.execute(TensorMap(tensors))["z"].numpy()
    assert base.tolist() == [[11.5, 13, 14.5, 16]]
    np.testing.assert_allclose(adapted, base + 3.25)


def test_a_consumer_that_reads_a_linear_twice_reads_the_adapted_value_twice(tmp_path: Path) -> None:
    build(save(tmp_path, "y = MatMul(x, w) z = Mul(y, y)", "/fc/MatMul"), "fc")
    x, ones = np.ones((2, 3), np.float32), np.ones((3, 1), np.float32)
    arrays = {"x": x, "lora_A_fc": ones, "lora_B_fc": np.ones((1, 4), np.float32)}
    tensors = {name: tensor_from_numpy(array) for name, array in arrays.items()}
    with open_engine(tmp_path / "engine", "onnxruntime") as engine:
        adapted = engine.execute(TensorMap(tensors))["z"].numpy()
    np.testing.assert_allclose(adapted, [[18**2, 21**2, 24**2, 27**2]] * 2, rtol=1e-6)


def test_tensorrt_rtx_reads_codes_as_another_exporter_wrote_them(tmp_path: Path) -> None:
    model = ir.from_onnx_text("""
        <ir_version: 10, opset_import: ["" : 21]>
        g (float16[b, 64] x) => (float16[b, 16] z)
        { v = DequantizeLinear <axis = 0, block_size = 32> (w, s) z = MatMul(v, x) }
    """)
    decode, product = model.graph
    codes = (np.arange(64 * 16) % 7).reshape(64, 16)
    tensors = {"w": codes.astype(ml_dtypes.int4), "s": np.full((2, 16), 0.5, np.float16)}
    for place, (name, array) in enumerate(tensors.items()):
        decode.replace_input_with(place, gv.initializer(model.graph, name, ir.tensor(array)))
    for place, value in enumerate((model.graph.inputs[0], decode.outputs[0])):
        product.replace_input_with(place, value)
    product.name = "/fc/MatMul"
    ir.save(model, tmp_path / "small.onnx")
    build(tmp_path / "small.onnx", "fc", flavour="tensorrt-rtx", shapes=("b=1:2:4",))
    with open_engine(tmp_path / "engine", "onnxruntime") as engine:
        out = engine.run({"x": np.ones((1, 64), np.float16)})["z"]
    np.testing.assert_allclose(out[0], 0.5 * codes.sum(axis=0))
