"""Packages and programs made for BackPACK: their numbers with curvopt are those with BackPACK."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import pytest
import torch
from checks import defined_in, modules_of
from compat import clients
from torch import nn

from benchmarks.agreement import default_dtype


def program(name: str) -> clients.Program:
    found = clients.BY_NAME[name]
    if not found.installed:
        pytest.skip(f"{clients.PACKAGE} or {found.needs} is not installed")
    return found


@pytest.mark.parametrize("name", [each.name for each in clients.PROGRAMS if each.name != "vivit_eigenvalues"])
def test_numbers_are_those_of_backpack(name: str):
    found = clients.verdict(program(name))
    assert found == ("equal, but " + clients.PCHMP if name == "cg_newton" else "equal")


def test_extensions_made_of_parts_for_modules_are_refused():
    assert clients.verdict(program("vivit_eigenvalues")).startswith("refused: backpack.extensions.secondorder.base")


@pytest.mark.parametrize("name", [each.name for each in clients.PROGRAMS if each.needs == clients.PACKAGE])
def test_programs_of_the_gallery_run(name: str):
    """Without BackPACK, too; where a quantity comes in two ways, both agree."""
    found = clients.numbers(clients.BY_NAME[name], served=True)
    assert found
    for one, other in (("gradients", "root"), ("at once", "by slices"), ("True", "False")):
        if one in found and other in found:
            first, second = (next(iter(v.values())) if isinstance(v, dict) else v for v in (found[one], found[other]))
            assert not clients.differences(first, second, 1e-9)


@pytest.mark.parametrize(
    "make, likelihood", [("mlp", "classification"), ("mlp", "regression"), ("cnn", "classification")]
)
def test_backends_of_laplace_agree(make: str, likelihood: str):
    """But for the factors of convolutions, of which there are several (`KFAC(approx=...)`)."""
    program("laplace_mlp")
    backend = clients.packages.laplace_backend
    network: Callable[[], nn.Sequential] = getattr(clients.packages, make)
    with clients.importing(served=True), clients.packages.missing_in_new_releases(), default_dtype(torch.float64):
        served, other = (backend(name, network, likelihood) for name in ("BackPack", "Curvlinops"))
    found = clients.differences(other, served, 1e-6)
    convolution = [f"Kronecker factors/{i}" for i in (0, 1)] if make == "cnn" else []
    assert all(any(each.startswith(layer) for layer in convolution) for each in found), found


def test_positive_curvature_is_backpacks_without_its_fault(monkeypatch: pytest.MonkeyPatch):
    newton = program("cg_newton")
    served = clients.numbers(newton, served=True)
    with clients.importing(served=False), clients.packages.missing_in_new_releases():
        base = importlib.import_module("backpack.extensions.curvmatprod.pchmp.pchmpbase").PCHMPBase

        def once(self, ext, module, g_inp, g_out, mat, modify):
            residual = self.derivatives.hessian_diagonal(module, g_inp, g_out)  # which has the gradient already
            return self.modifications[modify](residual) * mat

        monkeypatch.setattr(base, "modified_residual_mat_prod", once)
        with default_dtype(torch.float64):
            real = newton.run()
    assert not clients.differences(real, served, 1e-6)


def test_every_name_of_backpack_can_be_imported():
    pytest.importorskip(clients.PACKAGE)
    with clients.importing(served=False):
        modules = list(modules_of(importlib.import_module(clients.PACKAGE)))
        names = [(module.__name__, name) for module in modules for name, _ in defined_in(module)]
    assert len(names) > 300
    with clients.importing(served=True):
        missing = [f"{m}.{name}" for m, name in names if not hasattr(importlib.import_module(m), name)]
    assert not missing


def test_differences_are_noticed():
    tree = {"a": [1.0, torch.tensor([1.0, 0.0])], "b": {"c": 3}}
    assert clients.differences(tree, tree, 0) == []
    assert clients.differences(tree, {**tree, "b": {"c": 3.1}}, 1e-3) == ["b/c"]
    assert clients.differences(tree, {**tree, "a": [1.0, torch.tensor([1.0, 1e-2])]}, 1e-3) == ["a/1"]
    assert clients.differences(tree, {**tree, "a": [1.0, torch.tensor([1.0, 1e-4])]}, 1e-3) == []
    assert clients.differences(tree, {"a": tree["a"]}, 0) and clients.differences(tree["a"], [1.0], 0)
    assert clients.differences(torch.ones(2), torch.ones(2, 1), 0) == [""]
