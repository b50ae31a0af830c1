"""Steps of a scheduler as the tokens that they give, and as the logits that these come from."""

from collections.abc import Mapping
from typing import Any

import pytest

from trt_lora.runtime.generation.decoding.rows import Rows
from trt_lora.runtime.generation.token import Token
from trt_lora.runtime.serving.scheduler import Scheduler


def step_of(scheduler: Scheduler) -> list[Token]:
    """Return the tokens of one step; raise the first error of a request."""
    answers = scheduler.step()
    for error in answers.failed.values():
        raise error
    return list(answers.tokens.values())


def keep_logits(
    rows: Rows, logits: Mapping[int, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copy what each run finds to the list of its sequence; the next step overwrites it."""

    def keeping(run: Any) -> Any:
        def kept(*args: Any, **options: Any) -> Any:
            outputs = run(*args, **options)
            for output in outputs:
                found = output.topk.logits(range(len(output.sequences)))
                for sequence, row in zip(output.sequences, found, strict=True):
                    logits[sequence.id].append(row.copy())
            return outputs

        return kept

    for name in ("decode", "prefill"):
        monkeypatch.setattr(rows, name, keeping(getattr(rows, name)))
