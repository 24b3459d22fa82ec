"""``import curvopt`` is enough, for a program and for a type checker."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import curvopt

ROOT = Path(__file__).parents[1]

PROGRAM = """
import sys, curvopt
assert "curvopt.optim" not in sys.modules, "the optimizers were imported before they were looked up"
for name in dir(curvopt):
    getattr(curvopt, name)
curvopt.optim.KFACSGD, curvopt.extensions.KFAC, curvopt.testing.check, curvopt.hessianfree.R_op
assert not hasattr(curvopt, "optimizers")
assert "curvopt.as_backpack" not in sys.modules
"""


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )


def test_modules_are_imported_when_they_are_looked_up():
    done = run(sys.executable, "-c", PROGRAM)
    assert not done.returncode, done.stderr


def test_dir_shows_the_public_names():
    assert {*curvopt.__all__, "extensions", "optim", "testing", "hessianfree", "extending"} <= set(dir(curvopt))
    assert not {"core", "compat", "import_module"} & set(dir(curvopt))


TYPED = """
import curvopt
from torch import nn
from curvopt import optim

model = curvopt.extend(nn.Linear(2, 2))
optim.KFACSGD(model.parameters()).coverage()
with curvopt.backpack(curvopt.extensions.KFAC(), curvopt.extensions.BatchGrad()):
    pass
curvopt.optimizers  # ERROR
"""


def errors(lines: str, program: str) -> None:
    """The lines that a type checker complains about are those with a comment that says so."""
    expected = [n for n, line in enumerate(program.splitlines(), 1) if "# ERROR" in line]
    found = [
        int(line.split(".py:")[1].split(":")[0])
        for line in lines.splitlines()
        if ": error" in line or " - error" in line
    ]
    assert found == expected, lines


def test_pyright_sees_the_modules(tmp_path: Path):
    pytest.importorskip("pyright")
    (tmp_path / "user.py").write_text(TYPED)
    errors(
        run(sys.executable, "-m", "pyright", "--pythonpath", sys.executable, str(tmp_path / "user.py")).stdout, TYPED
    )
