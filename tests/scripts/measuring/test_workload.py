"""Workloads and ranks of a benchmark: defaults that fit every engine, and refusals."""

from dataclasses import replace

import pytest
from support.fakes.fake_engine import make_manifest

from trt_lora.plugins.errors import ConfigError
from trt_lora.scripts.measuring.workload import BatchWorkload, ranks_of, workloads


def test_the_defaults_are_cut_to_what_an_engine_takes() -> None:
    small = make_manifest()  # 4 rows, 32 tokens in all
    assert workloads(small) == (BatchWorkload(1, 15, 17), BatchWorkload(4, 15, 17))
    large = replace(small, max_batch_size=32, max_seq_len=4096, max_input_len=1024)
    assert workloads(large) == (BatchWorkload(1, 64, 32), BatchWorkload(8, 64, 32))
    alone = replace(small, max_batch_size=1)
    assert [workload.rows for workload in workloads(alone)] == [1]


def test_a_prompt_fits_into_one_step_of_a_growing_cache() -> None:
    (found,) = workloads(make_manifest(), rows=(1,))
    assert found.prompt_tokens <= make_manifest().max_input_len


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"rows": (1, 5)}, "--rows is 5, and the engine takes 1 to 4"),
        ({"rows": (0,)}, "--rows is 0, and the engine takes 1 to 4"),
        ({"prompt_tokens": 31}, "--prompt-tokens is 31, and the engine takes 1 to 30"),
        (
            {"prompt_tokens": 30, "new_tokens": 3},
            "--new-tokens is 3, and the engine takes 2 to 2",
        ),
        ({"new_tokens": 1}, "--new-tokens is 1, and the engine takes 2 to 17"),
        ({"prompt_tokens": 0}, "--prompt-tokens is 0, and the engine takes 1 to 30"),
    ],
)
def test_what_an_engine_cannot_answer_is_refused(asked: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}$"):
        workloads(make_manifest(), **asked)  # type: ignore[arg-type]


def test_ranks_are_those_asked_for_or_what_the_engine_takes_of_the_default() -> None:
    manifest = make_manifest()  # up to 16
    assert ranks_of(manifest) == (8, 16)
    assert ranks_of(manifest, ()) == ()
    assert ranks_of(manifest, (3, 3, 1)) == (3, 1)
    assert ranks_of(replace(manifest, sites=())) == ()
    with pytest.raises(ConfigError, match="--ranks is 17, and the engine takes 1 to 16"):
        ranks_of(manifest, (17,))


def test_prompts_are_tokens_of_the_model_and_other_ones_in_each_round() -> None:
    manifest = make_manifest()
    first, second = (BatchWorkload(2, 5, 2).prompts(manifest, seed) for seed in (0, 1))
    assert first != second
    assert [len(prompt) for prompt in first] == [5, 5]
    assert all(0 <= token < manifest.vocabulary_size for prompt in first for token in prompt)
