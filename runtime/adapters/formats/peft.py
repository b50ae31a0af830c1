"""PEFT LoRA directories: adapter_model.safetensors with adapter_config.json, sharded or not."""

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from trt_lora.plugins.contract.modules import is_embedding, is_experts, is_router
from trt_lora.plugins.contract.sites import FACTORS, MAGNITUDE, TRAINED_BIAS, BindingNames, Factor
from trt_lora.plugins.errors import AdapterError
from trt_lora.plugins.messages import shown
from trt_lora.runtime.adapters.adapter import Adapter
from trt_lora.runtime.adapters.cast import Conversion
from trt_lora.runtime.adapters.formats.peft_config import (
    CONFIG_FILE,
    PeftConfig,
    merge_advice,
    read_peft_config,
)
from trt_lora.runtime.adapters.formats.peft_experts import (
    WRITTEN_AS,
    ExpertTensor,
    expert_tensor,
    expert_weights,
    stored_experts,
)
from trt_lora.runtime.adapters.formats.peft_targets import PARAMETERS, ends_of, targeting_of
from trt_lora.runtime.adapters.pack import pack_weights
from trt_lora.runtime.adapters.token_rows import TokenRows
from trt_lora.runtime.adapters.weight import Pair, Weight, zeros
from trt_lora.runtime.files.base_weights import BaseCopy
from trt_lora.runtime.files.json_file import read_json
from trt_lora.runtime.files.safetensors_file import StoredTensor, read_safetensors, save_safetensors
from trt_lora.runtime.files.untrusted_file import file_inside

WEIGHTS_FILE = "adapter_model.safetensors"
INDEX_FILE = f"{WEIGHTS_FILE}.index.json"
_MAX_SHARDS = 1000
_DIMENSIONS = (2, 4, 5)  # of a linear's factors, and of a convolution's in 2 and in 3 dimensions

# PEFT names a tensor by the module's path in the wrapped model.
_KEY = re.compile(
    r"base_model\.model\.(?P<path>.+)\.lora_(?P<embedding>embedding_)?(?P<factor>[AB])"
    r"(?(embedding)|\.weight)"
)
_VECTOR = re.compile(
    r"base_model\.model\.(?P<path>.+)\.(lora_magnitude_vector(\.weight)?|(?P<bias>lora_B\.bias))"
)
_BIAS = re.compile(r"base_model\.model\.(?P<path>(?!.*lora_).+?)(\.base_layer)?\.bias")
_ROWS_KEY = "token_adapter.trainable_tokens_delta"
_TOKENS = re.compile(rf"base_model\.model\.(?P<path>.+)\.{re.escape(_ROWS_KEY)}")
_COPY = re.compile(
    r"base_model\.model\.(?P<path>(?!.*lora_).+?)(\.base_layer)?\.(?P<name>weight|bias)"
)
_SAVED = re.compile(r"base_model\.model\.(?P<path>(?!.*lora_).+)\.weight")
_UNTRAINED = "if that was not trained, save the adapter again with save_embedding_layers=False"
_UNUSABLE = (
    ("lora_magnitude_vector", "it is DoRA's magnitude, which an engine cannot apply; {merge}"),
    ("lora_embedding_", "it adapts an embedding, which is no matrix product; {merge}"),
    (".base_layer.", f"it is a copy of a base weight; {_UNTRAINED}"),
    ("lm_head.weight", f"it is a copy of a base weight; {_UNTRAINED}"),
    ("embed", f"it is an embedding of the base model; {_UNTRAINED}"),
    ("lora_B.bias", "it is a bias beside B, which an engine cannot apply; {merge}"),
)  # fmt: skip
_TRAINING_ONLY = ".lora_velora_embed"  # what VeLoRA compresses activations with, going backward
_UNKNOWN = (
    "it is not a LoRA factor of a linear layer (base_model.model.<module>.lora_A.weight or "
    ".lora_B.weight)"
)


