"""The peers by name: what each is, its class, its package."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PeerEntry:
    """A peer, and where its class is."""

    name: str
    title: str
    place: str  # MODULE:CLASS
    packages: tuple[str, ...]  # distributions whose versions are told; the first is the peer's own
    files: str = ""  # what `--files NAME=` takes, comma between two; empty: none


_METHODS = "trt_lora.scripts.bench.peers.methods."
_TRANSFORMERS = ("peft", "transformers", "torch")

OURS = "ours"
PEERS = (
    PeerEntry(OURS, "trt-lora", _METHODS + "ours:Ours", ("trt-lora", "onnxruntime", "numpy"),
              "an engine directory"),
    PeerEntry("peft", "transformers + PEFT", _METHODS + "transformers_models:WithPeft",
              _TRANSFORMERS),
    PeerEntry("merged", "transformers, adapter merged", _METHODS + "transformers_models:Merged",
              _TRANSFORMERS),
    PeerEntry("genai", "onnxruntime-genai", _METHODS + "genai:Genai",
              ("onnxruntime-genai", "onnxruntime"), "the folder that genai_adapter.py made"),
    PeerEntry("openvino", "openvino-genai, AdapterConfig",
              _METHODS + "openvino_genai:OpenvinoGenai", ("openvino-genai", "openvino"),
              "the folder that optimum-cli made"),
    PeerEntry("llama", "llama.cpp, --lora", _METHODS + "llama_cpp:LlamaCpp", ("xllamacpp",),
              "MODEL.gguf,ADAPTER.gguf"),
)  # fmt: skip
