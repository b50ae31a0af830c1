"""Bugs that such kernels have, planted in candidates.cu, and each of its barriers taken out.

The emulation, or a sort in float64, shows every one.
"""

import re
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from kernels.candidate_call import CandidateCall, random_call
from kernels.candidate_emulator import build_candidates, candidates_text, run_candidates
from kernels.emulator import EmulationError, compiler

from trt_lora.plugins.kernels.candidates import plan_candidates

pytestmark = pytest.mark.skipif(compiler() is None, reason="the emulation needs g++")

TWO_PARTS, MANY_PARTS = 4000, 16000  # tokens; the lists of eight parts are merged in two rounds


@dataclass(frozen=True)
class Bug:
    """A change of the text, and what shows it."""

    name: str
    old: str
    new: str
    shows: str
    vocabulary: int = TWO_PARTS


BUGS = (
    Bug("of equals the higher id", "~unsigned(", "unsigned(", "tokens"),
    Bug("-0 below 0", "logit == 0.0f ? 0.0f : logit", "logit", "tokens"),
    Bug("negative logits rise backwards", "bits >> 31 ? ~bits", "false ? ~bits", "tokens"),
    Bug("no end of the row", "token < rows.vocabulary;", "true;", "a read outside the buffers"),
    Bug("a part left out", "list < rows.parts", "list < rows.parts - 1", "tokens"),
    Bug("a list skipped", "part += LISTS - 1", "part += LISTS", "tokens", MANY_PARTS),
    Bug("two falling lists merged", "KEPT - 1 - i % KEPT", "i % KEPT", "tokens"),
    Bug("half of the lists left out", "int half = PART / 2", "int half = PART / 4", "tokens"),
    Bug("lists half sorted", "run <= KEPT", "run < KEPT", "tokens"),
    Bug("no half sort behind a merge", "distance = KEPT / 2", "distance = KEPT / 4", "tokens"),
    Bug("rows share a temperature", "rows.temperatures + row", "rows.temperatures", "totals"),
    Bug("a sum from zero", "- greatest) /", "- 0.0f) /", "totals"),
    Bug("parts' sums not brought to one", "* term(own, greatest, temperature)", "", "totals"),
    Bug("half of the threads' sums", "int half = THREADS / 2", "int half = THREADS / 4", "totals"),
    Bug("a float32 exponential", "exp((static_cast<double>", "expf((static_cast<float>", "totals"),
    Bug("greedy divides by zero", "temperature == 0.0 ? 1.0 : ", "", "totals"),
    Bug("infinity taken for a number", "if (!is_finite(logit))", "if (logit != logit)", "flags"),
    Bug("a row beside its own", "const int row = blockIdx.x;", "const int row = 0;", "values"),
    Bug("the first row's token fed", "rows.greedy + row", "rows.greedy", "greedy"),
    Bug("no token fed", "< 0 ? 0 : token_of(keys[0])", "< 0 ? 0 : -1", "greedy"),
    Bug("less memory", "keys + PART)", "keys + PART + 8)", "an address outside shared memory"),
)


def hard_call(vocabulary: int) -> CandidateCall:
    """Ties, zeros of both signs, infinity; greedy among the temperatures."""
    call = random_call(4, vocabulary, "float32", step=0.5)
    call.logits[1] = np.where(np.arange(vocabulary) % 3, -0.0, 0.0)
    call.logits[2, 5] = -np.inf
    return CandidateCall(call.logits, np.array([0.3, 5.0, 1.0, 0.0]), call.dtype)


def outcome(text: str, vocabulary: int) -> str:
    """What the emulation says of a changed text, or which of its results are wrong."""
    call = hard_call(vocabulary)
    library = build_candidates(text, [launch.kernel for launch in plan_candidates(call.shape)])
    try:
        found = run_candidates(call, library=library)
    except EmulationError as error:
        return str(error)
    return ", ".join(call.mistakes(found))


def test_nothing_is_found_in_the_text_as_it_is() -> None:
    assert outcome(candidates_text(), TWO_PARTS) == outcome(candidates_text(), MANY_PARTS) == ""


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_is_found(bug: Bug) -> None:
    text = candidates_text()
    assert bug.old in text
    assert bug.shows in outcome(text.replace(bug.old, bug.new), bug.vocabulary)


_BARRIER = "__syncthreads();"
_FUNCTION = re.compile(r"^(?:template .*>)?\s*DEVICE \S+ (\w+)\(", re.MULTILINE)


def barriers() -> list[tuple[str, int]]:
    """The function and place of each barrier."""
    text = candidates_text()
    places = [match.start() for match in re.finditer(re.escape(_BARRIER), text)]
    return [(_FUNCTION.findall(text[:place])[-1], place) for place in places]


@pytest.mark.parametrize(("function", "place"), barriers())
def test_a_race_is_found_without_any_one_barrier(function: str, place: int) -> None:
    text = candidates_text()
    without = text[:place] + text[place + len(_BARRIER) :]
    assert "a race of" in outcome(without, TWO_PARTS)


def test_every_barrier_is_taken_out_once() -> None:
    assert Counter(function for function, _ in barriers()) == {
        "compare": 1,
        "keep_best": 1,
        "add_up": 2,
        "best_of_parts": 1,
        "load_lists": 1,
    }