def adapter_from_peft(directory: Path) -> Adapter:
    """Read a PEFT LoRA directory; bindings are named `lora_A_<path>` and `lora_B_<path>`.

    PEFT stores A as [r, k] and B as [n, r], of an embedding as [r, V] and [n, r]; both are
    transposed, by their key. Vectors [n] are named `lora_magnitude_<path>`, of DoRA,
    `lora_bias_<path>` and `lora_trained_bias_<path>`.

    Raises:
        AdapterError: config or weights are missing, damaged, refused, or contradict each other.
    """
    config = read_peft_config(directory)
    stored, fingerprint = _stored(directory)
    names = [tensor.name for _, tensor in stored]
    config.check_work(names, directory / CONFIG_FILE)
    if not stored:
        raise AdapterError(f"{directory / WEIGHTS_FILE} holds no tensors; save the adapter again")
    targeting = targeting_of(config.targeting, names)
    weights: dict[str, Weight] = {}
    unusable_keys, copies, tokens, experts = {}, {}, {}, list[ExpertTensor]()
    for path, tensor in stored:
        match = _KEY.fullmatch(tensor.name)
        if tensor.name in targeting.ignored or tensor.name.endswith(_TRAINING_ONLY):
            continue
        if one := expert_tensor(tensor):
            experts.append(one)
        elif vector := _vector_of(tensor, config) or _trained_bias(tensor, config):
            if twice := vector.keys() & weights.keys():
                raise AdapterError(f"{path}: two of its tensors are {min(twice)}")
            weights |= vector
        elif rows := _TOKENS.fullmatch(tensor.name):
            tokens[rows["path"]] = _token_rows(rows["path"], tensor, config, directory)
        elif (saved := _SAVED.fullmatch(tensor.name)) and config.is_saved(saved["path"]):
            tokens[saved["path"]] = _saved_rows(tensor, config, directory)
        elif match is None or (match["embedding"] and not is_embedding(match["path"])):
            unusable_keys[tensor.name] = _why_unusable(tensor.name, directory)
            if copied := _COPY.fullmatch(tensor.name):
                place = f"{copied['path']}.{copied['name']}"
                copies[tensor.name] = BaseCopy(place, tensor.shape, tensor.blocks)
        else:
            site, is_a = match["path"], match["factor"] == "A"
            _check_rank(tensor, is_a, config.rank(site), f"{path}: tensor {tensor.name!r}")
            scale = 1.0 if is_a else config.scale(site)
            name = BindingNames.LORA.binding("A" if is_a else "B", site)
            stored_weight = Weight((tensor.name,), tensor.shape, tensor.dtype, tensor.read, scale)
            weights[name] = stored_weight.flattened().transposed()
    weights |= expert_weights(experts, config, str(directory))
    adapter = Adapter(
        str(directory), weights, config.base_model, fingerprint, unusable_keys, copies, *targeting
    )
    adapter = replace(adapter, vectors_from=config.vectors_from, tokens=tokens)
    _check_complete(adapter, config)
    _check_parameters(adapter, config)
    _check_rows(adapter, config)
    return adapter


def _vector_of(tensor: StoredTensor, config: PeftConfig) -> dict[str, Weight]:
    """A vector by its name, if the tensor is one that the config speaks of."""
    match = _VECTOR.fullmatch(tensor.name)
    kind: Factor = "bias" if match and match["bias"] else MAGNITUDE
    if match is None or not (config.lora_bias if kind == "bias" else config.use_dora):
        return {}
    scale = config.scale(match["path"]) if kind == "bias" else 1.0
    weight = Weight((tensor.name,), tensor.shape, tensor.dtype, tensor.read, scale)
    return {BindingNames.LORA.binding(kind, match["path"]): weight}


def _token_rows(path: str, tensor: StoredTensor, config: PeftConfig, directory: Path) -> TokenRows:
    """Rows of a file; PEFT calls them a delta, and they are whole."""
    ids, shape = config.tokens_of(path), list(tensor.shape)
    if not ids or shape[:1] != [len(ids)] or len(shape) != 2:
        raise AdapterError(
            f"{directory}: {tensor.name} has shape {shape}, and trainable_token_indices names "
            f"{len(ids)} tokens of {path}; save the adapter again"
        )
    weight = Weight((tensor.name,), tensor.shape, tensor.dtype, tensor.read)
    return TokenRows(ids, weight, config.tokens_from)


def _saved_rows(tensor: StoredTensor, config: PeftConfig, directory: Path) -> TokenRows:
    """All rows of a module that was saved whole."""
    if len(tensor.shape) != 2:
        raise AdapterError(
            f"{directory}: {tensor.name} has shape {list(tensor.shape)}, expected a matrix"
        )
    weight = Weight((tensor.name,), tensor.shape, tensor.dtype, tensor.read)
    return TokenRows((), weight, config.saved_from)


def _check_rows(adapter: Adapter, config: PeftConfig) -> None:
    """What the config says was trained is in the file."""
    few = [path for path, rows in adapter.tokens.items() if rows.ids]
    whole = adapter.tokens.keys() - {*few}
    absent = [name for name in config.saved if not any(path.endswith(name) for path in whole)]
    for field, names, what in (
        ("modules_to_save", absent, "weight of them"),
        ("trainable_token_indices", config.tokens if not few else None, "rows of tokens"),
    ):
        if names:
            raise AdapterError(
                f"{adapter.source}: {field} is {shown(names)}, and its file has no {what}; save "
                "the adapter again"
            )


