"""The rules of an encoder-decoder's own tokens: forced and suppressed ones, as in transformers."""

import numpy as np

from trt_lora.runtime.engines.topk import Logits
from trt_lora.runtime.manifest import TokenRules


def rules_change(rules: TokenRules, prompt: int, answer: int, left: int) -> bool:
    """Whether a rule says anything of the next token.

    Args:
        rules: of the model.
        prompt: how many tokens the decoder began with.
        answer: how many it has given.
        left: how many more it may give.
    """
    forced = _forced(rules, prompt, answer, left) is not None
    return forced or bool(rules.suppressed) or _is_first(rules, prompt, answer)


def apply_rules(rules: TokenRules, logits: Logits, prompt: int, answer: int, left: int) -> Logits:
    """Return logits [vocab] that are -inf where a token may not be next; they are copied.

    A forced token is chosen even where another rule suppresses it.
    """
    forced = _forced(rules, prompt, answer, left)
    if forced is not None:
        result = np.full_like(logits, -np.inf)
        result[forced] = 0
        return result
    result = logits.copy()
    result[[*rules.suppressed]] = -np.inf
    if _is_first(rules, prompt, answer):
        result[[*rules.suppressed_first]] = -np.inf
    return result


def _forced(rules: TokenRules, prompt: int, answer: int, left: int) -> int | None:
    if rules.forced_last is not None and left == 1:
        return rules.forced_last
    return rules.forced_first if prompt + answer == 1 else None


def _is_first(rules: TokenRules, prompt: int, answer: int) -> bool:
    """Whether the next token is the first that nothing forces."""
    is_forced = prompt == 1 and rules.forced_first is not None
    return bool(rules.suppressed_first) and answer == int(is_forced)
