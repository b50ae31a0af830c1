"""Memory of a process."""

import sys
from subprocess import PIPE, Popen

from support.eventually import eventually

from trt_lora.scripts.measuring.process_memory import peak_resident_bytes, resident_bytes

HELD = 64 << 20  # bytes
HOLD_AND_FREE = f"""
from trt_lora.scripts.measuring.process_memory import peak_resident_bytes, resident_bytes
held = b"x" * {HELD}
input()
del held
print(resident_bytes(), peak_resident_bytes())
"""


def test_memory_of_a_process_lies_below_its_peak_and_is_nothing_after_its_end() -> None:
    assert 0 < resident_bytes() <= peak_resident_bytes()
    # A process of its own: this one may have as much free, and take it again.
    command = [sys.executable, "-c", HOLD_AND_FREE]
    with Popen(command, stdin=PIPE, stdout=PIPE, text=True) as child:
        assert eventually(lambda: HELD < resident_bytes(child.pid) < 2 * HELD)
        printed, _ = child.communicate("go on\n")
    resident, peak = map(int, printed.split())
    assert 0 < resident < HELD < peak < 2 * HELD
    assert resident_bytes(child.pid) == 0
