"""``import curvopt`` is enough, for a program and for a type checker; `fields.py`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import curvopt
from curvopt import CurvoptError, backpack, extend, extensions, field
from curvopt.extensions import HMP, KFAC

ROOT = Path(__file__).parents[1]

PROGRAM = """
import sys, curvopt
assert "curvopt.optim" not in sys.modules, "the optimizers were imported before they were looked up"
for name in dir(curvopt):
    getattr(curvopt, name)
curvopt.optim.KFACSGD, curvopt.extensions.KFAC, curvopt.testing.check, curvopt.hessianfree.R_op
assert not hasattr(curvopt, "optimizers") and not hasattr(curvopt, "KFACAdamW")
try:
    from curvopt import KFACAdamW
except ImportError as error:
    assert "write `from curvopt.optim import KFACAdamW`" in str(error), error
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
from torch import Tensor, nn
from typing_extensions import assert_type
from curvopt import extensions, field, optim
from curvopt.extensions import BatchGrad, DiagGGNMC, DiagHessian, HMP, KFAC, SqrtGGNExact, Variance

model = curvopt.extend(nn.Linear(2, 2))
optim.KFACSGD(model.parameters()).coverage()
with curvopt.backpack(curvopt.extensions.KFAC(), extensions.BatchGrad()):
    pass
for p in model.parameters():
    assert_type(field(p, BatchGrad), Tensor)
    assert_type(field(p, Variance), Tensor)
    assert_type(field(p, DiagGGNMC), Tensor)
    assert_type(field(p, DiagHessian()), Tensor)
    assert_type(field(p, SqrtGGNExact), Tensor)
    assert_type(field(p, KFAC).transposed, bool)
    assert_type(field(p, HMP("other"))(p), Tensor)
    for factor in field(p, KFAC(mc_samples=2)):
        assert_type(factor, Tensor)
    field(p, KFAC).square()  # ERROR: a list
    field(p, "kfac")  # ERROR: no extension
curvopt.optimizers  # ERROR
"""


MYPY = pytest.param("mypy", marks=pytest.mark.slow(reason="reads the types of PyTorch anew"))


@pytest.mark.parametrize("checker", ["pyright", MYPY])
def test_type_checkers_know_modules_and_fields(checker: str, tmp_path: Path):
    pytest.importorskip(checker)
    program = "\n".join(re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)) + TYPED
    assert "backpack" in program.removesuffix(TYPED)
    (tmp_path / "user.py").write_text(program)
    options = {
        "pyright": ["--pythonpath", sys.executable],
        "mypy": ["--config-file=", "--hide-error-context"],
    }
    done = run(sys.executable, "-m", checker, *options[checker], str(tmp_path / "user.py"))
    expected = {n for n, line in enumerate(program.splitlines(), 1) if "# ERROR" in line}
    found = {int(n) for n in re.findall(r"user\.py:(\d+):.*error", done.stdout)}
    assert found == expected, done.stdout + done.stderr


def test_every_extension_has_a_type():
    """The bases that `curvopt.field` tells apart are those of all extensions."""
    from curvopt.extensions import firstorder, products, secondorder

    tensors = (secondorder.Diagonal, secondorder._Root, secondorder.EigenDiagonal)
    known = (*tensors, secondorder._Kronecker, products._Product)
    kinds = [getattr(extensions, name) for name in extensions.__all__ if name != "Extension"]
    rest = {kind for kind in kinds if not issubclass(kind, known)}
    assert rest == {firstorder.BatchGrad, firstorder.BatchL2Grad, firstorder.SumGradSquared, firstorder.Variance}


def test_field_is_the_attribute_or_an_error_that_names_it():
    model, lossfunc = extend(nn.Linear(3, 2)), extend(nn.MSELoss())
    with backpack(KFAC(), HMP(savefield="products")):
        lossfunc(model(torch.randn(4, 3)), torch.randn(4, 2)).backward()
    assert field(model.weight, KFAC) is model.weight.kfac
    assert field(model.bias, HMP(savefield="products")) is model.bias.products
    with pytest.raises(CurvoptError, match=r"weight has no field hmp.*backpack\(HMP\(\.\.\.\)\)"):
        field(model.weight, HMP)
