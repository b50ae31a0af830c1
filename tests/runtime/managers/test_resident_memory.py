"""Adapters that are unloaded give resident memory back to the system."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from safetensors.numpy import save_file
from support.adapters.resident_adapters import WIDE_MANIFEST, unload_every_other_first
from support.fakes.fake_engine import make_weights


def test_resident_memory_returns_when_adapters_of_a_few_megabytes_are_unloaded(
    tmp_path: Path,
) -> None:
    """Every other one first: what lies between two that stay returns as well."""
    file = tmp_path / "a.safetensors"
    save_file(make_weights(WIDE_MANIFEST, rank=16), file)  # 2 MB
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        process.submit(unload_every_other_first, file, adapters=16).result()
