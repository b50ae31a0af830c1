"""Every field of PEFT's LoraConfig is honoured exactly, has no effect, or is refused by name."""

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from peft import (
    ArrowConfig,
    BdLoraConfig,
    EvaConfig,
    IA3Config,
    KasaConfig,
    LoraConfig,
    LoraGAConfig,
    LoraRuntimeConfig,
    MontecloraConfig,
    PeftModel,
    VeloraConfig,
    create_arrow_model,
    get_peft_model,
    initialize_lora_eva_weights,
    preprocess_loraga,
)
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.config import CordaConfig
from safetensors.torch import load_file, save_file
from support import tiny_models as tiny
from support.tiny_models import save_adapter, save_model, tiny_config

from trt_lora.builder import build_engine
from trt_lora.builder.suppress_output import suppress_output
from trt_lora.plugins.errors import AdapterError
from trt_lora.runtime import Engine, LoRAManager, TensorMap, load_adapter, open_engine
from trt_lora.runtime.adapters.fitting.coverage import Coverage
from trt_lora.runtime.files.untrusted_file import AdapterFile
from trt_lora.runtime.generation.decoder import Decoder
from trt_lora.runtime.generation.sampling import Logits
from trt_lora.runtime.memory.read_buffer import Bytes, ReadBuffer
from trt_lora.scripts.verification.peft_reference import PeftReference

pytestmark = pytest.mark.slow  # for the engines that all of them share

Make = Callable[[Path, Path], Path]  # model, directory -> the adapter that PEFT saved there

PREFIX = "base_model.model."
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
HEAD_COPY = f"{PREFIX}lm_head.base_layer.weight"
Q_AND_V, Q_AND_HEAD = ["q_proj", "v_proj"], ["q_proj", "lm_head"]
RETRAIN = "train the adapter without it, or merge it into the base model and build from that"
CONVERT = "save_pretrained(..., path_initial_model_for_weight_conversion=...)"
SAVE_AGAIN = "save the adapter again with save_embedding_layers=False"

# ------------------------------------------------------------------- adapters, made by PEFT itself


def peft(**options: Any) -> Make:
    """Make what `get_peft_model` and `save_pretrained` make of these options."""
    return partial(save_adapter, **options)


def written(**fields: Any) -> Make:
    """Make a plain adapter and write into its config what PEFT cannot make here, or never saves."""

    def make(model: Path, directory: Path) -> Path:
        save_adapter(model, directory)
        config = {**saved_config(directory), **fields}
        (directory / CONFIG).write_text(json.dumps(config), encoding="utf-8")
        return directory

    return make


