"""Engines whose linears read codes: built from a float model, against PEFT on the same codes."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from safetensors.numpy import load_file
from support.build_progress import Notes
from support.models.architecture_check import batch, engine_logits, largest_error
from support.models.quick_build import quick_build
from support.models.standard_engine import standard_engine
from support.models.tiny_models import save_adapter, save_model, tiny_config

from trt_lora.builder import BuildConfig
from trt_lora.builder.passes import graph_values as gv
from trt_lora.builder.passes import quantise_linears
from trt_lora.builder.passes.codes.coded_weight import CodedWeight, coded_weights
from trt_lora.builder.passes.linears import Linear, find_linears
from trt_lora.builder.passes.lowering.sign_codes import has_signed_form
from trt_lora.builder.quantising import quantise
from trt_lora.plugins.errors import ConfigError
from trt_lora.runtime import LoRAManager, Manifest, open_engine, read_manifest
from trt_lora.runtime.manifest import ONNX_CPU_FILE, ONNX_FILE, ONNX_WEIGHTS_FILE, PLAN_FILE
from trt_lora.scripts.terminal.engine_facts import engine_facts
from trt_lora.scripts.verification.logits import engine_logits as prefill_and_decode
from trt_lora.scripts.verification.peft_reference import PeftReference

EXACT = {"quantize_block": 16, "quantize_level": "exact"}
HEAD = "lm_head"


def reference_of(engine: Path, model: Path, adapter: Path, dtype: str = "float32") -> PeftReference:
    codes, kinds = coded_weights(ir.load(engine / ONNX_FILE)), read_manifest(engine).weights
    weights = {path: weight.dequantised() for path, weight in codes}
    weights |= {kinds[path].embedding: w for path, w in weights.items() if kinds[path].embedding}
    return PeftReference(model, {"a": adapter}, dtype, weights=weights)


def answers(engine: Path, adapter: Path) -> dict[str, Any]:
    """Logits of the base model and of an adapter."""
    with open_engine(engine, "onnxruntime") as running:
        manager = LoRAManager()
        manager.initialize_engine_bindings(running)
        manager.load_weights("a", adapter)
        return {name: engine_logits(running, manager, name) for name in ("", "a")}


@pytest.mark.slow
@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize("architecture", ["Llama", "GPT2", "Qwen2", "Gemma2"])
def test_an_engine_answers_as_peft_on_the_weights_of_its_codes(
    architecture: str, quantize: str, tmp_path: Path
) -> None:
    """With biases and without, weights [k, n] too, and attention that has no operator."""
    model = save_model(architecture, tmp_path / "model")
    adapter = save_adapter(model, tmp_path / "a", r=4, lora_alpha=8)
    engine = tmp_path / "engine"
    manifest = quick_build(tiny_config(model, engine, quantize=quantize, **EXACT))
    assert manifest.weights.keys() == {site.path for site in manifest.sites} | {HEAD}
    kinds = [node.op_type for node in ir.load(engine / ONNX_CPU_FILE).graph]
    assert kinds.count("MatMulNBits") == len(manifest.weights)
    tied = {"GPT2": "transformer.wte", "Gemma2": "model.embed_tokens"}.get(architecture, "")
    assert manifest.weights[HEAD].embedding == tied
    assert kinds.count("GatherBlockQuantized") == bool(tied)
    found, reference = answers(engine, adapter), reference_of(engine, model, adapter)
    for name, ours in found.items():
        assert largest_error(ours, reference.logits(name, *batch())) < 1e-4
    assert largest_error(found[""], found["a"]) > 0.1
    plain = PeftReference(model, {"a": adapter})
    moved = largest_error(found["a"], plain.logits("a", *batch()))
    # A Gemma multiplies what it embeds.
    assert 1e-3 < moved < (0.1 if quantize == "int8" and not tied else 1.5)


def holds(plan: bytes, weight: CodedWeight) -> bool:
    """Whether a plan has the bytes of signed codes and scales; some of 8 bits it transposes."""
    codes = np.bitwise_xor(weight.codes, 0x88 if weight.bits == 4 else 0x80)
    scales = weight.scales if weight.bits == 4 else weight.scales[:, :1]
    forms = [codes] if weight.bits == 4 else [codes, codes.T]
    has_codes = any(all(row.tobytes() in plan for row in form) for form in forms)
    return has_codes and scales.tobytes() in plan


@pytest.mark.slow
@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize("architecture", ["Llama", "GPT2", "Qwen2"])
def test_a_plan_is_made_of_codes_that_a_cpu_multiplies_by_too(
    architecture: str, quantize: str, tmp_path: Path
) -> None:
    """A GPT2 has weights [k, n] and its biases in a Gemm, a Qwen2 biases that are added."""
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX has wheels for few platforms")
    model = save_model(architecture, tmp_path / "model")
    adapter, notes = save_adapter(model, tmp_path / "a", r=4, lora_alpha=8), Notes()
    engine = tmp_path / "engine"
    options = {"quantize": quantize, "flavour": "tensorrt-rtx", **EXACT}
    manifest = quick_build(tiny_config(model, engine, **options), notes)
    assert manifest.weights.keys() == {site.path for site in manifest.sites} | {HEAD}
    assert all(kind.is_symmetric for kind in manifest.weights.values())
    weights = dict(coded_weights(ir.load(engine / ONNX_FILE)))
    assert all(has_signed_form(weight) for weight in weights.values())
    scales = weights[HEAD].scales
    assert (scales == scales[:, :1]).all()  # of 8 bits one a row
    assert scales.shape[1] == 2
    plan = (engine / PLAN_FILE).read_bytes()
    assert [path for path, weight in weights.items() if not holds(plan, weight)] == []
    found, reference = answers(engine, adapter), reference_of(engine, model, adapter)
    for name, ours in found.items():
        assert largest_error(ours, reference.logits(name, *batch())) < 1e-4
    plain = PeftReference(model, {"a": adapter})
    moved = largest_error(found["a"], plain.logits("a", *batch()))
    assert 1e-3 < moved < (0.1 if quantize == "int8" else 1.5)
    said = "a plan takes no zeros: with --flavour none 4 bits lose less" in notes.notes
    assert said == (quantize == "int4")


@pytest.mark.slow
def test_both_files_answer_alike_and_lie_over_the_same_codes(
    tmp_path: Path, tiny_model: Path
) -> None:
    adapter, engine = save_adapter(tiny_model, tmp_path / "a", r=4), tmp_path / "engine"
    quick_build(tiny_config(tiny_model, engine, quantize="int4", quantize_head="int4", **EXACT))
    own = answers(engine, adapter)
    standard = standard_engine(engine, tmp_path / "standard")
    for name, expected in answers(standard, adapter).items():
        assert largest_error(own[name], expected) < 1e-5
    values = ir.load(engine / ONNX_CPU_FILE).graph.initializers
    large = [v for name, v in values.items() if name.endswith((".codes", ".scales"))]
    inside = [v.name for v in large if not isinstance(v.const_value, ir.ExternalTensor)]
    sizes = [v.const_value.nbytes for v in large if v.const_value and v.name in inside]
    assert max(sizes, default=0) <= 256  # bytes that onnx_ir leaves in the graph itself


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"dtype": "float16"}, {"max_loras": 2}, {"quantize_level": "fast"}]
)
def test_half_precision_slots_and_fast_products_stay_close(
    options: dict[str, Any], tmp_path: Path, tiny_model: Path
) -> None:
    adapter, engine = save_adapter(tiny_model, tmp_path / "a", r=4), tmp_path / "engine"
    manifest = quick_build(tiny_config(tiny_model, engine, quantize="int8", **EXACT | options))
    reference = reference_of(engine, tiny_model, adapter)
    limit = 1e-4 if "max_loras" in options else 0.05
    with open_engine(engine, "onnxruntime") as running:
        running.adapters.load("a", adapter)
        ids = np.array([[3, 1, 4, 1, 5]])
        found = prefill_and_decode(running, "a", ids, prompt=3)
    expected = reference.logits("a", ids, np.ones_like(ids))
    assert np.abs(found - expected).max() < limit
    assert {kind.level for kind in manifest.weights.values()} == {
        options.get("quantize_level", "exact")
    }


@pytest.mark.slow
def test_the_manifest_says_what_each_weight_is(tmp_path: Path, tiny_model: Path) -> None:
    engine = tmp_path / "engine"
    quick_build(tiny_config(tiny_model, engine, quantize="int4", quantize_block=16))
    manifest: Manifest = read_manifest(engine)
    q, head = (manifest.weights[path] for path in ("model.layers.0.self_attn.q_proj", HEAD))
    assert (q.format, q.shape, q.bits, q.block, q.level) == ("int4", (32, 32), 4, 16, "fast")
    assert (head.format, head.bits, head.is_symmetric) == ("int8", 8, True)
    assert (q.is_symmetric, q.source) == (False, "rounded to the nearest")
    assert q.nbytes(4) == 32 * 32 // 2 + 32 * 2 * 4 + 32 * 2 // 2
    assert head.nbytes(2) == head.shape[0] * (32 + 2 * 2)
    # The file: the codes, the float embedding and what is not of a linear.
    facts = engine_facts(engine, manifest)["weights"]
    assert facts.startswith("lm_head int8, block 16: 0.0 MB; linears int4, block 16: 0.0 MB; in f")
    coded = sum(kind.nbytes(4) for kind in manifest.weights.values())
    embedding = 4 * manifest.vocabulary_size * 32
    # Tensors of up to 256 bytes lie in the graph itself.
    assert abs(manifest.files[ONNX_WEIGHTS_FILE].size_bytes - coded - embedding) < 2_000


@pytest.mark.slow
@pytest.mark.parametrize("head", ["int8", "int4", "none"])
def test_a_tied_embedding_reads_codes_of_8_bits_from_the_same_bytes(
    head: str, tmp_path: Path
) -> None:
    model = save_model("Llama", tmp_path / "model", tie_word_embeddings=True)
    options = {"quantize": "int8", "quantize_head": head, **EXACT}
    manifest = quick_build(tiny_config(model, tmp_path / "engine", **options))
    values = ir.load(tmp_path / "engine" / ONNX_CPU_FILE).graph.initializers
    table = 4 * manifest.vocabulary_size * 32
    coded = sum(kind.nbytes(4) for kind in manifest.weights.values())
    floats = manifest.files[ONNX_WEIGHTS_FILE].size_bytes - coded
    if head != "int8":
        assert floats > table
        assert all(not kind.embedding for kind in manifest.weights.values())
        return
    assert floats < 2_000
    places = [values[f"{HEAD}.codes{end}"].const_value for end in ("", ".rows")]
    assert all(isinstance(each, ir.ExternalTensor) for each in places)
    assert len({each.offset for each in places if isinstance(each, ir.ExternalTensor)}) == 1
    facts = engine_facts(tmp_path / "engine", manifest)["weights"]
    assert facts.startswith("lm_head and model.embed_tokens int8, block 16: ")


@pytest.mark.slow
def test_a_head_may_stay_in_floats_and_so_do_rows_that_are_no_blocks(tmp_path: Path) -> None:
    model, notes = save_model("Llama", tmp_path / "model", intermediate_size=40), Notes()
    options = {"quantize": "int8", "quantize_head": "none", "quantize_block": 32}
    manifest = quick_build(tiny_config(model, tmp_path / "engine", **options), notes)
    down = [f"model.layers.{layer}.mlp.down_proj" for layer in (0, 1)]
    assert HEAD not in manifest.weights
    assert manifest.weights.keys() == {site.path for site in manifest.sites} - {*down}
    rows = "keeps its weight in float32: rows of 40 values are no blocks of 32"
    assert [note for note in notes.notes if "blocks" in note] == [f"{path} {rows}" for path in down]


@pytest.mark.slow
def test_a_weight_that_the_graph_computes_stays_in_floats_and_the_build_says_so(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, notes = "model.layers.1.mlp.up_proj", Notes()

    def all_but_one(model: ir.Model) -> list[Linear]:
        return [linear for linear in find_linears(model) if linear.path != path]

    monkeypatch.setattr(quantise_linears, "find_linears", all_but_one)
    config = tiny_config(tiny_model, tmp_path / "e", quantize="int8", **EXACT)
    manifest = quick_build(config, notes)
    assert manifest.weights.keys() == {site.path for site in manifest.sites} - {path} | {HEAD}
    assert f"{path} keeps its weight in float32: the graph computes it" in notes.notes
    kept = ir.load(tmp_path / "e" / ONNX_FILE).graph.initializers[
        f"model_.{path}.weight.transposed"
    ]
    own = load_file(tiny_model / "model.safetensors")[f"{path}.weight"]
    assert np.array_equal(gv.present(kept.const_value).numpy(), own.T)


@pytest.mark.slow
def test_half_precision_has_the_positions_of_a_model_in_floats(
    tmp_path: Path, tiny_model: Path
) -> None:
    """Frequencies of rotary embeddings are no weights: they are float32 until tables are made."""
    tables = []
    for quantize in ("none", "int8"):
        engine = tmp_path / quantize
        options = {"quantize": quantize, "quantize_block": 16, "dtype": "float16"}
        quick_build(tiny_config(tiny_model, engine, **options))
        values = ir.load(engine / ONNX_FILE).graph.initializers
        named = {name: gv.present(value.const_value) for name, value in values.items()}
        tables.append({n: t.numpy().tolist() for n, t in named.items() if n.endswith("_table")})
    assert len(tables[0]) == 2
    assert tables[0] == tables[1]


@pytest.mark.slow
def test_a_text_calibrates_and_its_hash_is_in_the_manifest(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = []

    class Letters:
        """A tokenizer of letters."""

        def __init__(self, directory: Path) -> None:
            assert directory == tiny_model

        def encode_text(self, text: str) -> list[int]:
            texts.append(text)
            return [ord(letter) % 64 for letter in text]

    monkeypatch.setattr(quantise, "TextTokenizer", Letters)
    monkeypatch.setattr(quantise, "TOKENIZER_FILE", "config.json")  # which is there
    text = tmp_path / "text.txt"
    sources = []
    for content in ("the quick brown fox " * 20, "another text entirely " * 20, None):
        options = {"quantize": "int4", **EXACT}
        if content is not None:
            text.write_text(content)
            options["calibration"] = text
        manifest = quick_build(tiny_config(tiny_model, tmp_path / "e", **options, force=True))
        sources.append(manifest.weights["model.layers.0.self_attn.q_proj"].source)
        assert manifest.weights[HEAD].source == "rounded to the nearest"
    assert len({*sources}) == 3
    assert all(source.startswith("GPTQ on ") and len(source) == 8 + 64 for source in sources)
    assert texts[2] == quantise.TEXT.read_text(encoding="utf-8")


@pytest.mark.slow
def test_without_a_tokenizer_codes_are_found_without_a_text_and_the_build_says_so(
    tmp_path: Path, tiny_model: Path
) -> None:
    notes = Notes()
    quick_build(tiny_config(tiny_model, tmp_path / "e", quantize="int4", **EXACT), notes)
    assert f"{tiny_model} has no tokenizer.json: codes without calibration" in notes.notes


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "cannot be read: .*No such file"),
        (b"\xff\xfe\x00", "cannot be read: .*codec can't decode"),
        (b" \n", "holds no text; pass another, or leave it out"),
    ],
)
def test_a_text_that_cannot_be_read_is_refused(
    content: bytes | None, reason: str, tmp_path: Path, tiny_model: Path
) -> None:
    (copy := tmp_path / "model").symlink_to(tiny_model)
    text = tmp_path / "text.txt"
    if content is not None:
        text.write_bytes(content)
    config = tiny_config(copy, tmp_path / "e", quantize="int4", calibration=text, **EXACT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantise, "TOKENIZER_FILE", "config.json")
        with pytest.raises(ConfigError, match=f"--calibration {text} {reason}"):
            quick_build(config)
    assert not (tmp_path / "e").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantize": "int3"}, "--quantize is 'int3'; choose from: none, int8, int4"),
        ({"quantize_head": "int2"}, "--quantize-head is 'int2'; choose from"),
        ({"quantize_block": 48}, "--quantize-block is '48'; choose from: 16, 32, 64, 128, 256"),
        ({"quantize_level": "slow"}, "--quantize-level is 'slow'; choose from: fast, exact"),
        ({"quantize": "int8", "calibration": Path("a")}, "is a text for --quantize int4 or fp8, "),
        ({"quantize": "int4", "dtype": "bfloat16"}, "takes --dtype float16 or float32; it is bf"),
    ],
)
def test_options_that_make_no_codes_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BuildConfig(Path("model"), Path("engine"), ("attn_q",), **options)


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of two layers, which has no tokenizer."""
    return save_model("Llama", tmp_path_factory.mktemp("codes") / "model")
