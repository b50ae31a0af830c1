"""Build the engines of a `Fleet`, and ask them without a server."""

from collections.abc import Mapping
from pathlib import Path

from clients.letters_engine import build_letters
from clients.served import PROMPT
from scaleout.fleet import TOKENS, Fleet

from trt_lora.runtime import SamplingParams, open_engine

FEW, MANY = 4, 16  # slots; MANY is also the number of adapters


def build_fleet(folder: Path, real: Path, adapters: Mapping[str, Path]) -> Fleet:
    """Build below `folder`; `real` is the engine of the demo's model, with its adapters."""
    for slots in (FEW, MANY):
        made = build_letters(folder / str(slots), slots=slots, adapters=MANY)
    with open_engine(folder / str(FEW) / "engine", "onnxruntime") as engine:
        for name, path in made.items():
            engine.adapters.register(name, path)
        sampling = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
        ids = engine.tokenizer.encode_text(PROMPT, special_tokens=True)
        names = [None, *made]
        answers = {
            name or "base": list(
                engine.generate([ids], adapter=name, sampling=sampling)[0].token_ids
            )
            for name in names
        }
    assert len(set(map(tuple, answers.values()))) == MANY + 1
    (root,) = {path.parent for path in made.values()}
    (real_root,) = {path.parent for path in adapters.values()}
    few, many = (str(folder / str(slots) / "engine") for slots in (FEW, MANY))
    return Fleet(few, many, str(root), answers, str(real), str(real_root), tuple(adapters))
