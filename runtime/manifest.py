"""Schema of `manifest.json`: sites, bindings, profiles, limits and file hashes of an engine."""

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from trt_lora.plugins.checked import UnknownFieldError, checked, typed
from trt_lora.plugins.contract.modules import is_embedding
from trt_lora.plugins.contract.sites import (
    FACTORS,
    RANK_MULTIPLE,
    VECTORS,
    BindingNames,
    Factor,
    Site,
)
from trt_lora.plugins.contract.slots import LORA_RANK, LORA_SLOT
from trt_lora.plugins.errors import ConfigError, LoRAError, ManifestError
from trt_lora.plugins.messages import did_you_mean, listed, shown
from trt_lora.plugins.short_repr import clipped, short_value
from trt_lora.runtime.files.base_weights import BaseWeight
from trt_lora.runtime.files.file_record import SIZE, FileRecord, fault
from trt_lora.runtime.files.json_file import read_json
from trt_lora.runtime.files.stored_matrix import StoredMatrix
from trt_lora.runtime.weight_format import WeightFormat

SCHEMA_VERSION = 2  # 1: engines built before 0.3, some with a KV cache that grows
_MAX_BYTES = 32 << 20  # of 20 thousand sites
MANIFEST_FILE = "manifest.json"
PIPELINE_FILE = "pipeline.json"  # in a folder of engines of one pipeline; see `pipelines/`
ONNX_FILE = "model.onnx"
ONNX_WEIGHTS_FILE = "model.onnx.data"
ONNX_CPU_FILE = "model.cpu.onnx"  # the same weights with operators of ONNX Runtime's own
PLAN_FILE = "engine.plan"
RUNTIME_CACHE_FILE = "runtime.cache"  # kernels that TensorRT-RTX compiled here, in no manifest


@dataclass(frozen=True)
class GraphFiles:
    """Names of the files of one of an engine's graphs."""

    onnx: str
    plan: str
    runtime_cache: str

    @property
    def weights(self) -> str:
        """The weights of the ONNX file."""
        return f"{self.onnx}.data"


STEP_FILES = GraphFiles(ONNX_FILE, PLAN_FILE, RUNTIME_CACHE_FILE)
ENCODER_FILES = GraphFiles("encoder.onnx", "encoder.plan", "encoder.cache")
BACKEND_FILES = {
    "tensorrt": (PLAN_FILE, ENCODER_FILES.plan),
    "onnxruntime": (
        *(ONNX_FILE, ONNX_WEIGHTS_FILE, ONNX_CPU_FILE),
        *(ENCODER_FILES.onnx, ENCODER_FILES.weights),
    ),
}

LORA_PLUGINS = ("native", "plugin", "aot")  # what LoRA nodes can be in a plan

SINGLE, SLOTTED = LORA_MODES = ("single", "slots")  # adapters of a batch: one, or one a row
_SLOT_INPUTS = frozenset({LORA_SLOT, LORA_RANK})

LANGUAGE_MODEL, GRAPH = KINDS = ("language_model", "graph")  # what an engine runs
# What only the manifest of a language model says.
_OF_LANGUAGE = ("max_batch_size", "max_input_len", "max_seq_len")
_OF_TOKENS = ("stop_token_ids", "pad_token_id")
_OF_GRAPHS = ("kind", "batch")

Dimension = int | str  # a str is a symbol, such as "batch"


@dataclass(frozen=True)
class Range:
    """The shapes an optimization profile allows for one input."""

    min: tuple[int, ...]
    opt: tuple[int, ...]
    max: tuple[int, ...]


@dataclass(frozen=True)
class Binding:
    """One input or output of the engine."""

    name: str
    dtype: str
    shape: tuple[Dimension, ...]
    in_place_of: str = ""  # the input whose memory an output is written to


