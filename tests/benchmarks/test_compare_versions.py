"""The comparison of two versions of the package: what it finds, and what it leaves to its list of reasons."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import compare_versions
from benchmarks.compare_versions import INTENDED, ROOT, difference, report
from benchmarks.one_version import Computed, Failed, Loop


def computed(*entries: float, sampled: bool = False) -> Computed:
    return Computed({"weight": [torch.tensor(entries)]}, sampled)


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        (computed(1.0, 2.0), computed(1.0, 2.0 + 1e-9), None),
        (computed(1.0, 2.0), computed(1.0, 2.001), "differs"),
        (computed(1.0, 2.0), computed(1.0, float("nan")), "differs"),
        (computed(1.0, 2.0), computed(1.0), "differs"),
        (computed(1.0), Computed({}, False), "differs"),
        (computed(1.0, sampled=True), computed(2.0, sampled=True), "drawn otherwise"),
        (computed(1.0), Failed(True, "no"), "refused now"),
        (Failed(True, "no"), computed(1.0), "refused before"),
        (Failed(True, "no"), Failed(True, "another reason"), None),
        (Failed(True, "no"), Failed(False, "broken"), "fails otherwise"),
        (Loop([5.0, *[1.0] * 5], []), Loop([5.0, *[1.3] * 5], []), None),
        (Loop([5.0, *[1.0] * 5], []), Loop([5.0, *[1.5] * 5], []), "ends worse"),
        (Loop([5.0, *[1.0] * 5], []), Loop([5.0, *[float("nan")] * 5], []), "ends worse"),
        (Loop([5.0, *[1.0] * 5], []), Failed(False, "stopped"), "fails now"),
        (Loop([5.0, *[1.0] * 5], []), Loop([5.0, *[1.0] * 5], ["empirical"]), "warns otherwise"),
    ],
)
def test_what_differs(old: Computed, new: Computed, what: str | None) -> None:
    assert (difference(old, new) or (None,))[0] == what


def test_a_difference_with_a_reason_is_intended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    old, new = ({(name, "KFAC"): computed(value) for name in ("one", "two")} for value in (1.0, 2.0))
    assert report("fields", old, new, notes=False) == 2
    (listed := tmp_path / INTENDED.name).write_text(
        '[[fields]]\npattern = "one | * | differs"\nreason = "It is right."'
    )
    monkeypatch.setattr(compare_versions, "INTENDED", listed)
    assert report("fields", old, new, notes=False) == 1
    assert "It is right." in capsys.readouterr().out


def test_two_versions_run_the_same_programs(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "curvopt", tmp_path / "curvopt", ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / "curvopt" / "extensions" / "__init__.py").open("a") as extensions:
        extensions.write("\nVariance.update = lambda self, total, chunk: 2 * chunk.jacobian.squares()\n")
    command = [sys.executable, "-m", "benchmarks.compare_versions", "--old", str(tmp_path), "--only", "fields"]
    options = ["--filter", "network linear-no-bias", "--results", str(tmp_path)]
    found = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 1, found.stderr
    assert "differs | Variance | network linear-no-bias" in found.stdout
    assert "results; 1 differs. Not intended: 1." in found.stdout, found.stdout