def _trained_bias(tensor: StoredTensor, config: PeftConfig) -> dict[str, Weight]:
    """The whole bias of a module by its name, if the config says that biases were trained."""
    match = _BIAS.fullmatch(tensor.name) if config.trains_biases else None
    if match is None:
        return {}
    weight = Weight((tensor.name,), tensor.shape, tensor.dtype, tensor.read)
    return {BindingNames.LORA.binding(TRAINED_BIAS, match["path"]): weight}


def _check_complete(adapter: Adapter, config: PeftConfig) -> None:
    """Every module has the vector that the config says, and a vector its A and B."""
    fields = {"use_dora": config.use_dora, "lora_bias": config.lora_bias}
    for field in (name for name, is_set in fields.items() if is_set):
        kind: Factor = MAGNITUDE if field == "use_dora" else "bias"
        own = {path for factor, path in adapter.vectors if factor == kind}
        if missing := sorted(adapter.ranks.keys() ^ own):
            vector = "magnitude vector of DoRA" if kind == MAGNITUDE else "bias vector"
            lacks = "A and B" if missing[0] in own else vector
            raise AdapterError(
                f"{adapter.source}: {shown(missing[0])} has no {lacks}, and {field} is True in its "
                "config; save the adapter again"
            )


def _check_parameters(adapter: Adapter, config: PeftConfig) -> None:
    """Every target parameter has tensors."""
    names = (path if is_experts(path) else f"{path}.weight" for path in adapter.ranks)
    known = {end for name in names for end in ends_of(name)}
    if absent := sorted(config.parameters - known):
        raise AdapterError(
            f"{adapter.source}: target_parameters names {shown(absent[0])}, of which its file has "
            "no tensors; save the adapter again"
        )


def _why_unusable(name: str, directory: Path) -> str:
    reason = next((reason for part, reason in _UNUSABLE if part in name), _UNKNOWN)
    return reason.replace("{merge}", merge_advice(directory))


def _stored(directory: Path) -> tuple[list[tuple[Path, StoredTensor]], str | None]:
    """Every tensor with its file, and the base model's fingerprint."""
    stored: dict[str, tuple[Path, StoredTensor]] = {}
    (files, indexed), fingerprint = _files(directory), None
    for name in files:
        path = file_inside(directory, name)
        file = read_safetensors(path)
        fingerprint = file.fingerprint or fingerprint
        for tensor in file.tensors:
            if tensor.name in stored:
                raise AdapterError(f"{path}: tensor {tensor.name!r} is in another shard too")
            stored[tensor.name] = (path, tensor)
    if lost := sorted(indexed - stored.keys()):
        raise AdapterError(
            f"{directory / INDEX_FILE} names {len(lost)} tensors that its files do not hold, such "
            f"as {shown(lost[0])}; copy or save the adapter again"
        )
    return list(stored.values()), fingerprint


def _files(directory: Path) -> tuple[list[str], set[str]]:
    """The files of the weights, each once, and the tensors that their index names."""
    if (directory / WEIGHTS_FILE).is_file():
        return [WEIGHTS_FILE], set()
    if not (directory / INDEX_FILE).is_file():
        others = ", ".join(sorted(p.name for p in directory.glob("adapter_model*"))) or "none"
        raise AdapterError(
            f"{directory} has no {WEIGHTS_FILE} (other weight files: {others}); save the adapter "
            "again with safe_serialization=True, or convert a .bin file with: "
            f"trt-lora convert-adapter {directory} OUT --format peft"
        )
    index = file_inside(directory, INDEX_FILE)
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise AdapterError(f"{index}: weight_map must name a file for every tensor")
    files = list(dict.fromkeys(names.values()))
    if not 0 < len(files) <= _MAX_SHARDS:
        raise AdapterError(f"{index} names {len(files)} files; expected 1 to {_MAX_SHARDS}")
    return files, set(names)


def _check_rank(tensor: StoredTensor, is_a: bool, rank: int, label: str) -> None:
    """A [r, k] and B [n, r], as PEFT stores them, must have the rank that the config says."""
    shape = list(tensor.shape)
    if len(shape) not in _DIMENSIONS:
        raise AdapterError(f"{label} has shape {shape}, expected a matrix")
    found = shape[0 if is_a else 1]
    if found != rank:
        raise AdapterError(
            f"{label} has shape {shape}, rank {found}, but the config says rank {rank}; if several "
            "patterns match the module, write its whole path: PEFT saves patterns sorted"
        )


