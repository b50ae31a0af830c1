"""Every architecture of transformers builds and matches, or is refused in our words."""

import json
from pathlib import Path

import pytest
import transformers
from support.models.architecture_check import Verdict, check_architecture
from support.models.architectures import MODEL_TYPES
from support.models.quick_build import shared_traces
from support.models.supported_models import PAGE_FILE, RESULTS_FILE, page, read_results, reason_of

# One of each kind: ALiBi, learned positions, positions from another start, attention of its own,
# parallel blocks, fused and latent projections, keys wider than values, windows, caches shared
# between layers, norms in odd places. test_tiny_models.py has eight more, of two layers.
SAMPLE = {
    **dict.fromkeys(("bloom", "falcon", "gptj", "opt", "roberta", "gpt_neox", "codegen"), 1),
    **dict.fromkeys(("deepseek_v2", "minicpm3", "glm4"), 1),
    **dict.fromkeys(("cohere2", "gemma3_text", "gemma4_text"), 2),  # layers differ
}


def verdicts() -> dict[str, Verdict]:
    """What `make architectures` found."""
    return {name: Verdict(**fields) for name, fields in read_results().items()}


@pytest.mark.slow
@pytest.mark.parametrize(("model_type", "layers"), SAMPLE.items())
def test_an_architecture_answers_as_transformers_and_peft_do(
    model_type: str, layers: int, tmp_path: Path
) -> None:
    with shared_traces():
        verdict = check_architecture(model_type, tmp_path, layers)
    assert verdict.is_right, verdict


def test_every_model_type_was_tried_with_this_transformers() -> None:
    content = json.loads(RESULTS_FILE.read_text(encoding="utf-8"))
    assert set(content["verdicts"]) == set(MODEL_TYPES)
    assert content["versions"]["transformers"] == transformers.__version__


def test_what_was_built_is_right_and_not_less_than_before() -> None:
    built = {name: verdict for name, verdict in verdicts().items() if verdict.is_built}
    assert [name for name, verdict in built.items() if not verdict.is_right] == []
    assert len(built) >= 103


def test_refusals_are_one_line_in_our_words() -> None:
    refusals = [verdict for verdict in verdicts().values() if verdict.refusal]
    assert refusals
    for verdict in refusals:
        assert "\n" not in verdict.refusal
        assert len(verdict.refusal) < 300
        assert verdict.refusal.startswith(verdict.architecture)
        assert reason_of(verdict)


def test_the_page_is_made_from_the_results() -> None:
    content = json.loads(RESULTS_FILE.read_text(encoding="utf-8"))
    assert PAGE_FILE.read_text(encoding="utf-8") == page(content)
