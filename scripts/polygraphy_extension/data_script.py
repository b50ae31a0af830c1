"""Data loader script, and writer of input files, for polygraphy without the extension.

    polygraphy run engines/x/model.onnx --onnxrt
        --data-loader-script scripts/polygraphy_extension/data_script.py

feeds the engine whose model is on the command line: the base model, on random tokens. polygraphy
hands a script no arguments, so for an adapter or a prompt copy this file and change the constants,
or write the inputs once, for every command that takes `--load-inputs`:

    python scripts/polygraphy_extension/data_script.py engines/x inputs.json --adapter a
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from polygraphy.json import save_json

from trt_lora.plugins.errors import ConfigError
from trt_lora.runtime.manifest import MANIFEST_FILE, ONNX_FILE, read_manifest
from trt_lora.scripts.polygraphy_extension.data_loader import polygraphy_errors
from trt_lora.scripts.terminal.console import run
from trt_lora.scripts.verification.example_inputs import Inputs, InputSpec, make_inputs

ENGINE = ""  # a directory; empty: that of the model on polygraphy's command line
ADAPTER = ""  # such as "tests/adapters/pirate"; empty: rank-1 zeros, the base model
PROMPT = ""  # a user's message; empty: random tokens


def load_data() -> list[Inputs]:
    """Return the inputs of a prefill and a decode step.

    Raises:
        PolygraphyException: there is no engine, or it refuses the adapter; the message is logged.
    """
    with polygraphy_errors():
        engine = Path(ENGINE) if ENGINE else _engine_of(sys.argv[1:])
        spec = InputSpec(Path(ADAPTER) if ADAPTER else None, PROMPT or None)
        return make_inputs(engine, read_manifest(engine), spec)


def _engine_of(arguments: Sequence[str]) -> Path:
    folders = [Path(argument).parent for argument in arguments if Path(argument).is_file()]
    engine = next((folder for folder in folders if (folder / MANIFEST_FILE).is_file()), None)
    if engine is None:
        raise ConfigError(
            f"no model on the command line lies beside a {MANIFEST_FILE}; give DIR/{ONNX_FILE}, or "
            "set ENGINE in a copy of this script"
        )
    return engine


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line that writes inputs to a file."""
    parser = argparse.ArgumentParser(description="Write inputs as polygraphy --load-inputs reads")
    add = parser.add_argument
    add("engine", type=Path, metavar="ENGINE", help="what build-engine made")
    add("output", type=Path, metavar="FILE", help="a .json file")
    add("--adapter", type=Path, metavar="PATH", help="default: rank-1 zeros, the base model")
    add("--prompt", metavar="TEXT", help="a user's message; default: random tokens")
    add("--seed", type=int, default=InputSpec.seed)
    add(
        "--iterations", type=int, default=InputSpec.iterations, help="prefill, decode, prefill, ..."
    )
    args = parser.parse_args(argv)
    run(lambda: _write(args))


def _write(args: argparse.Namespace) -> None:
    spec = InputSpec(args.adapter, args.prompt, None, args.seed, args.iterations)
    save_json(make_inputs(args.engine, read_manifest(args.engine), spec), str(args.output))


if __name__ == "__main__":
    main()
