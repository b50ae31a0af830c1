"""Whether an architecture builds, and whether its engine answers as transformers and PEFT do."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from support.models.architectures import small_model
from support.models.tiny_models import VOCABULARY, save_adapter, tiny_config
from transformers import AutoModelForCausalLM

from trt_lora.builder import build_engine
from trt_lora.builder.suppress_output import suppress_output
from trt_lora.plugins.errors import ConfigError, ModelError
from trt_lora.runtime import Engine, LoRAManager, TensorMap, open_engine
from trt_lora.runtime.manifest import ONNX_CPU_FILE
from trt_lora.scripts.verification.logits import forced_logits
from trt_lora.scripts.verification.peft_reference import PeftReference

PROMPT, STEPS = 9, 8  # the window of small models, 4, is passed in the prompt and while decoding
TOLERANCE = 1e-4
# Where "all-linear" will not do: PEFT adapts poolers and towers that text does not use, and takes
# the MLP of every DeepSeek for experts.
_LATENT = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
# An engine reads tokens; what sees images or sound is not in it.
_TEXT_ALONE = {"exclude_modules": r".*(vision|image|audio|multi_modal).*"}
_ADAPTERS: dict[str, dict[str, Any]] = {
    "big_bird": {"exclude_modules": ["pooler"]},
    "deepseek_v2": {"target_modules": _LATENT},
    "deepseek_v3": {"target_modules": _LATENT},
    "fuyu": _TEXT_ALONE,
    "gemma3": _TEXT_ALONE,
    "got_ocr2": _TEXT_ALONE,
    "moss_transcribe_diarize": _TEXT_ALONE,
    "phi4_multimodal": _TEXT_ALONE,
}
Logits = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Verdict:
    """What became of one model type: not made, refused with a reason, or built."""

    architecture: str = ""
    not_made: str = ""  # why transformers makes no small model of this type
    refusal: str = ""
    base_error: float = 0.0  # largest difference of a logit, prompt and decoding
    adapter_error: float = 0.0
    effect: float = 0.0  # what the adapter changes: the largest difference to the base model
    sites: int = 0
    grouped: bool = False  # ONNX Runtime's own attention, which reads what each row holds

    @property
    def is_built(self) -> bool:
        """Whether an engine was made."""
        return not (self.not_made or self.refusal)

    @property
    def is_right(self) -> bool:
        """Whether the engine answers as transformers and PEFT do, and the adapter shows in it."""
        error = max(self.base_error, self.adapter_error)
        return self.is_built and error < TOLERANCE < 100 * TOLERANCE < self.effect


def batch() -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Ids and mask [2, PROMPT + STEPS]; the first row is left-padded by three."""
    ids = np.random.default_rng(0).integers(3, VOCABULARY, (2, PROMPT + STEPS))
    mask = np.ones_like(ids)
    mask[0, :3], ids[0, :3] = 0, 0
    return ids, mask


def engine_logits(engine: Engine, manager: LoRAManager, name: str) -> Logits:
    """Logits [2, PROMPT + STEPS, vocab] in the places of `batch`: a prompt each, then one token.

    Rows of a static cache have no padding: there the first is three tokens behind the second.
    """
    manager.switch_weights(name) if name else manager.reset_weights()
    tensor_map = TensorMap()
    manager.refresh_tensor_map(tensor_map)
    ids, mask = batch()
    rows = [row[real.astype(bool)].tolist() for row, real in zip(ids, mask, strict=True)]
    found = np.zeros((*ids.shape, engine.manifest.vocabulary_size), np.float32)
    found[mask.astype(bool)] = np.concatenate(forced_logits(engine, tensor_map, rows, STEPS))
    return found


def largest_error(ours: Logits, theirs: Logits) -> float:
    """The largest difference at positions that are not padding."""
    real = batch()[1].astype(bool)
    return float(np.abs(ours[real] - theirs[real]).max())


def check_architecture(model_type: str, folder: Path, layers: int = 2) -> Verdict:
    """Build a small model of this type, float32 and without a plan, and compare."""
    model = folder / "model"
    try:
        base = small_model(model_type, layers)
        with suppress_output():
            base.save_pretrained(model)
            AutoModelForCausalLM.from_pretrained(model)
    except Exception as error:  # whatever a model's own code raises
        return Verdict(not_made=f"{type(error).__name__}: {' '.join(str(error).split())}"[:200])
    try:
        manifest = build_engine(tiny_config(model, folder / "engine"))
    except (ConfigError, ModelError) as refusal:
        return Verdict(type(base).__name__, refusal=str(refusal))
    options = _ADAPTERS.get(model_type) or _beside_experts(base)
    adapter = save_adapter(model, folder / "a", r=4, lora_alpha=8, **options)
    reference = PeftReference(model, {"a": adapter})
    with open_engine(folder / "engine") as engine:
        manager = LoRAManager()
        manager.initialize_engine_bindings(engine)
        manager.load_weights("a", adapter)
        plain, adapted = (engine_logits(engine, manager, name) for name in ("", "a"))
    positions = largest_error(plain, reference.logits("", *batch()))
    return Verdict(
        type(base).__name__,
        base_error=max(positions, float(np.abs(plain[1:] - _logits_by_itself(base)).max())),
        adapter_error=largest_error(adapted, reference.logits("a", *batch())),
        effect=largest_error(plain, adapted),
        sites=len(manifest.sites),
        grouped=ONNX_CPU_FILE in manifest.files,
    )


def _beside_experts(model: torch.nn.Module) -> dict[str, Any]:
    """Of a mixture the attention alone: PEFT takes much else of one for experts."""
    modules = dict(model.named_modules())
    if not any(type(module).__name__.endswith("Experts") for module in modules.values()):
        return {}
    linears = [path for path, module in modules.items() if isinstance(module, torch.nn.Linear)]
    return {"target_modules": [path for path in linears if "attn" in path or "attention" in path]}


@torch.inference_mode()
def _logits_by_itself(model: torch.nn.Module) -> Logits:
    """The second row, which has no padding, from a model that makes mask and positions itself."""
    ids = torch.from_numpy(batch()[0][1:])
    return np.asarray(model.eval()(input_ids=ids).logits.float().numpy())
