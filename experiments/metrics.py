"""The rows of a run directory's ``metrics.jsonl``."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]


def read_metrics(run: Path, size: int = -1) -> list[Row]:
    """The rows of a run directory's ``metrics.jsonl``, or of its first ``size`` bytes.

    Raises:
        ValueError: a row is no JSON, or the file is shorter.
    """
    with open(run / "metrics.jsonl", "rb") as file:
        content = file.read(size)
    if len(content) < size:
        raise ValueError(f"metrics.jsonl has {len(content)} bytes in place of {size}")
    return [json.loads(line) for line in content.splitlines()]


def evaluations(rows: Sequence[Row]) -> list[Row]:
    """Those rows that evaluate the whole training set and the held-out data."""
    return [row for row in rows if "train/loss" in row]