def saved_config(directory: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
    return config


def lora(**options: Any) -> Any:
    """Return PEFT's config; its type hints lack values that PEFT takes."""
    return LoraConfig(task_type="CAUSAL_LM", **options)


def base_of(model: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)


def randomised(adapted: Any) -> Any:
    """What training would do: weights whose delta matters."""
    torch.manual_seed(0)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data = 0.2 * torch.randn_like(parameter)
    return adapted


def sample() -> torch.Tensor:
    """A batch of one sequence, for what initialises from data."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(3, tiny.VOCABULARY, (1, tiny.POSITIONS), generator=generator)


def without_copies(**options: Any) -> Make:
    """Make an adapter that targets lm_head, saved without the copy of the base weight."""

    @suppress_output()
    def make(model: Path, directory: Path) -> Path:
        loaded = PeftModel.from_pretrained(
            base_of(model), save_adapter(model, directory / "copies", **options)
        )
        loaded.save_pretrained(str(directory), save_embedding_layers=False)
        return directory

    return make


@suppress_output()
def eva(model: Path, directory: Path) -> Path:
    """EVA moves ranks between layers, so it saves rank and alpha patterns of its own."""
    config = lora(
        r=4,
        target_modules=["q_proj", "o_proj", "down_proj"],
        init_lora_weights="eva",
        eva_config=EvaConfig(rho=2.0),
    )
    adapted = get_peft_model(base_of(model), config)
    batch = {"input_ids": sample(), "attention_mask": torch.ones_like(sample())}
    initialize_lora_eva_weights(adapted, [batch], show_progress_bar=False)
    randomised(adapted).save_pretrained(str(directory))
    return directory


@suppress_output()
def lora_ga(model: Path, directory: Path) -> Path:
    config = lora(
        target_modules=Q_AND_V, init_lora_weights="lora_ga", lora_ga_config=LoraGAConfig()
    )
    base = base_of(model)
    preprocess_loraga(base, config, lambda: base(sample(), labels=sample()).loss.backward())
    get_peft_model(base, config).save_pretrained(str(directory))
    return directory


@suppress_output()
def arrow(model: Path, directory: Path) -> Path:
    task = save_adapter(model, directory / "task")
    router = create_arrow_model(base_of(model), [str(task)], ArrowConfig(top_k=1))
    router.save_pretrained(str(directory), selected_adapters=["arrow_router"])
    return directory / "arrow_router"


@suppress_output()
def ia3(model: Path, directory: Path) -> Path:
    get_peft_model(base_of(model), IA3Config(task_type="CAUSAL_LM")).save_pretrained(str(directory))
    return directory


# ------------------------------------------------------------------------------------- the table


@dataclass(frozen=True)
class Taken:
    """An adapter with which the engine answers as PEFT does."""

    make: Make
    model: str = "Llama"
    warning: str = ""  # of the coverage


@dataclass(frozen=True)
class Refused:
    """An adapter that is refused by the field's name and its value as saved, and with advice."""

    make: Make
    advice: str
    model: str = "Llama"
    tensor: str = ""  # what the message names instead where the field alone does no harm


FIELDS: dict[str, list[Taken | Refused]] = {
    # ------------------------------------------------------------------ rank and scale
    "r": [Taken(peft(r=1)), Taken(peft(r=5)), Taken(peft(r=16, lora_alpha=16))],
    "lora_alpha": [
        Taken(peft(lora_alpha=3)),
        Taken(peft(r=6, lora_alpha=11)),
        Taken(peft(lora_alpha=-4)),
        Taken(peft(lora_alpha=2.5)),
    ],
    "use_rslora": [
        Taken(peft(r=7, lora_alpha=3, use_rslora=True)),
        Taken(peft(lora_alpha=2, use_rslora=True, rank_pattern={"v_proj": 2})),
    ],
    "rank_pattern": [
        Taken(peft(rank_pattern={"q_proj": 2, "mlp.down_proj": 11})),
        Taken(peft(rank_pattern={"model.layers.1.self_attn.q_proj": 3, "q_proj": 5})),
        Taken(peft(rank_pattern={"^model.layers.1.self_attn.q_proj": 3, "q_proj|k_proj": 2})),
        Taken(peft(rank_pattern={r"model\.layers\.1\..*": 12, "proj": 1, "o": 1})),
        Taken(without_copies(target_modules=Q_AND_HEAD, rank_pattern={"lm_head": 3})),
        Taken(peft(rank_pattern={"attn.c_proj": 3, "c_proj": 2}), "GPT2"),
    ],
    "alpha_pattern": [
        Taken(peft(alpha_pattern={"q_proj": 16, "mlp.down_proj": 1})),
        Taken(peft(alpha_pattern={r"layers\.\d\.mlp.*": 3, "v_proj|o_proj": 0.5})),
        Taken(peft(alpha_pattern={".*q_proj": 2}, rank_pattern={"q_proj": 4}, use_rslora=True)),
        Taken(without_copies(target_modules=Q_AND_HEAD, alpha_pattern={"lm_head": 3})),
    ],
    # ------------------------------------------------------------------ which modules
    "target_modules": [
        Taken(peft(target_modules=Q_AND_V)),
        Taken(peft(target_modules=["layers.1.self_attn.q_proj", "model.layers.0.mlp.up_proj"])),
        Taken(peft(target_modules=r".*\.(q|v)_proj")),
        Taken(peft(target_modules=r"model\.layers\.1\.mlp\.(up|down)_proj")),
        Taken(peft(target_modules="all-linear")),
        Taken(peft(target_modules=None)),  # PEFT's own choice for the architecture
        Taken(without_copies(target_modules=["lm_head"])),
        Taken(without_copies(target_modules=r".*(q_proj|lm_head)")),
        Taken(peft(target_modules=["c_attn"]), "GPT2"),
        Taken(without_copies(target_modules=["c_attn", "lm_head"]), "GPT2"),  # tied to wte
        Refused(peft(target_modules=Q_AND_HEAD), SAVE_AGAIN, tensor=HEAD_COPY),
        Refused(
            peft(target_modules=["c_attn", "lm_head"]), SAVE_AGAIN, model="GPT2", tensor=HEAD_COPY
        ),
        Refused(
            without_copies(target_modules=["q_proj", "embed_tokens"]),
            "it adapts an embedding, which is no matrix product",
            tensor=f"{PREFIX}model.embed_tokens.lora_embedding_A",
        ),
        Refused(
            peft(target_modules=["c_attn", "wte"]),
            "it adapts an embedding, which is no matrix product",
            model="GPT2",
            tensor=f"{PREFIX}transformer.wte.lora_embedding_A",
        ),
    ],
    "exclude_modules": [
        Taken(peft(exclude_modules=["k_proj", "model.layers.0.mlp.up_proj"])),
        Taken(peft(exclude_modules=r".*\.layers\.0\..*")),
        Taken(peft(target_modules=Q_AND_V, exclude_modules=["layers.1.self_attn.v_proj"])),
    ],
    "layers_to_transform": [
        Taken(peft(target_modules=Q_AND_V, layers_to_transform=[1])),
        Taken(peft(target_modules=Q_AND_V, layers_to_transform=0)),
        Taken(peft(target_modules=["c_attn"], layers_to_transform=[1]), "GPT2"),
        # PEFT filters no module that is named by its whole path.
        Taken(without_copies(target_modules=Q_AND_HEAD, layers_to_transform=[1])),
        Taken(
            peft(
                target_modules=["model.layers.0.self_attn.q_proj", "v_proj"],
                layers_to_transform=[1],
            )
        ),
    ],
    "layers_pattern": [
        Taken(peft(target_modules=Q_AND_V, layers_to_transform=[1], layers_pattern="layers")),
        Taken(peft(target_modules=Q_AND_V, layers_to_transform=0, layers_pattern=["h", "layers"])),
        Taken(peft(target_modules=["c_attn"], layers_to_transform=[0], layers_pattern="h"), "GPT2"),
    ],
    "target_parameters": [
        Refused(peft(target_modules=[], target_parameters=["q_proj.weight"]), RETRAIN),
        Refused(peft(target_modules=Q_AND_V, target_parameters=["up_proj.weight"]), RETRAIN),
    ],
    # ------------------------------------------------------------------ other weights
    "bias": [
        Refused(peft(bias="all"), RETRAIN, model="GPT2"),
        Refused(peft(bias="lora_only"), RETRAIN, model="GPT2"),
        Refused(peft(bias="lora_only"), RETRAIN),
    ],
    "lora_bias": [
        Refused(peft(lora_bias=True), RETRAIN),
        Refused(peft(lora_bias=True), RETRAIN, model="GPT2"),
    ],
    "modules_to_save": [
        Refused(peft(modules_to_save=["lm_head"]), RETRAIN),
        Refused(peft(modules_to_save=["norm"]), RETRAIN),
    ],
    "trainable_token_indices": [
        Refused(peft(trainable_token_indices=[1, 2]), RETRAIN),
        Refused(peft(trainable_token_indices={"embed_tokens": [1]}), RETRAIN),
        Refused(peft(trainable_token_indices={"wte": [1]}), RETRAIN, model="GPT2"),
    ],
    "ensure_weight_tying": [
        Taken(peft(ensure_weight_tying=True)),
        Refused(
            peft(ensure_weight_tying=True, target_modules=["c_attn", "lm_head"]),
            "it adapts an embedding, which is no matrix product",
            model="GPT2",
            tensor=f"{PREFIX}transformer.wte.lora_embedding_A",
        ),
    ],
    "layer_replication": [
        Refused(peft(target_modules=Q_AND_V, layer_replication=[(0, 2), (0, 2)]), RETRAIN),
    ],
    # ------------------------------------------------------------------ other products than B A x
    "use_dora": [Refused(peft(use_dora=True), RETRAIN)],
    "use_qalora": [Refused(peft(use_qalora=True), "train a plain LoRA")],
    "qalora_group_size": [Taken(peft(qalora_group_size=4))],
    "use_bdlora": [
        Refused(
            peft(
                target_modules=Q_AND_V,
                use_bdlora=BdLoraConfig(
                    target_modules_bd_a=["q_proj"], target_modules_bd_b=["v_proj"], nblocks=2
                ),
            ),
            "train a plain LoRA",
        ),
    ],
    "alora_invocation_tokens": [
        Refused(peft(alora_invocation_tokens=[3, 4]), "train a plain LoRA"),
    ],
    "arrow_config": [Refused(arrow, "load the adapters by themselves")],
    "kasa_config": [Refused(peft(kasa_config=KasaConfig()), RETRAIN)],
    "monteclora_config": [
        Refused(peft(monteclora_config=MontecloraConfig()), "train a plain LoRA"),
    ],
    # PEFT needs Megatron for it, which needs CUDA.
    "megatron_config": [
        Refused(written(megatron_config={"tensor_model_parallel_size": 2}), "save a plain LoRA"),
    ],
    "megatron_core": [Taken(peft(megatron_core="megatron.other"))],
    # ------------------------------------------------------------------ training alone
    "fan_in_fan_out": [
        Taken(peft(fan_in_fan_out=True), "GPT2"),  # Conv1D
        Taken(written(fan_in_fan_out=True)),
    ],
    "lora_dropout": [Taken(peft(lora_dropout=0.5))],
    "init_lora_weights": [
        *(
            Taken(peft(init_lora_weights=init))
            for init in (False, "gaussian", "orthogonal", "mica", "eva")
        ),
        Taken(eva),
        *(
            Refused(peft(init_lora_weights=init), CONVERT)
            for init in ("pissa", "pissa_niter_4", "olora")
        ),
        Refused(lora_ga, CONVERT),
        # PEFT needs attrs for the first, scipy and bitsandbytes for the other.
        Refused(
            written(init_lora_weights="corda", corda_config=dataclasses.asdict(CordaConfig())),
            CONVERT,
        ),
        Refused(
            written(init_lora_weights="loftq", loftq_config={"loftq_bits": 4, "loftq_iter": 1}),
            CONVERT,
        ),
    ],
    "loftq_config": [Taken(written(loftq_config={"loftq_bits": 4, "loftq_iter": 1}))],
    "eva_config": [Taken(eva), Taken(peft(eva_config=EvaConfig(rho=1.5)))],
    "corda_config": [Taken(peft(corda_config=CordaConfig()))],
    "lora_ga_config": [Taken(peft(lora_ga_config=LoraGAConfig()))],
    "velora_config": [Taken(peft(velora_config=VeloraConfig(num_groups=4)))],
    "runtime_config": [
        Taken(peft(runtime_config=LoraRuntimeConfig(ephemeral_gpu_offload=True))),
    ],
    # ------------------------------------------------------------------ bookkeeping
    "task_type": [
        Taken(peft(task_type="CAUSAL_LM")),
        Taken(peft(task_type="FEATURE_EXTRACTION")),
    ],
    "peft_type": [Taken(peft()), Refused(ia3, "only 'LORA' is supported")],
    "auto_mapping": [Taken(peft(task_type=None))],
    "peft_version": [Taken(peft()), Taken(written(peft_version="0.3.0"))],
    "base_model_name_or_path": [
        Taken(peft()),
        Taken(written(base_model_name_or_path="some/base"), warning="names 'some/base' as its"),
    ],
    "revision": [Taken(peft(revision="main"))],
    "inference_mode": [Taken(peft(inference_mode=True))],
}

Entry = tuple[str, Taken | Refused]
CASES: list[Entry] = [(field, case) for field, cases in FIELDS.items() for case in cases]


def of_kind(kind: type[Taken | Refused]) -> list[Any]:
    """The cases of one kind, named by field and place in the table."""
    return [
        pytest.param(field, case, id=f"{field}-{FIELDS[field].index(case)}")
        for field, case in CASES
        if isinstance(case, kind)
    ]


# ----------------------------------------------------------------------------------- the engines


@dataclass(frozen=True)
class Running:
    """A running engine with sites on every linear and lm_head, and its tiny random model."""

    model: Path
    engine: Engine
    base: Logits


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Running]]:
    """Both engines, by architecture; seconds each."""
    folder = tmp_path_factory.mktemp("fields")
    with ExitStack() as stack:
        found = {}
        for name in ("Llama", "GPT2"):
            model = save_model(name, folder / name / "model")
            output, targets = folder / name / "engine", ("all-linear", "lm_head")
            build_engine(tiny_config(model, output, target_modules=targets))
            engine = stack.enter_context(open_engine(output))
            found[name] = Running(model, engine, logits(engine, bound_manager(engine)))
        yield found


