"""The server of nvidia-pytriton's wheel, with the Python backend, over a folder of models."""

import shutil
import subprocess
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from support.doc_blocks import ROOT
from support.eventually import eventually
from support.ports import free_port, is_answered

FILES = ROOT / "runtime" / "scaleout" / "triton"


@dataclass(frozen=True)
class Triton:
    """A server that runs."""

    http: str  # host and port
    grpc: str
    metrics: str
    models: Path  # its repository
    process: subprocess.Popen[bytes]


def put_model(
    folder: Path, parameters: Mapping[str, str], changes: Mapping[str, str] | None = None
) -> None:
    """Make the folder of a model, as the page says.

    Args:
        folder: in a repository; its name is the model's.
        parameters: instead of those in config.pbtxt.
        changes: what else stands there, and what shall.
    """
    (folder / "1").mkdir(parents=True)
    shutil.copy(FILES / "model.py", folder / "1")
    config, _, _ = (FILES / "config.pbtxt").read_text().partition("parameters [")
    for old, new in (changes or {}).items():
        assert old in config, old
        config = config.replace(old, new)
    for name, value in parameters.items():
        config += f'parameters {{ key: "{name}", value: {{ string_value: "{value}" }} }}\n'
    (folder / "config.pbtxt").write_text(config)


@contextmanager
def triton_server(folder: Path) -> Iterator[Triton]:
    """Run the server over `folder`/models, which follows requests to load and unload."""
    ports = [free_port() for _ in range(3)]
    log = folder / "triton.log"
    command = [*_command(folder), "--model-repository", str(folder / "models")]
    for name, port in zip(("http", "grpc", "metrics"), ports, strict=True):
        address = f"--{name}-address=127.0.0.1"
        command += [address, f"--{name}-port={port}"]
    with (
        log.open("wb") as written,
        subprocess.Popen(command, stdout=written, stderr=written, env=_environment()) as process,
    ):
        http, grpc, metrics = (f"127.0.0.1:{port}" for port in ports)
        try:
            ready = f"http://{http}/v2/health/ready"
            assert eventually(lambda: is_answered(ready) or process.poll() is not None)
            assert process.poll() is None, log.read_text()[-4000:]
            yield Triton(http, grpc, metrics, folder / "models", process)
        except BaseException:
            print(log.read_text()[-6000:])
            raise
        finally:
            process.terminate()


def _command(folder: Path) -> list[str]:
    """The server, and the backend with the stub of this Python beside it."""
    server = Path(sysconfig.get_path("purelib")) / "pytriton" / "tritonserver"
    version = sysconfig.get_python_version()
    backend = folder / "backends" / "python"
    shutil.copytree(server / "backends" / "python", backend)
    stub = "triton_python_backend_stub"
    shutil.copy(server / "python_backend_stubs" / version / stub, backend)
    given = ["--model-control-mode=explicit", "--load-model=*", "--exit-timeout-secs=10"]
    return [str(server / "bin" / "tritonserver"), f"--backend-directory={backend.parent}", *given]


def _environment() -> dict[str, str]:
    """The stub takes the packages of the `python3` on PATH, and ignores PYTHONPATH."""
    home, site = Path(sysconfig.get_path("scripts")), Path(sysconfig.get_path("purelib"))
    (site / "trt_lora.pth").write_text(f"{ROOT / 'src'}\n")
    libraries = [sysconfig.get_config_var("LIBDIR"), site / "nvidia_pytriton.libs"]
    return {
        "PATH": f"{home}:/usr/bin:/bin",
        "LD_LIBRARY_PATH": ":".join(map(str, libraries)),
        "OMP_NUM_THREADS": "1",
    }
