"""Print a line for every tensor of an adapter and for every site of an engine."""

from trt_lora.runtime.adapters.fitting.coverage import Coverage, SiteCoverage
from trt_lora.runtime.manifest import Manifest


def print_tensors(coverage: Coverage, manifest: Manifest) -> None:
    """Print what is bound to what, with ranks, scales and casts; what is not bound, and why."""
    for site in coverage.adapted:
        print(_site_line(site))
        for binding in manifest.binding_names.pair(site.path):
            print(f"  {binding} <- {', '.join(coverage.bindings[binding])}")
    for site in coverage.sites:
        if not site.rank:
            print(f"{site.path}: dummy")
    for name, reason in coverage.unexpected_keys.items():
        print(f"not bound: {name}: {reason}")
    for name, reason in coverage.ignored.items():
        print(f"ignored: {name}: {reason}")


def _site_line(site: SiteCoverage) -> str:
    scales = ", ".join(f"{scale:.6g}" for scale in site.scales)
    line = f"{site.path}: rank {site.rank}, scale {scales}, {site.nbytes} bytes"
    if (site.dtype,) != site.source_dtypes:
        line += f", {' and '.join(site.source_dtypes)} -> {site.dtype}"
    if site.rounding_error:
        line += f", rounded by at most {site.rounding_error:.2g}"
    return line + (f", {site.flushed} values became 0" if site.flushed else "")