@pytest.fixture
def llama(running: dict[str, Running]) -> Running:
    """The Llama, whose lm_head has a weight of its own."""
    return running["Llama"]


@pytest.fixture(scope="module")
def made(
    running: dict[str, Running], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Taken | Refused], Path]:
    """Make the adapter of a case, once."""

    @cache
    def make(case: Taken | Refused) -> Path:
        return case.make(running[case.model].model, tmp_path_factory.mktemp("made") / "a")

    return make


def bound_manager(engine: Engine) -> LoRAManager:
    manager = LoRAManager()
    manager.initialize_engine_bindings(engine)
    return manager


def prompt() -> tuple[Any, Any]:
    """Ids and mask [2, 12]; the first row is left-padded by three."""
    ids = np.random.default_rng(0).integers(3, tiny.VOCABULARY, (2, 12))
    mask = np.ones_like(ids)
    mask[0, :3], ids[0, :3] = 0, 0
    return ids, mask


def logits(engine: Engine, manager: LoRAManager) -> Logits:
    tensor_map = TensorMap()
    manager.refresh_tensor_map(tensor_map)
    ids, mask = prompt()
    return Decoder(engine, tensor_map, batch_size=2).step(ids, mask, keep=ids.shape[1])


def loaded(at: Running, adapter: Path, *, strict: bool = True) -> tuple[Coverage, Logits]:
    """The coverage of an adapter in an engine, and the logits with it."""
    manager = bound_manager(at.engine)
    coverage = manager.load_weights("a", adapter, strict=strict)
    assert coverage is not None
    manager.switch_weights("a")
    return coverage, logits(at.engine, manager)


