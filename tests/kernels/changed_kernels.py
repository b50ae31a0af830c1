"""What the emulation says of kernels whose text was changed."""

from kernels.calls import Call
from kernels.emulator import EmulationError, build, run

from trt_lora.plugins.kernels.launch_plan import Chip
from trt_lora.plugins.kernels.passes import launches_of


def outcome(call: Call, chip: Chip, text: str) -> str:
    """Return what the emulation says, or what is wrong with the values."""
    launches = launches_of(call.shape, chip)
    library = build(text, [launch.kernel for launch in launches])
    try:
        out = run(call, launches, library=library)
    except EmulationError as error:
        return str(error)
    return "wrong values" if call.worst(out) > 1 else "nothing"
