"""Every Python block of the documentation runs, those of one file after each other in one namespace.

A block that cannot run by itself has ``<!-- fragment -->`` on the line before it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
BLOCK = re.compile(r"^(?P<fragment><!-- fragment -->\n+)?```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(text: str) -> Iterator[tuple[int, str]]:
    """Number of the line before a block, and the block."""
    for match in BLOCK.finditer(text):
        if not match["fragment"]:
            yield text.count("\n", 0, match.start("code")), match["code"]


RUNNABLE = [page for page in PAGES if any(blocks(page.read_text()))]


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    dtype = torch.get_default_dtype()
    yield
    torch.set_default_dtype(dtype)


@pytest.mark.parametrize("page", RUNNABLE, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_page(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__main__"}
    for line, code in blocks(page.read_text()):
        # empty lines in front, so that a traceback points at the line of the page
        exec(compile("\n" * line + code, str(page), "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_python_block_is_found(page: Path):
    text = page.read_text()
    assert text.count("```python") == len(BLOCK.findall(text))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_to_files(page: Path):
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
        if target.startswith("gallery/"):  # made of the examples when the documentation is built
            name = target.removeprefix("gallery/")
            assert name == "index" or (ROOT / "examples" / f"{name}.py").exists(), f"there is no example {name}"
        else:
            assert (page.parent / target).exists(), f"{target} does not exist"