def difference(ours: Logits, theirs: Logits) -> float:
    """The largest difference at positions that are not padding."""
    real = prompt()[1].astype(bool)
    return float(np.abs(ours[real] - theirs[real]).max())


def assert_answers_as_peft(at: Running, adapter: Path, ours: Logits) -> PeftReference:
    """The same logits as PEFT's, and others than the base model's."""
    reference = PeftReference(at.model, {"a": adapter})
    assert difference(ours, reference.logits("a", *prompt())) < 1e-4
    assert difference(ours, at.base) > 0.05
    return reference


def layers_of(reference: PeftReference) -> dict[str, Any]:
    """PEFT's own layers by the path of the module that each adapts."""
    return {
        name.removeprefix(PREFIX): module
        for name, module in reference.model.named_modules()
        if isinstance(module, LoraLayer)
    }


def assert_refused(at: Running, adapter: Path, *messages: str) -> None:
    """Refused with every one of the messages, and nothing is registered."""
    manager = bound_manager(at.engine)
    with pytest.raises(AdapterError) as caught:
        manager.load_weights("a", adapter)
    text = str(caught.value)
    assert [message for message in (str(adapter), *messages) if message not in text] == []
    assert manager.get_adapter_names() == []


# ------------------------------------------------------------------------------------ every field


