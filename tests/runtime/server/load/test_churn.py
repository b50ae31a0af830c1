"""Ten seconds of churn; `support.load.churn` goes on for hours."""

from pathlib import Path

from support.load.churn import churn
from support.served_engines import Spoken

SECONDS = 10.0
KINDS = {"load 200", "unload 200", "pin 200", "unpin 200", "answer 200", "dropped", "checked"}


def test_whatever_comes_and_goes_no_answer_is_wrong_and_all_adds_up(
    spoken: Spoken, tmp_path: Path
) -> None:
    counts = churn(spoken.engine, tmp_path, SECONDS)
    assert counts.keys() >= KINDS
