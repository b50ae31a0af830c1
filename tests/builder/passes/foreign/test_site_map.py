"""ModuleNames and widths of a user's own."""

import json
from pathlib import Path

import pytest

from trt_lora.builder.passes.foreign.site_map import SiteMap, read_site_map
from trt_lora.plugins.errors import ConfigError


def test_a_file_renames_paths_and_gives_widths(tmp_path: Path) -> None:
    fields = {"rename": {"^unet[.]": "", "attn": "self_attn"}, "parts": {"to_qkv": [4, 2, 2]}}
    path = tmp_path / "sites.json"
    path.write_text(json.dumps(fields))
    site_map = read_site_map(path)
    assert site_map.renamed("unet.0.attn.to_qkv") == "0.self_attn.to_qkv"
    assert site_map.widths("0.self_attn.to_qkv") == (4, 2, 2)
    assert site_map.widths("0.not_to_qkv") == ()
    assert read_site_map(None).renamed("unet.fc") == "unet.fc"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "cannot be read"),
        ('{"renames": {}}', "'renames' is not known"),
        ('{"parts": {"qkv": 3}}', "expected a list"),
        ('{"rename": {"(": "x"}}', "renames nothing"),
        ('{"rename": {"a": "\\\\1"}}', "renames nothing"),
    ],
)
def test_a_file_that_says_nothing_useful_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "sites.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=reason):
        read_site_map(path)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--site-map .*none\.json"):
        read_site_map(tmp_path / "none.json")


def test_a_replacement_names_groups_of_its_own_pattern() -> None:
    assert SiteMap({r"node_(\d+)": r"layers.\1.fc"}).named("node_12") == "layers.12.fc"
    assert SiteMap({r"node_(\d+)": r"layers.\1.fc"}).named("node_12_extra") == ""
