"""LogprobLists: log probabilities of tokens, as completions and chats list them."""

from collections.abc import Sequence
from itertools import accumulate, islice
from typing import Any

from trt_lora.runtime.generation.text.tokenizer import TextTokenizer
from trt_lora.runtime.generation.token import Logprobs
from trt_lora.runtime.server.answers.bodies import AnswerBody

Listed = tuple[int, Logprobs | None]  # a token, and what is known there


class LogprobLists:
    """Writes them for one body; tokens are text, or called "token_id:7"."""

    def __init__(self, tokenizer: TextTokenizer, body: AnswerBody, *, as_ids: bool) -> None:
        """Take what turns tokens into text, and how many are asked for."""
        self._tokenizer, self._as_ids = tokenizer, as_ids
        wanted = body.wanted_logprobs
        self.is_asked = wanted is not None
        self._top = None if body.logprob_token_ids or wanted == -1 else wanted  # None: all known

    def of_completion(self, listed: Sequence[Listed], offset: int) -> tuple[dict[str, Any], int]:
        """Return the lists, and where the text behind them begins.

        Args:
            listed: the tokens.
            offset: where their text begins.
        """
        lengths = [len(self._called(token)) for token, _ in listed]
        *offsets, end = accumulate(lengths, initial=offset)
        best = None if self._top is None else self._top + 1  # as OpenAI counts: the chosen one, too
        lists: dict[str, Any] = {
            "tokens": [self._called(token) for token, _ in listed],
            "token_logprobs": [known and known[token].logprob for token, known in listed],
            "top_logprobs": [
                None
                if known is None
                else {self._called(i): p.logprob for i, p in islice(known.items(), best)}
                for _, known in listed
            ],
            "text_offset": offsets,
        }
        return lists, end

    def of_chat(self, listed: Sequence[Listed]) -> dict[str, Any]:
        """Return the list: as in vLLM the chosen token is first among the best, and counts."""
        return {"content": [self._of_token(token, known) for token, known in listed if known]}

    def of_prompt(self, known: Logprobs) -> dict[str, Any]:
        """Return those of one token of a prompt."""
        return {
            str(i): {"logprob": p.logprob, "rank": p.rank, "decoded_token": self._text(i)}
            for i, p in known.items()
        }

    def _of_token(self, token: int, known: Logprobs) -> dict[str, Any]:
        best = [self._one(i, p.logprob) for i, p in islice(known.items(), self._top)]
        return self._one(token, known[token].logprob) | {"top_logprobs": best}

    def _one(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._text(token)
        return {"token": self._called(token), "logprob": logprob, "bytes": list(text.encode())}

    def _called(self, token: int) -> str:
        return f"token_id:{token}" if self._as_ids else self._text(token)

    def _text(self, token: int) -> str:
        return self._tokenizer.decode([token], skip_special_tokens=False)
