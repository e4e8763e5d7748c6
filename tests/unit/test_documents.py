"""Documents hold no placeholders, and what they link to exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")])


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_document_is_complete(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    assert "@@" not in text
    links = re.findall(r"\]\(([^)#:]+)\)", text)
    assert [link for link in links if not (document.parent / link).exists()] == []


def test_the_first_page_shows_a_run() -> None:
    """One sentence, the two commands, real output and the picture within the first 40 lines."""
    first_page = "\n".join((ROOT / "README.md").read_text(encoding="utf-8").splitlines()[:40])
    for part in ("make demo", "make test", "tokens equal", "docs/flow.svg"):
        assert part in first_page, part