def test_the_table_has_every_field_of_this_release_of_peft() -> None:
    assert set(FIELDS) == {field.name for field in dataclasses.fields(LoraConfig)}
    assert [field for field, cases in FIELDS.items() if not cases] == []


@pytest.mark.parametrize(("field", "case"), of_kind(Taken))
def test_an_adapter_that_is_taken_answers_as_in_peft(
    running: dict[str, Running],
    made: Callable[[Taken], Path],
    field: str,
    case: Taken,
) -> None:
    at, adapter = running[case.model], made(case)
    default = next(f.default for f in dataclasses.fields(LoraConfig) if f.name == field)
    assert saved_config(adapter).get(field, "not saved") != default  # the case is about the field
    coverage, ours = loaded(at, adapter)
    layers = layers_of(assert_answers_as_peft(at, adapter, ours))
    assert {site.path: site.rank for site in coverage.adapted} == {
        path: layer.r["a"] for path, layer in layers.items()
    }
    for site in coverage.adapted:
        scale = layers[site.path].scaling["a"]
        assert list(site.scales) == pytest.approx([scale], rel=1e-12)
    assert coverage.unexpected_keys == {}
    assert [case.warning in warning for warning in coverage.warnings] == [True] * bool(case.warning)


@pytest.mark.parametrize(("field", "case"), of_kind(Taken))
def test_the_config_of_an_adapter_that_is_taken_targets_what_its_file_holds(
    running: dict[str, Running],
    made: Callable[[Taken], Path],
    field: str,
    case: Taken,
) -> None:
    at = running[case.model]
    adapter = load_adapter(made(case))
    assert adapter.targets is not None, field
    targeted = {site.path for site in at.engine.manifest.sites if adapter.targets(site.path)}
    assert targeted == adapter.ranks.keys()


