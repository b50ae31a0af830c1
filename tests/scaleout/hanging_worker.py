"""A worker of Dynamo whose engine makes no step while a file with its port's name is there."""

import os
import time
from pathlib import Path

from trt_lora.runtime.serving.engine_loop import EngineLoop

HANGS = "hangs-{}"  # in the folder in which all runs

if __name__ == "__main__":
    from trt_lora.runtime.scaleout.dynamo import main

    step, hangs = EngineLoop._step, Path(HANGS.format(os.environ["DYN_SYSTEM_PORT"]))

    def late(loop: EngineLoop) -> None:
        """Make a step, or wait until there may be one."""
        while hangs.exists():
            time.sleep(0.1)
        step(loop)

    EngineLoop._step = late  # type: ignore[assignment,method-assign]
    main()
