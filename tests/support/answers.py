"""What the Python interface answers, and the options with which a command answers the same."""

from pathlib import Path

from trt_lora.runtime import LoRAManager, SamplingParams, generate, open_engine

TOKENS = 6
OPTIONS = ["--max-tokens", str(TOKENS), "--backend", "onnxruntime"]


def answer(engine: Path, prompt: object, adapters: dict[str, Path], use: str = "") -> str:
    """Return the text with an adapter, or of the base model."""
    sampling = SamplingParams(max_tokens=TOKENS, temperature=0)
    with open_engine(engine, "onnxruntime") as opened:
        manager = LoRAManager()
        manager.initialize_engine_bindings(opened)
        for name, path in adapters.items():
            manager.load_weights(name, path)
        if use:
            manager.switch_weights(use)
        found = generate(opened, [prompt], manager=manager, sampling=sampling)  # type: ignore[list-item]
    return found[0].text
