"""The README's table says what its result file says, and every path that a document links to exists."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from scripts import readme_table

ROOT = Path(__file__).resolve().parents[1]
PAGES = [page for pattern in ("*.md", "docs/*.md", "data/*.md", "kernels/**/*.md") for page in ROOT.glob(pattern)]


def test_the_table_is_that_of_the_result_file() -> None:
    text = readme_table.README.read_text(encoding="utf-8")
    assert readme_table.filled(text, json.loads(readme_table.RESULTS.read_text(encoding="utf-8"))) == text


def test_the_readme_is_short() -> None:
    assert len(readme_table.README.read_text(encoding="utf-8").splitlines()) <= 100


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    prose = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    links = re.findall(r"\]\((?!https?://|#)([^)#\s]+)", prose)
    missing = [link for link in links if not (page.parent / link).exists()]
    assert not missing, missing
