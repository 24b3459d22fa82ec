"""The script that runs tests in processes of their own notices those that need leftovers of another."""

from __future__ import annotations

import time
from pathlib import Path

import alone

LEFTOVERS = """
left = []

def test_leaves_something():
    left.append(1)

def test_needs_it():
    assert left
"""


def test_a_test_that_needs_another_one_fails(tmp_path: Path):
    file = tmp_path / "test_leftovers.py"
    file.write_text(LEFTOVERS)
    soon = time.monotonic() + 60
    assert alone.failure(str(file), soon) == ""  # both, one after the other
    assert alone.failure(f"{file}::test_leaves_something", soon) == ""
    assert "assert left" in (alone.failure(f"{file}::test_needs_it", soon) or "")
    assert alone.failure(str(file), time.monotonic() - 1) is None  # too late
