"""Record what the demo prints as a picture.

python -m trt_lora.scripts.demo.record
"""

from pathlib import Path

from rich.console import Console

from trt_lora.scripts.demo.__main__ import WIDTH, demo
from trt_lora.scripts.terminal.console import run

OUTPUT = Path("docs/images/demo.svg")

# Rich's own, without the font that it would load from elsewhere.
_FORMAT = """\
<svg xmlns="http://www.w3.org/2000/svg" class="rich-terminal" viewBox="0 0 {width} {height}">
<style>
.{unique_id}-matrix {{
  font-family: monospace; font-size: {char_height}px; line-height: {line_height}px;
}}
.{unique_id}-title {{ font-size: 18px; font-weight: bold; font-family: sans-serif; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/>
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def main() -> None:
    """Run the demo in the current folder, a checkout of the project, and write the picture."""
    run(_record)


def _record() -> None:
    console = Console(record=True, width=WIDTH)
    demo(console)
    OUTPUT.write_text(recording(console), encoding="utf-8")


def recording(console: Console) -> str:
    """Return what a console that records has printed, as SVG that loads nothing."""
    return console.export_svg(title="make demo", code_format=_FORMAT, unique_id="demo")


if __name__ == "__main__":
    main()
