"""Setup of a comparison: engine, reference and inputs, checked before anything runs."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trt_lora.plugins.errors import BackendError, ConfigError, LoRAError
from trt_lora.runtime.generation.sources import refuse_encoder
from trt_lora.runtime.manifest import (
    MANIFEST_FILE,
    ONNX_FILE,
    Manifest,
    read_manifest,
    refuse_graph,
)
from trt_lora.runtime.memory.cuda import cuda_obstacle
from trt_lora.scripts.comparison.files import save_inputs
from trt_lora.scripts.comparison.references import ComparisonCase, Reference
from trt_lora.scripts.verification.example_inputs import InputSpec, make_inputs
from trt_lora.scripts.verification.tolerances import TOLERANCES

AGAINST = ("merged", "native")

_TOKENS = 16  # of the random prompts


@dataclass(frozen=True)
class ComparisonSetup:
    """An engine and what it is compared with."""

    manifest: Manifest
    reference: Reference
    places: dict[str, Path]  # ENGINE, and OTHER

    @property
    def runs_plan(self) -> bool:
        """Whether TensorRT runs the engine, which takes no cache but a whole one."""
        return bool(self.reference.flavour)

    @property
    def tolerance(self) -> float:
        """The absolute tolerance that the coarser of the two dtypes needs."""
        return max(TOLERANCES[manifest.dtype].logit for manifest in self.manifests)

    @property
    def manifests(self) -> list[Manifest]:
        """The engine's, and that of the other engine if there is one."""
        return [m for m in (self.manifest, self.reference.other) if m is not None]


def check_setup(engine: Path, against: str, *, bisect: bool) -> ComparisonSetup:
    """Return what is compared.

    Raises:
        ManifestError: a directory is no engine, or incomplete.
        ConfigError: `against` is neither a known word nor another engine of the same base model,
            the engine has no LoRA inputs, or an option has no effect.
        BackendError: an engine cannot run here.
    """
    manifest = _runnable(engine)
    if not manifest.sites:
        raise ConfigError(
            f"{engine} has no LoRA inputs: there is nothing to compare; build an engine with "
            "--lora-target-modules"
        )
    places, reference = {"ENGINE": engine.resolve()}, _reference(against, manifest)
    if bisect and reference.flavour:
        raise ConfigError("--bisect needs tensors that a plan does not show; use --against merged")
    if reference.other:
        places["OTHER"] = Path(against).resolve()
        if places["OTHER"] == places["ENGINE"]:
            raise ConfigError(
                f"--against {against} is the engine itself, which always agrees; give another one, "
                f"or one of: {', '.join(AGAINST)}"
            )
    return ComparisonSetup(manifest, reference, places)


def _runnable(engine: Path) -> Manifest:
    manifest = read_manifest(engine)
    refuse_graph(manifest, "trt-lora compare", "trt-lora verify ENGINE --adapter PATH")
    refuse_encoder(manifest, "trt-lora compare")
    if not (engine / ONNX_FILE).is_file():
        raise ConfigError(f"{engine} has no {ONNX_FILE}, which polygraphy runs; copy it there")
    if manifest.dtype == "bfloat16":
        raise BackendError(
            f"{engine} is a bfloat16 engine, which ONNX Runtime cannot run on the CPU; "
            "compare one that is built with --dtype float32 or float16"
        )
    return manifest


def _reference(against: str, manifest: Manifest) -> Reference:
    if against == "merged":
        return Reference("merged", "merged weights", "merged")
    if against == "native":
        return _native(manifest)
    if (Path(against) / MANIFEST_FILE).is_file():
        return _other(Path(against), manifest)
    raise ConfigError(
        f"--against is {against!r}, which is neither an engine directory nor one of: "
        f"{', '.join(AGAINST)}; `trt-lora verify` compares with transformers and PEFT"
    )


def _native(manifest: Manifest) -> Reference:
    obstacle = "the engine has no plan" if manifest.flavour == "none" else cuda_obstacle()
    if not obstacle:
        return Reference("native", "LoRA as matrix products", flavour=manifest.flavour)
    return Reference(
        "native",
        "LoRA in float64",
        "float64",
        f"native: no plan runs here ({obstacle}); ONNX Runtime is compared with itself, the "
        "LoRA nodes in float64",
    )


def _other(engine: Path, manifest: Manifest) -> Reference:
    other = _runnable(engine)
    if other.base_model.fingerprint != manifest.base_model.fingerprint:
        raise ConfigError(
            f"{engine} is built from {other.base_model.name}, the engine from "
            f"{manifest.base_model.name}: their fingerprints differ, so their outputs do"
        )
    odd = {b.name for b in other.outputs} ^ {b.name for b in manifest.outputs}
    if odd:
        raise ConfigError(f"{engine} has other outputs: {', '.join(sorted(odd)[:5])}")
    same = (other.inputs, other.rank_multiple) == (manifest.inputs, manifest.rank_multiple)
    weights = [{n: r for n, r in m.files.items() if ONNX_FILE in n} for m in (other, manifest)]
    graph = "an equal file" if weights[0] == weights[1] else "the other engine"
    return Reference("other", graph, other=other, has_inputs=not same)


# ------------------------------------------------------------------------------------------- inputs


def write_inputs(
    setup: ComparisonSetup,
    cases: Sequence[ComparisonCase],
    adapters: Mapping[str, Path],
    folder: Path,
    prompt: str | None,
    seed: int,
) -> None:
    """Write the inputs of every case to the folder; leave nothing behind if that fails.

    Raises:
        AdapterError: an adapter cannot be read, or an engine refuses it.
        ConfigError: the prompt is too long, or the engine has no tokenizer.
    """
    shape = None if prompt is not None else _shape(setup)
    try:
        for case in cases:
            adapter = adapters.get(case.name)
            spec = InputSpec(adapter, prompt, shape, seed, whole_cache=setup.runs_plan)
            steps = make_inputs(setup.places["ENGINE"], setup.manifest, spec)
            save_inputs(steps, folder / case.inputs)
            if setup.reference.other and setup.reference.has_inputs:
                steps = make_inputs(setup.places["OTHER"], setup.reference.other, spec)
                save_inputs(steps, folder / setup.reference.inputs(case))
    except LoRAError:
        shutil.rmtree(folder / "inputs", ignore_errors=True)
        if folder.is_dir():
            folder.rmdir()
        raise


def _shape(setup: ComparisonSetup) -> tuple[int, int]:
    """Batch and length of random prompts that every engine takes."""
    manifests = setup.manifests
    length = min(min(m.max_input_len, m.max_seq_len - 1) for m in manifests)
    return min(2, *(m.max_batch_size for m in manifests)), min(_TOKENS, length)