@dataclass(frozen=True)
class BaseModel:
    """The model the engine was built from."""

    name: str
    architecture: str
    fingerprint: str  # SHA-256 over config.json and the headers of the weight files
    stop_token_ids: tuple[int, ...] = ()
    pad_token_id: int = 0
    head_dim: int = 0  # width of an attention head; 0 where the config does not say
    # Input embedding and output head by path, as far as the checkpoint names them so; engines of
    # earlier releases have none.
    embeddings: Mapping[str, BaseWeight] = field(default_factory=dict)
    tied_head: str = ""  # path of an output head that has the embedding's weight
    # Whether linears read x divided by factors of each channel: the checkpoint is AWQ's.
    scales_x: bool = False


@dataclass(frozen=True)
class TokenRules:
    """What the generation_config.json of an encoder-decoder says of an answer's tokens."""

    start: int  # what an answer begins behind, where nothing else is given
    forced_first: int | None = None  # the first token behind `start`, alone
    forced_last: int | None = None  # the last one that an answer has room for
    suppressed: tuple[int, ...] = ()  # that no answer has
    suppressed_first: tuple[int, ...] = ()  # that none begins with


@dataclass(frozen=True)
class EncoderPart:
    """The encoder of an engine, a graph of its own that writes the cross cache of a row."""

    inputs: tuple[Binding, ...]  # the first is the source [batch, s] or [batch, bins, frames]
    outputs: tuple[Binding, ...]
    profiles: Mapping[str, Mapping[str, Range]]
    max_source_len: int  # positions of a row of the cross cache
    rules: TokenRules

    @property
    def source(self) -> Binding:
        """The input that takes a source."""
        return self.inputs[0]

    @property
    def takes_features(self) -> bool:
        """Whether a source is an array of features [bins, frames], not token ids."""
        return len(self.source.shape) > 2