@pytest.mark.parametrize(("field", "case"), of_kind(Refused))
def test_an_adapter_that_is_refused_is_refused_by_field_and_value_with_advice(
    running: dict[str, Running],
    made: Callable[[Refused], Path],
    field: str,
    case: Refused,
) -> None:
    at, adapter = running[case.model], made(case)
    named = case.tensor or f"{field} is {saved_config(adapter)[field]!r}"
    assert_refused(at, adapter, named, case.advice)


def test_patterns_whose_order_the_file_loses_are_refused_as_peft_refuses_them(
    llama: Running, tmp_path: Path
) -> None:
    ranks = {"q_proj": 5, "layers.1.self_attn.q_proj": 3}  # the first one decides
    adapter = save_adapter(llama.model, tmp_path / "a", rank_pattern=ranks)
    assert list(saved_config(adapter)["rank_pattern"]) == sorted(ranks)  # PEFT saves sorted keys
    with pytest.raises(RuntimeError, match="size mismatch"):
        PeftReference(llama.model, {"a": adapter})
    assert_refused(llama, adapter, "q_proj", "rank 5, but the config says rank 3")


def test_the_conversion_that_the_refusal_of_pissa_advises_gives_an_adapter_that_is_taken(
    llama: Running, tmp_path: Path
) -> None:
    with suppress_output():
        config = lora(r=4, target_modules=Q_AND_V, init_lora_weights="pissa")
        adapted: Any = get_peft_model(base_of(llama.model), config)
        adapted.peft_config["default"].init_lora_weights = True  # as PEFT's guide to PiSSA says
        adapted.save_pretrained(str(tmp_path / "initial"))
        adapted.peft_config["default"].init_lora_weights = "pissa"
        randomised(adapted).save_pretrained(
            str(tmp_path / "a"), path_initial_model_for_weight_conversion=str(tmp_path / "initial")
        )
        ids, mask = (torch.from_numpy(array) for array in prompt())
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        with torch.inference_mode():
            trained = adapted(input_ids=ids, attention_mask=mask, position_ids=positions).logits
    coverage, ours = loaded(llama, tmp_path / "a")
    assert_answers_as_peft(llama, tmp_path / "a", ours)
    assert difference(ours, trained.numpy()) < 1e-3  # the conversion itself rounds
    assert {site.rank for site in coverage.adapted} == {8}


# ---------------------------------------------------------------------- copies of base embeddings


def test_an_unused_copy_of_a_base_weight_is_listed_where_strict_is_false(
    llama: Running, tmp_path: Path
) -> None:
    adapter = save_adapter(llama.model, tmp_path / "a", target_modules=Q_AND_HEAD)
    coverage, ours = loaded(llama, adapter, strict=False)
    assert_answers_as_peft(llama, adapter, ours)
    assert coverage.unexpected_keys.keys() == {HEAD_COPY}
    assert SAVE_AGAIN in coverage.unexpected_keys[HEAD_COPY]
    assert [site.rank for site in coverage.sites if site.path == "lm_head"] == [8]