def save_peft(
    adapter: Adapter, directory: Path, dtype: str | None, fingerprint: str | None
) -> Conversion:
    """Write a PEFT directory; what came from PEFT goes back bit for bit.

    The scale goes into `lora_alpha`, and into patterns of whole paths where sites differ; `^` keeps
    a pattern from matching a longer path that ends so.

    Args:
        adapter: what to write.
        directory: exists and is empty.
        dtype: of the tensors; None keeps each as it is.
        fingerprint: of the base model, where it is known.

    Returns:
        What casts changed.

    Raises:
        AdapterError: a value leaves the range of `dtype`.
    """
    pairs = adapter.pairs(beside_vectors=True)
    vectors = _vectors_for_peft(adapter, pairs)
    experts = {path: pair for path, pair in pairs.items() if is_experts(path)}
    weights = {
        _key(path, factor): replace(weight, scale=1.0).transposed()
        for path, pair in pairs.items()
        if path not in experts
        for factor, weight in zip(FACTORS, pair, strict=True)
    } | {f"base_model.model.{name}": weight for name, weight in vectors.items()}
    weights |= stored_experts(experts)
    weights |= {
        f"base_model.model.{path}.{_ROWS_KEY if tokens.ids else 'weight'}": tokens.rows
        for path, tokens in adapter.tokens.items()
    }
    dtypes = {name: dtype or weight.dtype for name, weight in weights.items()}
    tensors, conversions = pack_weights(weights, dtypes, adapter.source)
    shapes = {n: w.in_file for n, w in weights.items() if w.in_file and w.is_convolution}
    tensors |= {name: replace(tensors[name], shape=shape) for name, shape in shapes.items()}
    save_safetensors(tensors, directory / WEIGHTS_FILE, fingerprint)
    # Routers and experts are no linears of torch's: PEFT finds parameters by their names.
    names = {path: f"{path}.weight" if is_router(path) else path for path in pairs}
    ranks = {names[path]: a.shape[-1] for path, (a, _) in pairs.items()}
    alphas = {names[path]: b.scale * a.shape[-1] for path, (a, b) in pairs.items()}
    parameters = {name for path, name in names.items() if name != path or path in experts}
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": adapter.task_type,
        "base_model_name_or_path": adapter.base_model,
        "inference_mode": True,
        "use_dora": any(kind == MAGNITUDE for kind, _ in adapter.vectors),
        "lora_bias": any(kind == "bias" for kind, _ in adapter.vectors),
        "bias": "all" if any(kind == TRAINED_BIAS for kind, _ in adapter.vectors) else "none",
        "target_modules": sorted({*names.values()} - parameters),
        PARAMETERS: sorted(parameters) or None,
        "r": (rank := _commonest(ranks)),
        "lora_alpha": (alpha := _commonest(alphas)),
        "rank_pattern": {f"^{path}": value for path, value in ranks.items() if value != rank},
        "alpha_pattern": {f"^{path}": value for path, value in alphas.items() if value != alpha},
    }
    rows = adapter.tokens.items()
    if few := {path: [*tokens.ids] for path, tokens in rows if tokens.ids}:
        config["trainable_token_indices"] = few
    if whole := [path for path, tokens in rows if not tokens.ids]:
        config["modules_to_save"] = whole
    if experts:
        config["peft_version"] = WRITTEN_AS
    (directory / CONFIG_FILE).write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    return Conversion.of_all(conversions.values())


def _vectors_for_peft(adapter: Adapter, pairs: Mapping[str, Pair]) -> dict[str, Weight]:
    """Magnitudes, whole biases, and biases beside B without its scale, which the config has."""
    found = dict[str, Weight]()
    if any(kind == "bias" for kind, _ in adapter.vectors):  # PEFT has one beside every B
        found = {
            f"{path}.lora_B.bias": zeros(b.shape[-1:], b.dtype) for path, (_, b) in pairs.items()
        }
    for (kind, path), weight in adapter.vectors.items():
        if kind == "scale":
            raise AdapterError(
                f"{adapter.source}: {weight.names[0]} is a scale, which PEFT computes of DoRA's "
                "magnitude; convert the original adapter"
            )
        if kind == "bias":
            scale = pairs[path][1].scale
            own = 1.0 if weight.scale == scale else weight.scale / scale
            found[f"{path}.lora_B.bias"] = replace(weight, scale=own)
        elif kind == MAGNITUDE:
            found[f"{path}.lora_magnitude_vector"] = weight
        else:
            found[f"{path}.base_layer.bias" if path in pairs else f"{path}.bias"] = weight
    return found


def _key(path: str, factor: Factor) -> str:
    end = f"embedding_{factor}" if is_embedding(path) else f"{factor}.weight"
    return f"base_model.model.{path}.lora_{end}"


def _commonest(values: Mapping[str, float]) -> float:
    return Counter(values.values()).most_common(1)[0][0]