@dataclass(frozen=True)
class Manifest:
    """Everything the runtime must know of an engine; derived things are properties."""

    base_model: BaseModel
    binding_names: BindingNames
    sites: tuple[Site, ...]
    inputs: tuple[Binding, ...]
    outputs: tuple[Binding, ...]
    profiles: Mapping[str, Mapping[str, Range]]  # by profile, in the engine's order, and input
    # Of a language model; 0 of any other graph, whose profiles say what it takes.
    max_batch_size: int = field(default=0, kw_only=True)
    max_input_len: int = field(default=0, kw_only=True)  # tokens of a row in one step
    # Tokens of prompt and answer together; a prompt runs chunk by chunk.
    max_seq_len: int = field(default=0, kw_only=True)
    max_lora_rank: int
    opt_lora_rank: int
    dtype: str
    flavour: str  # "none" where no plan was built
    versions: Mapping[str, str]  # of the tools that made the engine
    files: Mapping[str, FileRecord]
    schema_version: int = SCHEMA_VERSION
    lora_plugin: str = "native"  # one of LORA_PLUGINS
    second_stream: bool = False  # whether the plan has the hidden output of that name
    compute_capability: tuple[str, ...] = ()  # of GPUs that the plan is for; empty: not stated
    max_loras: int = 0  # slots of the stacks of adapters; 0: one adapter at a time
    lora_vectors: bool = False  # whether every site takes a scale and a bias too
    saved_modules: tuple[str, ...] = ()  # paths of sites that an adapter may have saved whole
    # By path of the site, of an engine with vectors, where its file has floats; and of its bias.
    matrices: Mapping[str, StoredMatrix] = field(default_factory=dict)
    # By path, of the linears whose weights are codes.
    weights: Mapping[str, WeightFormat] = field(default_factory=dict)
    encoder: EncoderPart | None = None  # None: a decoder alone
    component: str = ""  # of a diffusion pipeline, such as "unet"; empty: not stated
    no_effect: tuple[str, ...] = ()  # paths of linears that no output depends on
    batch: str = "batch"  # name of the dimension that counts rows; empty: a graph has none
    kind: str = LANGUAGE_MODEL  # one of KINDS

    def __repr__(self) -> str:
        """Return what it is the manifest of."""
        ranks = f"rank 1 to {self.max_lora_rank}"
        slots = f", {self.max_loras} slots" if self.max_loras else ""
        kind = f"{short_value(self.dtype)}, {short_value(self.flavour)}"
        base = short_value(self.base_model.name)
        return clipped(f"<Manifest of {base}: {len(self.sites)} sites, {ranks}{slots}, {kind}>")

    @property
    def of_encoder(self) -> "Manifest":
        """The manifest of the encoder's graph by itself, of an engine that has one."""
        part = self.encoder
        assert part is not None  # callers have looked
        return dataclasses.replace(
            self,
            inputs=part.inputs,
            outputs=part.outputs,
            profiles=part.profiles,
            second_stream=False,  # the step's plan alone has it
            encoder=None,
        )

    @cached_property
    def lora_bindings(self) -> dict[str, tuple[Site, Factor]]:
        """Site and factor of every LoRA input, by its name."""
        return {
            name: (site, factor)
            for site in self.sites
            for factor in (*FACTORS, *(VECTORS if self._has_vectors(site) else ()))
            for name in (self.binding_names.binding(factor, site.path),)
        }

    def _has_vectors(self, site: Site) -> bool:
        """Experts and whole modules have none: PEFT trains none of the former."""
        is_whole = is_embedding(site.path) or site.path in self.saved_modules
        return self.lora_vectors and not site.experts and not is_whole

    @checked
    def most_rank(self, site: Site) -> int:
        """Return the largest rank of an adapter at a site: of a saved module's difference, too."""
        return max(self.max_lora_rank, site.width if site.path in self.saved_modules else 0)

    @property
    def lora_mode(self) -> str:
        """One of LORA_MODES."""
        return SLOTTED if self.max_loras else SINGLE

    @property
    def lora_inputs(self) -> frozenset[str]:
        """The names of all inputs that an adapter decides, or which row takes it."""
        return frozenset(self.lora_bindings) | (_SLOT_INPUTS if self.max_loras else frozenset())

    @property
    def rank_multiple(self) -> int:
        """Multiple that adapters' ranks are zero-padded to when they are loaded for the plan.

        The plugin's kernels then load 16 bytes at a time; nothing is padded on a run.
        """
        return 1 if self.lora_plugin == "native" else RANK_MULTIPLE

    @property
    def layers(self) -> int:
        """How many layers have sites; 1 where sites are of no layer."""
        return len({site.layer for site in self.sites if site.layer is not None}) or 1

    @property
    def vocabulary_size(self) -> int:
        """The width of the logits, which are the first output."""
        return int(self.outputs[0].shape[-1])

    def to_json(self) -> str:
        """Return the manifest as the text of `manifest.json`; each kind has fields of its own."""
        fields = dataclasses.asdict(self)
        if self.kind == GRAPH:
            fields["base_model"] = _without(fields["base_model"], _OF_TOKENS)
        fields = _without(fields, _OF_LANGUAGE if self.kind == GRAPH else _OF_GRAPHS)
        return json.dumps(fields, indent=1) + "\n"


def _without(fields: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in names}


def refuse_graph(manifest: Manifest, what: str, instead: str = "Engine.run(inputs)") -> None:
    """Refuse an engine that reads no tokens, where a language model is needed.

    Raises:
        ConfigError: the engine was built from an ONNX file.
    """
    if manifest.kind == GRAPH:
        raise ConfigError(
            f"{what} is of language models, and this engine was built from the graph "
            f"{manifest.base_model.name}; call {instead}"
        )


@checked
def read_manifest(directory: str | Path) -> Manifest:
    """Read the manifest of an engine directory and check that its files are there, by size.

    The plan, or the ONNX file with its weights, may have been left out of a copy: what is there
    runs on the other backend.

    Raises:
        ManifestError: the directory is no engine, is incomplete, or has another schema.
    """
    directory = Path(directory)
    manifest = load_manifest(directory)
    absent = left_out(directory, manifest.files)
    for name, record in manifest.files.items():
        if name not in absent and (found := fault(directory / name, record, SIZE)):
            raise ManifestError(
                f"{directory / name} {found}: the engine is incomplete; copy or build it again"
            )
    return manifest


