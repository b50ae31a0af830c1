"""Report of a dry run: LoRA sites, and the linears left alone with the reason."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from trt_lora.builder.targets import LeftAlone, SiteList
from trt_lora.plugins.contract.sites import Site, layer_of, path_in_layer
from trt_lora.scripts.terminal.console import print_table


def print_sites(listing: SiteList, *, verbose: bool) -> None:
    """Print a line a kind of linear, or, with `verbose`, a line a linear; the last line counts."""
    (_print_all if verbose else _print_kinds)(listing)
    print(f"{len(listing.sites)} sites, {len(listing.left_alone)} left alone")


def sites_as_json(listing: SiteList) -> dict[str, list[dict[str, object]]]:
    """Return what `print_sites` prints, a linear each, as JSON has it."""
    sites = [_as_json(site) for site in listing.sites]
    left_alone: list[dict[str, object]] = [
        {"path": item.path, "reason": item.reason} for item in listing.left_alone
    ]
    return {"sites": sites, "left_alone": left_alone}


def _as_json(site: Site) -> dict[str, object]:
    experts = {"experts": site.experts} if site.experts else {}
    return {"path": site.path, "module": _module(site), "k": site.k, "n": site.n, **experts}


def _print_all(listing: SiteList) -> None:
    for site in listing.sites:
        of_experts = f" of {site.experts} experts" if site.experts else ""
        print(f"{site.path}  {_module(site)}  k={site.k} n={site.n}{of_experts}")
    for item in listing.left_alone:
        print(f"left alone: {item.path}: {item.reason}")


def _print_kinds(listing: SiteList) -> None:
    kinds: dict[tuple[str, ...], list[str]] = {}
    for site in listing.sites:
        times = f"{site.experts} x " if site.experts else ""
        kind = (path_in_layer(site.path), _module(site), f"{times}{site.k}", f"{site.n}")
        kinds.setdefault(kind, []).append(site.path)
    header = ("linear", "module", "k", "n", "sites", "layers")
    print_table(header, [(*kind, f"{len(paths)}", _layers(paths)) for kind, paths in kinds.items()])
    for line in _reasons(listing.left_alone):
        print(line)


def _reasons(left_alone: Iterable[LeftAlone]) -> Iterator[str]:
    kinds: dict[tuple[str, str], list[str]] = {}
    for item in left_alone:
        kinds.setdefault((path_in_layer(item.path), item.reason), []).append(item.path)
    for (name, reason), paths in kinds.items():
        yield f"left alone: {name} x {len(paths)}: {reason}"


def _module(site: Site) -> str:
    return site.module.name if site.module else "-"


def _layers(paths: Sequence[str]) -> str:
    """The layers of paths in short: `0-29`, or `0, 2-4`."""
    layers = sorted({layer for path in paths if (layer := layer_of(path)) is not None})
    runs = groupby(enumerate(layers), key=lambda numbered: numbered[1] - numbered[0])
    ends = [[layer for _, layer in run] for _, run in runs]
    return ", ".join(f"{run[0]}-{run[-1]}" if run[1:] else f"{run[0]}" for run in ends) or "-"
