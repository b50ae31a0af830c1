"""Forced and suppressed tokens of an encoder-decoder: which may come, and when."""

import numpy as np
import pytest

from trt_lora.runtime.generation.logits.token_rules import apply_rules, rules_change
from trt_lora.runtime.manifest import TokenRules

FIRST = TokenRules(start=0, forced_first=3, suppressed_first=(1, 2))
LAST = TokenRules(start=0, forced_last=3)


@pytest.mark.parametrize(
    ("rules", "prompt", "answer", "left", "allowed"),
    [
        (FIRST, 1, 0, 9, {3}),
        (FIRST, 1, 1, 8, {0, 3}),  # what is forced is not what an answer begins with
        (FIRST, 1, 2, 7, {0, 1, 2, 3}),
        (FIRST, 4, 0, 9, {0, 3}),  # nothing is forced behind a prompt of one's own
        (TokenRules(0, suppressed_first=(1, 2)), 1, 0, 9, {0, 3}),
        (TokenRules(0, suppressed=(0, 1)), 1, 5, 9, {2, 3}),
        (TokenRules(0, forced_first=1, suppressed=(0, 1)), 1, 0, 9, {1}),
        (LAST, 1, 4, 2, {0, 1, 2, 3}),
        (LAST, 1, 4, 1, {3}),
    ],
)
def test_a_token_may_come_where_no_rule_forbids_it(
    rules: TokenRules, prompt: int, answer: int, left: int, allowed: set[int]
) -> None:
    logits = np.arange(4, dtype=np.float32)
    changed = apply_rules(rules, logits, prompt, answer, left)
    assert set(np.flatnonzero(np.isfinite(changed)).tolist()) == allowed
    assert rules_change(rules, prompt, answer, left) == (len(allowed) < 4)
    assert logits.tolist() == [0, 1, 2, 3]
