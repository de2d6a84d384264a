"""Keys of torch.compile's caches change with our ops."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from efla_lm.parallel import compile_cache as caches


def test_the_tag_follows_every_source(tmp_path: Path) -> None:
    """Contents, names and places count, other files do not; the same sources elsewhere are the same."""
    tags = set()
    for number, (name, text) in enumerate(
        [("a.py", "x = 1"), ("a.py", "x = 2"), ("b.py", "x = 1"), ("in/a.py", "x = 1")]
    ):
        for copy in ("here", "there"):
            path = tmp_path / copy / str(number) / name
            path.parent.mkdir(parents=True)
            path.write_text(text)
        tags.add(caches.source_tag(tmp_path / "here" / str(number)))
        assert caches.source_tag(tmp_path / "there" / str(number)) in tags
        (tmp_path / "here" / str(number) / "notes.txt").write_text("x")
        assert caches.source_tag(tmp_path / "here" / str(number)) in tags
    assert len(tags) == 4


def test_what_a_user_has_put_there_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler.config, "cache_key_tag", "mine-")
    caches.tag_caches()
    caches.tag_caches()
    assert torch.compiler.config.cache_key_tag == "mine-" + caches.source_tag()
