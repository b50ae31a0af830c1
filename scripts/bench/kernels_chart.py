"""Draw how many kernels LoRA adds, from the first table of docs/benchmarks/kernels.md.

python -m trt_lora.scripts.bench.kernels_chart
"""

from pathlib import Path
from xml.sax.saxutils import escape

from trt_lora.scripts.report.bars import Bar, Chart

SOURCE, OUTPUT = Path("docs/benchmarks/kernels.md"), Path("docs/images/kernels.svg")
_WIDTH, _LABEL, _BARS, _STEP, _TOP = 800, 160, 300, 30, 44

_STYLE = """
  text { font: 14px system-ui, sans-serif; fill: #1b1f24; }
  .title { font-weight: 600; } .ours { fill: #3f7d0c; } .other { fill: #8c959f; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; } .ours { fill: #76b900; } .other { fill: #6e7681; }
  }
"""


def kernels_chart(markdown: str) -> Chart:
    """Return the bars of the first table: layout, kernels, added, added a layer, copies."""
    lines = markdown[markdown.index("| layout |") :].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:6]]
    bars = (_bar(name, kernels, *more) for name, kernels, *more in rows)
    return Chart("Kernels of one decode step, SmolLM2-135M on TensorRT-RTX", tuple(bars))


def _bar(name: str, kernels: str, added: str, a_layer: str, copies: str) -> Bar:
    text = kernels
    if added:
        text += f"  (+{a_layer} a layer"
        text += f", {copies} copies of A and B)" if int(copies) else ")"
    return Bar(name, float(kernels), text, name in ("plugin", "without LoRA"))


def drawn(chart: Chart) -> str:
    """Return the chart as SVG, for light and dark pages."""
    height = _TOP + _STEP * len(chart.bars)
    rows = "\n".join(_row(chart, bar, _TOP + _STEP * n) for n, bar in enumerate(chart.bars))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        f'width="{_WIDTH}" height="{height}" role="img">\n<title>{escape(chart.title)}</title>\n'
        f"<style>{_STYLE}</style>\n"
        f'<text class="title" x="0" y="20">{escape(chart.title)}</text>\n{rows}\n</svg>\n'
    )


def _row(chart: Chart, bar: Bar, top: int) -> str:
    width = round(chart.percent(bar) / 100 * _BARS)
    kind = "ours" if bar.is_ours else "other"
    return (
        f'<text x="0" y="{top + 14}">{escape(bar.label)}</text>'
        f'<rect class="{kind}" x="{_LABEL}" y="{top}" width="{width}" height="18"/>'
        f'<text x="{_LABEL + width + 8}" y="{top + 14}">{escape(bar.text)}</text>'
    )


def main() -> None:
    """Write the chart, in a checkout of the project."""
    OUTPUT.write_text(drawn(kernels_chart(SOURCE.read_text(encoding="utf-8"))), encoding="utf-8")


if __name__ == "__main__":
    main()
