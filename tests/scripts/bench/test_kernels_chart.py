"""The kernels' chart: drawn from the page beside it, and the one in the repository is current."""

import re

from support.doc_blocks import ROOT

from trt_lora.scripts.bench.kernels_chart import OUTPUT, SOURCE, drawn, kernels_chart


def test_the_chart_in_the_repository_is_that_of_the_table() -> None:
    chart = kernels_chart((ROOT / SOURCE).read_text())
    assert (ROOT / OUTPUT).read_text() == drawn(chart)
    assert [bar.value for bar in chart.bars] == [273, 393, 1203, 783]


def test_bars_are_as_long_as_their_numbers_and_texts_stay_inside() -> None:
    svg = (ROOT / OUTPUT).read_text()
    widths = [int(width) for width in re.findall(r'<rect [^>]*width="(\d+)"', svg)]
    longest = max(widths)
    assert [round(1203 * width / longest / 10) for width in widths] == [27, 39, 120, 78]
    (whole,) = re.findall(r'<svg [^>]* width="(\d+)"', svg)
    texts = re.findall(r'<text x="(\d+)"[^>]*>([^<]*)</text>', svg)
    assert len(texts) == 8
    assert all(int(x) + 7.5 * len(text) <= int(whole) for x, text in texts)