def load_manifest(directory: Path) -> Manifest:
    """Read the manifest of an engine directory, whatever has become of the files beside it.

    Raises:
        ManifestError: there is none, it cannot be read, or has another schema.
    """
    path = directory / MANIFEST_FILE
    try:
        found = path.is_file()
    except OSError as error:  # a name that is too long, a directory that may not be entered
        raise ManifestError(f"{directory} cannot be opened: {error.strerror}") from error
    if not found:
        raise ManifestError(_no_engine(directory))
    try:
        return _parse(read_json(path, _MAX_BYTES))
    except LoRAError as error:  # it names the file
        raise ManifestError(f"{error}; build the engine again") from error
    except UnknownFieldError as error:
        raise ManifestError(f"{path} cannot be read: {error}; install a newer trt-lora") from error
    except ValueError as error:
        raise ManifestError(
            f"{path} cannot be read: {error!s:.500}; build the engine again"
        ) from error


def _no_engine(directory: Path) -> str:
    """Why a directory is none, and what to do."""
    build = "with: build-engine --model DIR --output DIR"
    if not directory.exists():
        names = [engine.name for engine in _engines_in(directory.parent)]
        return (
            f"{directory} does not exist. Build an engine {build}"
            f"{did_you_mean(directory.name, names)}"
        )
    what = f"{directory} has no {MANIFEST_FILE}: it is not an engine directory"
    inside = _engines_in(directory)
    if inside and (directory / PIPELINE_FILE).is_file():
        parts = ", ".join(path.name for path in inside)
        return (
            f"{directory} is a pipeline with engines of {parts}: pass one of them, such as "
            f"{inside[0]}, or open all of them with open_pipeline"
        )
    if inside:
        return f"{what}; pass one that lies in it: {listed([*map(str, inside)])}"
    return f"{what}. Build one {build}"


def _engines_in(folder: Path) -> list[Path]:
    try:
        return sorted(path.parent for path in folder.glob(f"*/{MANIFEST_FILE}"))
    except OSError:  # a folder that may not be read
        return []


def left_out(directory: Path, files: Iterable[str]) -> set[str]:
    """Return the files of a backend, if none of them is there and the other has files too."""
    kinds = [{name for name in files if name in own} for own in BACKEND_FILES.values()]
    absent = [kind for kind in kinds if not any((directory / name).exists() for name in kind)]
    return absent[0] if len(absent) == 1 else set()


def _parse(data: dict[str, Any]) -> Manifest:
    if "schema_version" not in data:
        raise ValueError("schema_version is missing")
    if (version := data["schema_version"]) != SCHEMA_VERSION:
        is_newer = isinstance(version, int) and version > SCHEMA_VERSION
        kind = UnknownFieldError if is_newer else ValueError
        raise kind(f"schema version is {shown(version)}, this release reads {SCHEMA_VERSION}")
    manifest: Manifest = typed(Manifest, data, "manifest")
    for name in manifest.files:
        if Path(name).name != name or name in ("", ".", ".."):
            raise ValueError(f"file name {shown(name)} leads out of the engine directory")
    if manifest.kind not in KINDS:
        raise ValueError(f"kind is {shown(manifest.kind)}, expected one of {', '.join(KINDS)}")
    _check_fields_of_kind(manifest, data)
    if manifest.lora_plugin not in LORA_PLUGINS:
        choices = ", ".join(LORA_PLUGINS)
        raise ValueError(f"lora_plugin is {shown(manifest.lora_plugin)}, expected one of {choices}")
    sizes = (size for site in manifest.sites for size in (site.k, site.n))
    if (least := min([manifest.max_lora_rank, *sizes])) < 1:
        raise ValueError(f"a size of a site or the largest rank is {least}")
    if (least := min([0, *(site.experts for site in manifest.sites)])) < 0:
        raise ValueError(f"a site has {least} experts")
    if manifest.max_loras < 0:
        raise ValueError(f"max_loras is {manifest.max_loras}, expected 0 or more")
    return manifest


def _check_fields_of_kind(manifest: Manifest, data: Mapping[str, Any]) -> None:
    """Refuse a manifest without a field that has a default for the other kind's sake."""
    if manifest.kind == LANGUAGE_MODEL:
        missing = [name for name in _OF_LANGUAGE if name not in data]
        missing += [name for name in _OF_TOKENS if name not in data["base_model"]]
        if missing:
            raise ValueError(f"{missing[0]} is missing")
