"""What the Python interface answers, and the options with which a command answers the same."""

from pathlib import Path

from trt_lora.runtime import SamplingParams, open_engine

TOKENS = 6
OPTIONS = ["--max-tokens", str(TOKENS), "--backend", "onnxruntime"]


def answer(engine: Path, prompt: object, adapters: dict[str, Path], use: str = "") -> str:
    """Return the text with an adapter, or of the base model."""
    sampling = SamplingParams(max_tokens=TOKENS, temperature=0)
    with open_engine(engine, "onnxruntime") as opened:
        for name, path in adapters.items():
            opened.adapters.load(name, path)
        return opened.generate(prompt, adapter=use or None, sampling=sampling).text  # type: ignore[call-overload, no-any-return]
