"""Write a polygraphy network script with the LoRA plugin and an engine's profiles.

    python scripts/polygraphy_extension/network_script.py engines/x network.py
    polygraphy convert network.py --trt-config-script network.py --convert-to trt -o x.plan

polygraphy parses an ONNX file without plugins written in Python, so that LoRA nodes become native
matrix products; a network of a script may have them. TensorRT-RTX takes
POLYGRAPHY_USE_TENSORRT_RTX=1 in the environment of polygraphy.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from trt_lora.builder.tensorrt.onnx_bytes import parsed_form
from trt_lora.plugins.atomic_files import publish_file
from trt_lora.plugins.errors import BackendError, ModelError
from trt_lora.plugins.tensorrt.flavour import TENSORRT, TENSORRT_RTX
from trt_lora.plugins.tensorrt.plugin_registry import register_plugins
from trt_lora.runtime.manifest import ONNX_FILE, read_manifest
from trt_lora.scripts.polygraphy_extension.data_loader import polygraphy_errors
from trt_lora.scripts.terminal.console import run

_SCRIPT = '''\
"""The network of {engine}, for polygraphy."""

from trt_lora.scripts.polygraphy_extension.network_script import (
    config_with_profiles,
    network_with_plugin,
)

ENGINE = {engine!r}


def load_network():
    """Return builder, network and parser; LoRA nodes are the plugin."""
    return network_with_plugin(ENGINE)


def load_config(builder, network):
    """Return a configuration with the engine's profiles."""
    return config_with_profiles(ENGINE, builder, network)
'''


def network_with_plugin(engine: str) -> tuple[Any, Any, Any]:
    """Return TensorRT's builder, network and parser of an engine's ONNX file, with our plugin.

    Raises:
        PolygraphyException: it is no engine, or the plugin cannot be had here; the message is
            logged.
    """
    import onnx_ir as ir
    from polygraphy import config
    from polygraphy.backend.trt import CreateNetwork, get_trt_logger

    with polygraphy_errors():
        read_manifest(Path(engine))
        flavour = TENSORRT_RTX if config.USE_TENSORRT_RTX else TENSORRT
        if obstacle := flavour.plugin_obstacle():
            raise BackendError(f"the LoRA plugin cannot be had here: {obstacle}")
        trt = flavour.load()
        register_plugins(trt)
        path = Path(engine) / ONNX_FILE
        builder, network = CreateNetwork(strongly_typed=True)()
        parser = trt.OnnxParser(network, get_trt_logger())
        parser.set_flag(trt.OnnxParserFlag.ENABLE_PLUGIN_OVERRIDE)
        with TemporaryDirectory() as scratch:
            data, beside = parsed_form(ir.load(path), path, Path(scratch))
            is_parsed = parser.parse(data, str(beside))
        if not is_parsed:
            reasons = [parser.get_error(i).desc() for i in range(parser.num_errors)]
            raise ModelError(f"{flavour.name} cannot parse {path}: {'; '.join(reasons)}")
    return builder, network, parser


def config_with_profiles(engine: str, builder: Any, network: Any) -> Any:
    """Return a configuration of `builder` with the profiles of an engine's manifest, in order.

    Raises:
        PolygraphyException: it is no engine; the message is logged.
    """
    from polygraphy.backend.trt import CreateConfig, Profile

    with polygraphy_errors():
        manifest = read_manifest(Path(engine))
    profiles = [Profile() for _ in manifest.profiles]
    for profile, ranges in zip(profiles, manifest.profiles.values(), strict=True):
        for name, allowed in ranges.items():
            profile.add(name, min=allowed.min, opt=allowed.opt, max=allowed.max)
    return CreateConfig(profiles=profiles)(builder, network)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Write a network script for polygraphy")
    parser.add_argument("engine", type=Path, metavar="ENGINE", help="what build-engine made")
    parser.add_argument("output", type=Path, metavar="FILE", help="a .py file")
    args = parser.parse_args(argv)
    run(lambda: _write(args.engine, args.output))


def _write(engine: Path, output: Path) -> None:
    read_manifest(engine)
    with publish_file(output) as work:
        work.write_text(_SCRIPT.format(engine=str(engine.absolute())), encoding="utf-8")


if __name__ == "__main__":
    main()
