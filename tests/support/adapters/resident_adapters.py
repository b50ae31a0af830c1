"""Check that adapters return resident memory, in a process whose free memory hides nothing."""

from pathlib import Path

from support.eventually import eventually
from support.fakes.fake_engine import FakeExecutor, make_manifest

from trt_lora.runtime.interfaces.edgellm import LoRAManager
from trt_lora.scripts.measuring.process_memory import resident_bytes

WIDE_MANIFEST = make_manifest(k=4096, n=4096)


def unload_every_other_first(file: Path, adapters: int) -> None:
    """Load adapters of one file, unload every other one and then the rest.

    Args:
        file: weights for `WIDE_MANIFEST`.
        adapters: how many, an even number.

    Raises:
        AssertionError: resident memory does not follow.
    """
    manager, names = LoRAManager(), [str(i) for i in range(adapters)]
    manager.initialize_engine_bindings(FakeExecutor(WIDE_MANIFEST))
    manager.load_weights("first", file)
    before, total = resident_bytes(), adapters * file.stat().st_size

    def share() -> float:
        return (resident_bytes() - before) / total

    for name in names:
        manager.load_weights(name, file)
    assert eventually(lambda: share() > 0.9), share()
    for name in names[::2]:
        manager.unload(name)
    assert eventually(lambda: share() < 0.6), share()
    for name in names[1::2]:
        manager.unload(name)
    assert eventually(lambda: share() < 0.1), share()
