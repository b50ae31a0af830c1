"""Compile an ONNX file to a TensorRT plan, in either flavour, with or without a GPU."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import onnx_ir as ir
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from trt_lora.builder.progress import Progress
from trt_lora.builder.tensorrt.aot_graph import check_plugin_layers, use_aot_plugins
from trt_lora.builder.tensorrt.build_log import Kernel, read_kernels
from trt_lora.builder.tensorrt.onnx_bytes import onnx_bytes, parsed_form
from trt_lora.builder.tensorrt.profiles import Profiles
from trt_lora.builder.tensorrt.second_stream import add_second_stream
from trt_lora.plugins.atomic_files import publish_file
from trt_lora.plugins.errors import ModelError
from trt_lora.plugins.tensorrt.flavour import Flavour
from trt_lora.plugins.tensorrt.plugin_failures import summary
from trt_lora.plugins.tensorrt.plugin_registry import register_plugins
from trt_lora.runtime.manifest import Range
from trt_lora.runtime.memory.cuda import try_call

_NO_DRIVER = "cudaError 35"  # TensorRT says so many times where there is no GPU; it needs none


@dataclass(frozen=True)
class Compiler:
    """One flavour of TensorRT, ready to compile."""

    flavour: Flavour
    progress: Progress
    lora_plugin: str  # what LoRA nodes become: plugin, aot, or native, their function bodies
    timing_cache: Path | None = None
    targets: tuple[str, ...] = ()  # compute capabilities, such as 8.9; empty: as the flavour has it
    second_stream: bool = False  # whether LoRA nodes get one, by a hidden output
    has_own_codes: bool = True  # codes are as our builds write them; another exporter's stay

    def compile(self, onnx: Path, plan: Path, profiles: Profiles) -> str:
        """Write the plan of `onnx` and return the version of TensorRT.

        Ctrl-C cancels within one step of the build.

        Raises:
            BackendError: the library is not installed.
            ModelError: TensorRT cannot parse or build the graph.
            KeyboardInterrupt: the user cancelled.
        """
        trt = self.flavour.load()
        with self._plugin_calls(trt) as failures, _folder(plan.parent) as scratch:
            model = self._loaded(onnx)
            plan.write_bytes(self._serialized(trt, model, onnx, profiles, failures, scratch))
        return str(trt.__version__)

    def kernels(self, model: ir.Model, onnx: Path, profiles: Profiles) -> list[Kernel]:
        """Return what TensorRT would run, from its own list; the plan is thrown away.

        Args:
            model: an ONNX model whose weights lie beside `onnx`.
            onnx: the file whose folder holds the weights.
            profiles: the range of every input, by profile and input.

        Raises:
            BackendError, ModelError, KeyboardInterrupt: as `compile` does.
        """
        trt = self.flavour.load()
        lines: list[str] = []
        with self._plugin_calls(trt) as failures, _folder() as scratch:
            self._serialized(trt, model, onnx, profiles, failures, scratch, lines)
        return read_kernels(lines)

    def _loaded(self, onnx: Path) -> ir.Model:
        try:
            return ir.load(onnx)
        except DecodeError as error:
            raise ModelError(f"{self.flavour.name} cannot parse {onnx.name}: {error}") from error

    def _serialized(
        self,
        trt: Any,
        model: ir.Model,
        onnx: Path,
        profiles: Profiles,
        failures: Sequence[str],
        scratch: Path,
        lines: list[str] | None = None,
    ) -> Any:
        messages: list[str] = []
        log = _logger(trt, messages, lines)
        builder = trt.Builder(log)
        if self.lora_plugin == "aot":
            use_aot_plugins(trt, model, profiles)
        if self.second_stream:
            add_second_stream(model)
        network, parser = self._network(trt, builder, log)
        is_own = self.has_own_codes
        data, path = parsed_form(model, onnx, scratch) if is_own else (onnx_bytes(model), onnx)
        if not parser.parse(data, str(path)):
            errors = [parser.get_error(i).desc() for i in range(parser.num_errors)]
            reason = "; ".join(filter(None, [summary(failures), *errors]))
            raise ModelError(f"{self.flavour.name} cannot parse {onnx.name}: {reason}")
        if self.lora_plugin == "aot":
            check_plugin_layers(trt, network, model)
        self._check_inputs(network, onnx, profiles)
        if unread := _unread_inputs(network, model):
            raise ModelError(
                f"{self.flavour.name} ignores inputs of {onnx.name}: {', '.join(unread)}; the plan "
                "would answer wrongly"
            )
        config = builder.create_builder_config()
        if self.flavour.graph_flag:
            config.set_flag(getattr(trt.BuilderFlag, self.flavour.graph_flag))
        if lines is not None:
            config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED  # else no list of kernels
        if self.targets:  # full TensorRT does not have the property
            config.num_compute_capabilities = len(self.targets)
        for place, target in enumerate(self.targets):
            config.set_compute_capability(self.flavour.compute_capabilities()[target], place)
        for name, ranges in profiles.items():
            if config.add_optimization_profile(_profile(builder, ranges)) < 0:
                reasons = _reasons(messages, failures)
                raise ModelError(f"{self.flavour.name} refuses profile {name}: {reasons}")
        self._load_timing_cache(config)
        cancelled = threading.Event()
        config.progress_monitor = _monitor(trt, self.progress, cancelled)
        serialized = _run(lambda: builder.build_serialized_network(network, config), cancelled)
        if serialized is None or failures:
            reasons = _reasons(messages, failures)
            raise ModelError(f"{self.flavour.name} cannot build {onnx.name}: {reasons}")
        self._save_timing_cache(config)
        return serialized

    def _network(self, trt: Any, builder: Any, log: Any) -> tuple[Any, Any]:
        """The parser owns the weights, so it must live as long as the network is used."""
        network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
        parser = trt.OnnxParser(network, log)
        if self.lora_plugin == "plugin":
            parser.set_flag(trt.OnnxParserFlag.ENABLE_PLUGIN_OVERRIDE)
        return network, parser

    def _check_inputs(self, network: Any, onnx: Path, profiles: Profiles) -> None:
        parsed = {network.get_input(i).name for i in range(network.num_inputs)}
        for ranges in profiles.values():
            if parsed != set(ranges):
                odd = ", ".join(sorted(parsed ^ set(ranges)))
                raise ModelError(f"{onnx.name} has other inputs in {self.flavour.name}: {odd}")

    def _plugin_calls(self, trt: Any) -> AbstractContextManager[Sequence[str]]:
        """Collects what goes wrong in the plugin, which TensorRT may overlook."""
        if self.lora_plugin != "plugin":
            return nullcontext(())
        return register_plugins(trt).failures.collected()

    def _load_timing_cache(self, config: Any) -> None:
        if self.timing_cache is None:
            return
        if not self.flavour.has_timing_cache:
            self.progress.note(
                f"--timing-cache has no effect: {self.flavour.name} does not time kernels "
                "when it builds"
            )
            return
        known = self.timing_cache.read_bytes() if self.timing_cache.is_file() else b""
        if not _takes_cache(config, known):
            self.progress.note(
                f"{self.timing_cache} is ignored, and written anew at the end: it is damaged, or "
                f"of another GPU, driver or {self.flavour.name}"
            )
            _takes_cache(config, b"")

    def _save_timing_cache(self, config: Any) -> None:
        """It only saves time: whatever is wrong with it, the plan is there."""
        if self.timing_cache is None or not self.flavour.has_timing_cache:
            return
        try:
            with publish_file(self.timing_cache) as path:  # other builds may be reading it
                path.write_bytes(config.get_timing_cache().serialize())
        # An attribute error where TensorRT has none to give.
        except (OSError, AttributeError, TypeError, RuntimeError) as error:
            self.progress.note(f"{self.timing_cache} is not written: {error}")


def _takes_cache(config: Any, known: bytes) -> bool:
    """Set a timing cache of these bytes; empty ones begin a new one."""
    cache = config.create_timing_cache(known)  # None for bytes that it does not understand
    return cache is not None and bool(config.set_timing_cache(cache, ignore_mismatch=False))


@contextmanager
def _folder(parent: Path | None = None) -> Iterator[Path]:
    """A folder that is removed; TensorRT may read weights in it until its plan is made."""
    with TemporaryDirectory(dir=parent) as path:
        yield Path(path)


def _reasons(messages: Sequence[str], failures: Sequence[str]) -> str:
    """The last errors that TensorRT logged, and those of the plugin."""
    logged = [message for message in messages if _NO_DRIVER not in message]
    reasons = list(dict.fromkeys([*logged, *failures]))
    return "; ".join(reasons[-3:]) or "it gives no reason"


def _run(build: Callable[[], Any], cancelled: threading.Event) -> Any:
    """Call `build` in a thread, so that Ctrl-C reaches Python while TensorRT works.

    The thread uses the GPU of this one, where there is any: a plan is for the GPU that is current.
    An event tells the end of the thread: in Python 3.11 a `Thread.join` that Ctrl-C interrupts
    takes a running thread for an ended one. Another tells its begin, since Ctrl-C may come while
    this thread waits for the start of the other.
    """
    results: list[Any] = []
    device = try_call("cudaGetDevice")
    begun, finished = threading.Event(), threading.Event()

    def work() -> None:
        begun.wait()
        if cancelled.is_set():
            return
        try:
            if device is not None:
                try_call("cudaSetDevice", device)
            results.append(build())
        finally:
            finished.set()

    worker = threading.Thread(target=work, name="tensorrt-build")
    try:
        worker.start()
        begun.set()
        while not finished.wait(timeout=0.2):
            pass
    except BaseException:  # Ctrl-C, or what the program makes of another signal
        cancelled.set()
        has_begun = begun.is_set()
        begun.set()
        if has_begun:
            finished.wait()
            worker.join()
        raise
    worker.join()
    return results[0] if results else None


def _profile(builder: Any, ranges: Mapping[str, Range]) -> Any:
    profile = builder.create_optimization_profile()
    for name, allowed in ranges.items():
        profile.set_shape(name, allowed.min, allowed.opt, allowed.max)
    return profile


def _logger(trt: Any, errors: list[str], everything: list[str] | None = None) -> Any:
    """Return a logger that keeps errors for our own message instead of printing them."""

    class Recorder(trt.ILogger):  # type: ignore[misc] # the base comes from the flavour
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.Severity.ERROR, trt.ILogger.Severity.INTERNAL_ERROR):
                errors.append(message.strip())
            if everything is not None:
                everything.extend(message.splitlines())

    return Recorder()


def _monitor(trt: Any, progress: Progress, cancelled: threading.Event) -> Any:
    """Adds up the steps of all phases; TensorRT nests them and learns of more as it goes."""

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc] # the base comes from the flavour
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.total = self.done = 0

        def phase_start(self, phase: str, parent: str | None, steps: int) -> None:
            self.total += steps

        def step_complete(self, phase: str, step: int) -> bool:
            self.done += 1
            progress.advance(self.done, self.total)
            return not cancelled.is_set()

        def phase_finish(self, phase: str) -> None:
            pass

    return Monitor()


def _unread_inputs(network: Any, model: ir.Model) -> list[str]:
    """Return the names of inputs that nodes of the ONNX model read, and no layer behind an output.

    A parser may drop an operand without a word, as that of TensorRT-RTX 1.7.1 does with the
    `nonpad_kv_seqlen` of `Attention`: such a plan would answer wrongly. It goes unseen where
    another layer reads the same input.

    Args:
        network: parsed from `model`.
        model: an ONNX model.
    """
    layers = [network.get_layer(index) for index in range(network.num_layers)]
    makers = {output.name: layer for layer in layers for output in _layer_outputs(layer)}
    read = set[str]()
    waiting = [network.get_output(index).name for index in range(network.num_outputs)]
    while waiting:
        name = waiting.pop()
        if name not in read:
            read.add(name)
            waiting += [tensor.name for tensor in _layer_inputs(makers.get(name))]
    inputs = (value for value in model.graph.inputs if value.uses())
    return [str(value.name) for value in inputs if value.name not in read]


def _layer_inputs(layer: Any) -> Iterator[Any]:
    """The tensors that a layer reads; none for the maker of a network input."""
    tensors = (layer.get_input(index) for index in range(layer.num_inputs)) if layer else ()
    return (tensor for tensor in tensors if tensor is not None)  # an optional one may be missing


def _layer_outputs(layer: Any) -> Iterator[Any]:
    return (layer.get_output(index) for index in range(layer.num_outputs))
