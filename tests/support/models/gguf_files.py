"""GGUF files: a model as llama.cpp's converter writes it, by its library, and files with faults."""

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file
from support.models.checkpoints import WEIGHTS_FILE

Type = gguf.GGMLQuantizationType
Types = Callable[[str], Any]  # the type of a tensor, by its name in the file

GGUF_FILE = "model.gguf"
_MODULES = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
_OF_A_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "o_proj": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    **{f"{part}_proj": f"attn_{part}" for part in "qkv"},
    **{f"{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
}


def all_of(kind: Any) -> Types:
    """Every matrix in one type; norms and biases in float32."""
    return lambda name: kind if _is_matrix(name) else Type.F32


def _is_matrix(name: str) -> bool:
    return name.endswith(".weight") and "norm" not in name


def own_name(name: str) -> str:
    """Return the name in a GGUF file of a weight of transformers."""
    path, end = name.removeprefix("model.").rsplit(".", 1)
    if layer := re.match(r"layers\.(\d+)\.", path):
        return f"blk.{layer[1]}.{_OF_A_LAYER[path.rpartition('.')[2]]}.{end}"
    return f"{_MODULES[path]}.{end}"


def metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the converter writes of a config.json."""
    architecture = {"mistral": "llama"}.get(config["model_type"], config["model_type"])
    sizes = {
        "block_count": config["num_hidden_layers"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": config["rope_parameters"]["rope_theta"],
    }
    named = {f"{architecture}.{key}": value for key, value in sizes.items()}
    return {"general.architecture": architecture, **named}


def permuted(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Move the rows of q or k as llama.cpp's rotary embedding takes them, in pairs."""
    n = len(weight)
    halves = weight.reshape(heads, 2, n // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def tensors_of(model: Path) -> dict[str, npt.NDArray[Any]]:
    """Return the weights of a saved model under a GGUF file's names, and in its order of rows."""
    config = json.loads((model / "config.json").read_text())
    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
    found = dict[str, npt.NDArray[Any]]()
    for name, weight in load_file(model / WEIGHTS_FILE).items():
        part = re.search(r"\.([qk])_proj\.", name)
        moved = part and config["model_type"] in ("llama", "mistral")
        own = permuted(weight, heads[part[1]]) if part and moved else weight
        found[own_name(name)] = own.float().numpy()
    return found


def in_blocks(values: npt.NDArray[Any], kind: Any) -> npt.NDArray[Any]:
    """Return values as the library has them in a type; of Q6_K, which it only reads, any blocks."""
    if kind != Type.Q6_K:
        blocks: npt.NDArray[Any] = gguf.quantize(values, kind)
        return blocks
    n, k = values.shape
    generator = np.random.default_rng(k + n)
    rows = generator.integers(0, 256, (n, k // 256, 210), np.uint8)
    factor = np.float16(np.abs(values).max() / 32 / 127)
    rows[:, :, 208:] = np.frombuffer(factor.tobytes(), np.uint8)
    return rows.reshape(n, -1)


def write_gguf(
    path: Path,
    stated: Mapping[str, Any],
    tensors: Mapping[str, npt.NDArray[Any]],
    types: Types,
) -> None:
    """Write a file by the library."""
    writer = gguf.GGUFWriter(path, stated["general.architecture"])
    for key, value in stated.items():
        if isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
    for name, values in tensors.items():
        kind = types(name)
        writer.add_tensor(name, in_blocks(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def in_gguf(model: Path, directory: Path, types: Types, **stated: Any) -> Path:
    """Copy a saved model; its weights lie in a GGUF file."""
    shutil.copytree(model, directory, ignore=shutil.ignore_patterns(WEIGHTS_FILE))
    config = json.loads((model / "config.json").read_text())
    write_gguf(directory / GGUF_FILE, metadata(config) | stated, tensors_of(model), types)
    return directory


def as_safetensors(directory: Path, target: Path) -> Path:
    """Copy a model in a GGUF file; its weights are what the library makes of them, as they were."""
    shutil.copytree(directory, target, ignore=shutil.ignore_patterns("*.gguf"))
    save_file(library_weights(directory), target / WEIGHTS_FILE, {"format": "pt"})
    return target


def library_weights(directory: Path) -> dict[str, torch.Tensor]:
    """Return the floats of the library by transformers' names, with q's and k's rows put back."""
    config = json.loads((directory / "config.json").read_text())
    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
    reader = gguf.GGUFReader(directory / GGUF_FILE)
    names = {own_name(name): name for name in _names(config)}
    found = dict[str, torch.Tensor]()
    for tensor in reader.tensors:
        if tensor.name not in names:
            continue
        values = np.array(gguf.dequantize(tensor.data, tensor.tensor_type), np.float32)
        weight = torch.from_numpy(values.reshape(tensor.shape.tolist()[::-1]))
        part = re.search(r"attn_([qk])\.", tensor.name)
        if part and config["model_type"] in ("llama", "mistral"):
            places = permuted(torch.arange(len(weight)), heads[part[1]])
            weight = weight[torch.argsort(places)]
        found[names[tensor.name]] = weight
    return found


def _names(config: Mapping[str, Any]) -> list[str]:
    """The names of all weights that a model of these types may have."""
    ends = [f"self_attn.{part}_proj.{end}" for part in "qkvo" for end in ("weight", "bias")]
    ends += [f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")]
    ends += ["input_layernorm.weight", "post_attention_layernorm.weight"]
    ends += ["self_attn.q_norm.weight", "self_attn.k_norm.weight"]
    layers = range(config["num_hidden_layers"])
    own = [f"model.layers.{layer}.{end}" for layer in layers for end in ends]
    return [*own, "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