def test_copies_of_both_embeddings_are_refused_by_name_and_listed_where_strict_is_false(
    llama: Running, tmp_path: Path
) -> None:
    with suppress_output():
        plain = save_adapter(llama.model, tmp_path / "plain", target_modules=Q_AND_V)
        PeftModel.from_pretrained(base_of(llama.model), plain).save_pretrained(
            str(tmp_path / "a"), save_embedding_layers=True
        )
    copies = {f"{PREFIX}model.embed_tokens.weight", f"{PREFIX}lm_head.weight"}
    assert_refused(llama, tmp_path / "a", *copies, SAVE_AGAIN)
    coverage, ours = loaded(llama, tmp_path / "a", strict=False)
    assert_answers_as_peft(llama, tmp_path / "a", ours)
    assert coverage.unexpected_keys.keys() == copies
    assert [name for name, why in coverage.unexpected_keys.items() if SAVE_AGAIN not in why] == []


# ------------------------------------------------------------------------------------ other files


@pytest.mark.parametrize("count", [1, 3])
def test_an_adapter_in_shards_has_equal_weights(llama: Running, tmp_path: Path, count: int) -> None:
    whole = save_adapter(llama.model, tmp_path / "whole")
    shards = Path(shutil.copytree(whole, tmp_path / "shards"))
    tensors = load_file(shards / WEIGHTS)
    (shards / WEIGHTS).unlink()
    files = {
        name: f"adapter_model-{i % count + 1:05}-of-{count:05}.safetensors"
        for i, name in enumerate(tensors)
    }
    for file in set(files.values()):
        part = {name: tensor for name, tensor in tensors.items() if files[name] == file}
        save_file(part, shards / file, metadata={"format": "pt"})
    index = {"metadata": {"total_size": 1}, "weight_map": files}
    (shards / f"{WEIGHTS}.index.json").write_text(json.dumps(index), encoding="utf-8")
    assert load_adapter(shards).content_hash == load_adapter(whole).content_hash
    np.testing.assert_array_equal(loaded(llama, shards)[1], loaded(llama, whole)[1])


@pytest.mark.parametrize("options", [{}, {"target_modules": Q_AND_V}, {"r": 4, "use_rslora": True}])
def test_a_targeted_layer_that_the_file_lacks_is_warned_of_by_name(
    llama: Running, tmp_path: Path, options: dict[str, Any]
) -> None:
    lost = "model.layers.1.self_attn.v_proj"
    adapter = save_adapter(llama.model, tmp_path / "a", **options)
    tensors = load_file(adapter / WEIGHTS)
    kept = {name: tensor for name, tensor in tensors.items() if f".{lost}." not in name}
    assert len(tensors) - len(kept) == 2
    save_file(kept, adapter / WEIGHTS, metadata={"format": "pt"})
    coverage, ours = loaded(llama, adapter)
    (warning,) = coverage.warnings
    assert f"targets {lost}, but its file has no tensors" in warning
    assert_answers_as_peft(llama, adapter, ours)  # PEFT fills in a B of zeros


def test_a_pickled_adapter_is_refused_with_the_command_that_converts_it(
    llama: Running, tmp_path: Path
) -> None:
    plain = save_adapter(llama.model, tmp_path / "plain")
    with suppress_output():
        PeftModel.from_pretrained(base_of(llama.model), plain).save_pretrained(
            str(tmp_path / "a"), safe_serialization=False
        )
    assert (tmp_path / "a" / "adapter_model.bin").is_file()
    hint = f"trt-lora convert-adapter {tmp_path / 'a'} OUT --format peft"
    assert_refused(llama, tmp_path / "a", "other weight files: adapter_model.bin", hint)


def test_an_adapter_of_another_base_is_refused_by_its_shapes_before_a_value_is_read(
    llama: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wider = {**tiny.ARCHITECTURES["Llama"], "hidden_size": 64}
    monkeypatch.setitem(tiny.ARCHITECTURES, "Llama", wider)
    adapter = save_adapter(
        save_model("Llama", tmp_path / "model"), tmp_path / "a", target_modules=Q_AND_V
    )

    ends, original = [], AdapterFile.read

    def read(file: AdapterFile, start: int, size: int, buffer: ReadBuffer | None = None) -> Bytes:
        ends.extend([start + size] * (file.path.name == WEIGHTS))
        return original(file, start, size, buffer)

    monkeypatch.setattr(AdapterFile, "read", read)
    assert_refused(llama, adapter, "has shape [64, 8]", "k=32", "was trained on another base model")
    length = int.from_bytes((adapter / WEIGHTS).read_bytes()[:8], "little")
    assert ends == [8, 8 + length]  # the header's length, the header
