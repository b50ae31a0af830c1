"""Links between documents lead somewhere; those of the README do so on a package index, too."""

import re
import tomllib

import pytest
from support.doc_blocks import ROOT

SOURCE: str = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Source"]
DOCUMENTS = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/**/*.md"))


def targets(document: str) -> list[str]:
    """The targets of a document's links, inline and by reference, without their anchors."""
    text = (ROOT / document).read_text(encoding="utf-8")
    found = re.findall(r"\]\(([^)\s]+)\)|^\[[^\]]+\]: (\S+)$", text, re.MULTILINE)
    return [(inline or reference).partition("#")[0] for inline, reference in found]


def test_every_link_of_the_readme_is_absolute_and_ours_name_files_that_exist() -> None:
    links = targets("README.md")
    assert links
    assert [link for link in links if not link.startswith("https://")] == []
    ours = [link for link in links if link.startswith(SOURCE)]
    assert ours
    paths = [re.sub(f"^{re.escape(SOURCE)}/(blob|raw)/main/", "", link) for link in ours]
    missing = [path for path in paths if not (ROOT / path).is_file()]
    assert missing == []


def test_every_reference_of_the_readme_is_defined_and_used() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    defined = re.findall(r"^\[([^\]]+)\]: ", text, re.MULTILINE)
    used = re.findall(r"\[((?:docs/)?[\w/-]+\.(?:md|ipynb)|docs/[\w/-]+)\](?![:(])", text)
    assert set(used) == set(defined)


@pytest.mark.parametrize("document", ["CONTRIBUTING.md", "CHANGELOG.md", *DOCUMENTS])
def test_the_links_of_a_document_lead_to_files(document: str) -> None:
    links = [link for link in targets(document) if link and not link.startswith("https://")]
    folder = (ROOT / document).parent
    assert [link for link in links if not (folder / link).exists()] == []
