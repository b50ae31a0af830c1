"""Every field of PEFT's LoraConfig: adapters that set it, and whether they are taken or refused."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import (
    ArrowConfig,
    BdLoraConfig,
    EvaConfig,
    IA3Config,
    KasaConfig,
    LoraGAConfig,
    LoraRuntimeConfig,
    MontecloraConfig,
    PeftModel,
    PromptTuningConfig,
    VeloraConfig,
    create_arrow_model,
    get_peft_model,
    initialize_lora_eva_weights,
    preprocess_loraga,
)
from peft.tuners.lora.config import CordaConfig
from safetensors.torch import load_file, save_file
from support.adapters.peft_fields import (
    CONFIG,
    PREFIX,
    Q_AND_HEAD,
    Q_AND_V,
    WEIGHTS,
    Make,
    Refused,
    base_of,
    lora,
    peft,
)
from support.models import tiny_models as tiny
from support.models.tiny_models import save_adapter

from trt_lora.builder.suppress_output import suppress_output

RETRAIN = (
    "train the adapter without it, or merge it into the base model and build from that: "
    "trt-lora merge --model DIR --adapter {adapter} OUT"
)
EMBEDDING = "an embedding takes LoRA in an engine built with --lora-target-modules embed_tokens"
MEDUSA = "medusa_head.0.0.linear.weight"
CONVERT = "save_pretrained(..., path_initial_model_for_weight_conversion=...)"


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


@suppress_output()
def prompt_tuning(model: Path, directory: Path) -> Path:
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    get_peft_model(base_of(model), config).save_pretrained(str(directory))
    return directory


def with_medusa_heads(model: Path, directory: Path) -> Path:
    """A plain adapter, and a head of Medusa in its file."""
    save_adapter(model, directory, target_modules=Q_AND_V)
    head = {MEDUSA: torch.zeros(4, 4)}
    save_file(load_file(directory / WEIGHTS) | head, directory / WEIGHTS)
    return directory


@dataclass(frozen=True)
class Taken:
    """An adapter with which the engine answers as PEFT does."""

    make: Make
    model: str = "Llama"
    warning: str = ""  # of the coverage


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
        Taken(peft(target_modules=Q_AND_HEAD)),  # with a copy of the head
        Taken(peft(target_modules=["c_attn", "lm_head"]), "GPT2"),
        Refused(
            without_copies(target_modules=["q_proj", "embed_tokens"]),
            EMBEDDING,
            tensor=f"{PREFIX}model.embed_tokens.lora_embedding_A",
        ),
        Refused(
            peft(target_modules=["c_attn", "wte"]),
            EMBEDDING,
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
        Taken(peft(target_modules=[], target_parameters=["q_proj.weight"])),
        Taken(
            peft(
                target_modules=Q_AND_V,
                target_parameters=["up_proj.weight"],
                layers_to_transform=[1],
                rank_pattern={"up_proj": 3, "up_proj.weight": 2},
                alpha_pattern={"v_proj": 3, "model.layers.0.mlp.up_proj.weight": 5},
            )
        ),
        Refused(written(target_parameters=["mlp.experts.gate_up_proj_bias"]), RETRAIN),
        Refused(written(target_parameters="mlp.gate.weight"), RETRAIN),
    ],
    # ------------------------------------------------------------------ other weights
    "bias": [
        Refused(peft(bias="all"), RETRAIN, model="GPT2"),
        Refused(peft(bias="lora_only"), RETRAIN, model="GPT2"),
        Taken(peft(bias="lora_only")),  # Llama's linears have none
    ],
    "lora_bias": [
        Refused(peft(lora_bias=True), RETRAIN),
        Refused(peft(lora_bias=True), RETRAIN, model="GPT2"),
    ],
    "modules_to_save": [
        Refused(peft(modules_to_save=["lm_head"]), RETRAIN),
        Refused(peft(modules_to_save=["norm"]), RETRAIN),
        Refused(peft(modules_to_save=["embed_tokens", "lm_head"]), RETRAIN),
        Refused(written(modules_to_save=["score"]), RETRAIN),
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
            EMBEDDING,
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
    "peft_type": [
        Taken(peft()),
        Refused(ia3, "only 'LORA' is supported"),
        Refused(prompt_tuning, "only 'LORA' is supported"),
        Refused(with_medusa_heads, "it is not a LoRA factor", tensor=MEDUSA),
    ],
    "auto_mapping": [Taken(peft(task_type=None))],
    "peft_version": [Taken(peft()), Taken(written(peft_version="0.3.0"))],
    "base_model_name_or_path": [
        Taken(peft()),
        Taken(written(base_model_name_or_path="some/base"), warning="names 'some/base' as its"),
    ],
    "revision": [Taken(peft(revision="main"))],
    "inference_mode": [Taken(peft(inference_mode=True))],
}
