"""Failures of the plugin reach the build or the run in which they happened, and no other."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from trt_lora.plugins.tensorrt.plugin_failures import PluginFailures, summary

SOON = 60  # seconds, in which everything has happened that will
HELD = 0.1  # seconds, in which what is not held back would have happened


def test_a_block_sees_what_was_noted_in_it_by_any_thread() -> None:
    failures = PluginFailures()
    failures.note("nobody's")
    with failures.collected() as noted:
        assert not noted
        with ThreadPoolExecutor(1) as pool:
            pool.submit(failures.note, "first").result()
        failures.note("second")
        assert noted == ["first", "second"]
    failures.note("too late")
    assert noted == ["first", "second"]


def test_a_summary_has_each_failure_once_and_no_more_than_a_few() -> None:
    assert summary([]) == ""
    assert summary(["a", "b", "a", "c"]) == "a; b; c"
    assert summary([f"node {index}" for index in range(200)]) == "node 0; node 1; node 2; 197 more"


def test_a_second_block_begins_when_the_first_has_ended_also_with_an_error() -> None:
    failures, begun, go_on = PluginFailures(), threading.Event(), threading.Event()

    def first() -> list[str]:
        with suppress(KeyError), failures.collected() as noted:
            begun.set()
            assert go_on.wait(SOON)
            failures.note("of the first")
            raise KeyError
        return noted

    def second() -> list[str]:
        with failures.collected() as noted:
            failures.note("of the second")
        return noted

    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(first)
        assert begun.wait(SOON)
        two = pool.submit(second)
        assert not two.done()
        threading.Event().wait(HELD)
        assert not two.done()
        go_on.set()
        assert (one.result(), two.result()) == (["of the first"], ["of the second"])
