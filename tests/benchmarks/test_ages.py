"""How old measured numbers are."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import ages


def test_changes_of_the_package_since_a_measurement_are_counted(
    git: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "benchmarks" / "results"
    (tmp_path / "curvopt").mkdir()
    results.mkdir(parents=True)
    commits = []
    for number, file in enumerate(["curvopt/a.py", "curvopt/a.py", "readme", "curvopt/a.py"]):
        (tmp_path / file).write_text(str(number))
        git("add", "-A")
        git("commit", "-qm", str(number))
        commits.append(git("rev-parse", "--short", "HEAD").strip())

    def write(*of: str) -> None:
        rows = {f"Q{i}": {"curvopt": {"commit": c, "date": "2030-01-02T03:04"}} for i, c in enumerate(of)}
        others = {"opacus": {"commit": "0000000", "date": "2000-01-01T00:00"}}
        content = {"machine": {"commit": "0000000", "date": "2000-01-01T00:00"}, "rows": {**rows, "Q": others}}
        (results / ages.README).write_text(json.dumps(content))

    def run(most: int) -> object:
        monkeypatch.setattr("sys.argv", ["ages", "--results", str(results), "--most", str(most)])
        with pytest.raises(SystemExit) as stop:
            ages.main()
        return stop.value.code

    write(commits[0])
    assert run(most=2) == 0
    assert f"| {ages.README} | 2030-01-02 | {commits[0]} | 2 |" in capsys.readouterr().out
    assert "older than 1 commits" in str(run(most=1))
    write(commits[0], commits[1])
    assert "is of 2 commits" in str(run(most=2))
    write("1234567")  # of another repository
    assert "older" in str(run(most=2))
