"""Makes `files/`: graphs of tiny models by optimum and by ONNX Runtime GenAI.

Each is made in an environment of its own, for their transformers differ:

    pip install optimum==2.3.0 optimum-onnx==0.1.0 transformers==4.57.3 torch onnx onnxruntime
    python tests/builder/graphs/make_files.py optimum
    pip install onnxruntime-genai==0.18.0 transformers==5.23 torch onnx onnxruntime
    python tests/builder/graphs/make_files.py genai
"""

import importlib
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import onnx
import torch

FILES = Path(__file__).parent / "files"
VIT = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
WHISPER = {
    "d_model": 8,
    "encoder_ffn_dim": 8,
    "decoder_ffn_dim": 8,
    "num_mel_bins": 8,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "max_target_positions": 32,
    "vocab_size": 40,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "vocab_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 16,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def optimum(work: Path) -> None:
    """A ViT in one file; of Whisper the encoder, and the decoder that is one `If`."""
    transformers: Any = importlib.import_module("transformers")
    export = importlib.import_module("optimum.exporters.onnx").onnx_export_from_model
    vit = transformers.ViTConfig(**VIT, intermediate_size=32, image_size=16, patch_size=8)
    whisper = transformers.WhisperConfig(**WHISPER)
    torch.manual_seed(0)
    for name, model, task, kept in (
        ("vit", transformers.ViTForImageClassification(vit), "image-classification", ["model"]),
        (
            "whisper",
            transformers.WhisperForConditionalGeneration(whisper),
            "automatic-speech-recognition-with-past",
            ["encoder_model", "decoder_model_merged"],
        ),
    ):
        export(model.eval(), work / name, task=task, do_validation=False)
        for file in kept:
            save(work / name / f"{file}.onnx", f"optimum_{name}_{file}")


def genai(work: Path) -> None:
    """A Llama in float32 and float16, and in codes of 4 bits."""
    transformers: Any = importlib.import_module("transformers")
    tokenizers: Any = importlib.import_module("tokenizers")
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)).save_pretrained(work / "model")
    words = tokenizers.models.WordLevel({f"t{n}": n for n in range(32)}, unk_token="t0")
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(words), bos_token="t0", eos_token="t1"
    ).save_pretrained(work / "model")
    for precision, device in (("int4", "cpu"), ("fp32", "cpu"), ("fp16", "cuda")):
        folders = {"-i": "model", "-o": precision, "-c": "cache"}
        options = [str(word) for flag, name in folders.items() for word in (flag, work / name)]
        command = [sys.executable, "-m", "onnxruntime_genai.models.builder", *options]
        subprocess.run([*command, "-p", precision, "-e", device], check=True)
        save(work / precision / "model.onnx", f"genai_{precision}")


def save(source: Path, name: str) -> None:
    """Write a graph with its weights in one file, without what its shapes repeat."""
    model = onnx.load(source)
    del model.graph.value_info[:]
    onnx.save(model, FILES / f"{name}.onnx")


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        {"optimum": optimum, "genai": genai}[sys.argv[1]](Path(folder))
