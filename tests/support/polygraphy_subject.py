"""A tiny engine with a tokenizer and two adapters, for tests of polygraphy on it."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Subject:
    """A tiny engine with a tokenizer, and two adapters."""

    engine: Path
    a: Path
    b: Path

    @property
    def model(self) -> Path:
        """Its ONNX file."""
        return self.engine / "model.onnx"

    @property
    def adapters(self) -> list[str]:
        """Both, as options."""
        return ["--lora-adapter", f"a={self.a}", "--lora-adapter", f"b={self.b}"]
