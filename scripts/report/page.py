"""One page of HTML about an engine: what it takes, adapters, kernels, sizes, times."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path, PurePath

from trt_lora.plugins.extras import extra
from trt_lora.runtime.adapters.fitting.coverage import Coverage
from trt_lora.runtime.files.hub_cache import model_name
from trt_lora.runtime.manifest import Manifest
from trt_lora.scripts.measuring.benchmark import Benchmark
from trt_lora.scripts.report.bars import Bar, Chart
from trt_lora.scripts.report.site_grid import EngineGrid, site_grid
from trt_lora.scripts.report.speed_charts import benchmark_charts
from trt_lora.scripts.terminal.engine_facts import engine_facts
from trt_lora.scripts.terminal.printing import byte_size

_TEMPLATE = "page.html.jinja"


@dataclass(frozen=True)
class AdapterSection:
    """An adapter in the engine."""

    name: str
    coverage: Coverage
    grid: EngineGrid

    @property
    def source(self) -> str:
        """What the adapter is called where it was made, without the folders of this machine."""
        return model_name(PurePath(self.coverage.source))


@dataclass(frozen=True)
class Page:
    """All that the page says."""

    title: str
    facts: Mapping[str, str]
    grid: EngineGrid  # without adapter
    adapters: tuple[AdapterSection, ...]
    sizes: Chart
    kernels: tuple[Chart, ...] = ()
    benchmark: Benchmark | None = None
    peers: tuple[Chart, ...] = ()

    @property
    def speed(self) -> tuple[Chart, ...]:
        """The charts of the benchmark."""
        return benchmark_charts(self.benchmark) if self.benchmark else ()

    @property
    def memory(self) -> Mapping[str, str]:
        """What the benchmark says of memory, in words."""
        known = self.benchmark.memory_bytes if self.benchmark else {}
        return {label: byte_size(nbytes) for label, nbytes in known.items()}

    def html(self) -> str:
        """Return the page: no script, nothing that is loaded from elsewhere, every text escaped.

        Raises:
            BackendError: jinja2 is not installed.
        """
        with extra("text", "trt-lora report"):
            from jinja2 import Environment, StrictUndefined
        environment = Environment(
            autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
        )
        text = (files("trt_lora.scripts.report") / _TEMPLATE).read_text(encoding="utf-8")
        return environment.from_string(text).render(page=self)


def page_of(
    directory: Path,
    manifest: Manifest,
    coverages: Mapping[str, Coverage],
    *,
    kernels: tuple[Chart, ...] = (),
    benchmark: Benchmark | None = None,
    peers: tuple[Chart, ...] = (),
) -> Page:
    """Return the page of an engine.

    Args:
        directory: of the engine.
        manifest: of the engine.
        coverages: of adapters in it, by the names they are shown with.
        kernels: charts of `kernel_charts`.
        benchmark: what `trt-lora bench` measured.
        peers: charts of `peer_charts`.
    """
    sections = tuple(
        AdapterSection(
            name, coverage, site_grid(manifest, {s.path: s.rank for s in coverage.sites})
        )
        for name, coverage in coverages.items()
    )
    return Page(
        manifest.base_model.name,
        engine_facts(Path(directory.resolve().name), manifest),
        site_grid(manifest, {}),
        sections,
        _sizes(manifest, coverages),
        kernels,
        benchmark,
        peers,
    )


def _sizes(manifest: Manifest, coverages: Mapping[str, Coverage]) -> Chart:
    """Files, and adapters as the executor holds them."""
    sizes = {name: record.size_bytes for name, record in manifest.files.items()}
    sizes |= {f"adapter {name}": coverage.nbytes for name, coverage in coverages.items()}
    bars = (Bar(name, nbytes, byte_size(nbytes)) for name, nbytes in sizes.items())
    return Chart("Files and adapters", tuple(bars))
