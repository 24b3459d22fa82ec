"""Which object of curvopt answers to which name of BackPACK, module by module."""

from __future__ import annotations

from typing import Any

from torch.nn import Flatten

from curvopt import extend, hessianfree, kroneckers
from curvopt import extensions as ours
from curvopt.compat import custom_module, utils
from curvopt.compat import extensions as own
from curvopt.compat.context import (
    CTX,
    backpack,
    convert_module_to_backpack,
    disable,
    memory_cleanup,
    weight_jac_t_save_memory,
)
from curvopt.compat.unserved import EXTENSION, instead_of, placeholder
from curvopt.utils.examples import get_mnist_dataset


def _named(*objects: Any) -> dict[str, Any]:
    return {each.__name__: each for each in objects}


def _unserved(module: str, instead: str, *names: str) -> dict[str, Any]:
    return _named(*(placeholder(f"backpack.{module}".rstrip("."), name, instead) for name in names))


def _served(*kinds: type[ours.Extension], **options: Any) -> dict[str, Any]:
    return _named(*(own.served(kind, **options) for kind in kinds))


_FIRST = {
    "batch_grad": _served(ours.BatchGrad, through_batch_norm=True),
    "batch_l2_grad": _served(ours.BatchL2Grad, through_batch_norm=True),
    "sum_grad_squared": _served(ours.SumGradSquared, through_batch_norm=True),
    "variance": _served(ours.Variance, through_batch_norm=True),
}
_SECOND = {
    "diag_ggn": _served(ours.DiagGGNExact, ours.DiagGGNMC, ours.BatchDiagGGNExact, ours.BatchDiagGGNMC),
    "diag_hessian": _served(ours.DiagHessian, ours.BatchDiagHessian),
    "hbp": _named(own.KFAC, own.KFLR, own.KFRA, own.HBP),
    "sqrt_ggn": _served(ours.SqrtGGNExact, ours.SqrtGGNMC),
}
_PRODUCTS = {"ggnmp": _served(ours.GGNMP), "hmp": _served(ours.HMP), "pchmp": _served(ours.PCHMP)}
_STRATEGIES = _named(own.LossHessianStrategy, own.BackpropStrategy, own.ExpectationApproximation)


def _all(modules: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {name: value for names in modules.values() for name, value in names.items()}


_BASES = {
    "diag_ggn": _unserved("extensions.secondorder.diag_ggn", EXTENSION, "DiagGGN", "BatchDiagGGN"),
    "sqrt_ggn": _unserved("extensions.secondorder.sqrt_ggn", EXTENSION, "SqrtGGN"),
}
_EXTENSIONS = {
    "": _all(_FIRST) | _all(_SECOND) | _all(_PRODUCTS),
    "backprop_extension": {
        **_named(own.BackpropExtension),
        "FAIL_ERROR": "ERROR",
        "FAIL_WARN": "WARNING",
        "FAIL_SILENT": "SILENT",
    },
    "firstorder": _all(_FIRST),
    **{f"firstorder.{name}": names for name, names in _FIRST.items()},
    "secondorder": _all(_SECOND),
    **{f"secondorder.{name}": names | _BASES.get(name, {}) for name, names in _SECOND.items()},
    "secondorder.hbp": _SECOND["hbp"] | _STRATEGIES,
    "secondorder.hbp.hbp_options": _STRATEGIES,
    "curvature": _named(own.Curvature),
    "curvmatprod": _all(_PRODUCTS),
    **{f"curvmatprod.{name}": names for name, names in _PRODUCTS.items()},
}

_HOOKS = _unserved("", "curvopt.extend registers its hooks itself", "hook_store_io", "hook_run_extensions")
_EQUATIONS = _unserved(
    "utils.kroneckers",
    "the functions of curvopt.kroneckers write no equations",
    *("kfac_mat_prod_einsum_equation", "get_letters"),
)

#: The names of each module, by its path in the package.
SERVED: dict[str, dict[str, Any]] = {
    "": _named(backpack, extend, disable, memory_cleanup, CTX, convert_module_to_backpack) | _HOOKS,
    "context": _named(CTX),
    **{f"extensions.{name}".rstrip("."): names for name, names in _EXTENSIONS.items()},
    "core": {},
    "core.layers": _named(Flatten),
    "core.derivatives": {},
    "core.derivatives.convnd": _named(weight_jac_t_save_memory),
    "custom_module": {},
    "custom_module.branching": {
        **_named(custom_module.SumModule, custom_module.Parallel),
        "_Branch": custom_module.Branch,
    },
    "custom_module.graph_utils": _named(custom_module.BackpackTracer, convert_module_to_backpack),
    "custom_module.pad": _named(custom_module.Pad),
    "custom_module.permute": _named(custom_module.Permute),
    "custom_module.reduce_tuple": _named(custom_module.ReduceTuple),
    "custom_module.scale_module": _named(custom_module.ScaleModule),
    "custom_module.slicing": _named(custom_module.Slicing),
    "hessianfree": {},
    "hessianfree.ggnvp": _named(hessianfree.ggn_vector_product, hessianfree.ggn_vector_product_from_plist),
    "hessianfree.hvp": _named(hessianfree.hessian_vector_product),
    "hessianfree.lop": _named(hessianfree.L_op, utils.transposed_jacobian_vector_product),
    "hessianfree.rop": _named(hessianfree.R_op, utils.jacobian_vector_product),
    "utils": {},
    "utils.convert_parameters": _named(utils.vector_to_parameter_list),
    "utils.examples": {
        **_named(utils.autograd_diag_ggn_exact, utils.get_mnist_dataloader, utils.load_one_batch_mnist),
        "load_mnist_dataset": get_mnist_dataset,
    },
    "utils.kroneckers": _named(
        kroneckers.kfacs_to_mat,
        utils.two_kfacs_to_mat,
        kroneckers.kfac_mat_prod,
        kroneckers.apply_kfac_mat_prod,
        kroneckers.inv_kfac_mat_prod,
        utils.apply_inv_kfac_mat_prod,
        kroneckers.inv_kfacs,
        utils.is_matrix,
        utils.is_vector,
        utils.is_tensor_of_order,
        utils.all_tensors_of_order,
    )
    | _EQUATIONS,
    "utils.subsampling": _named(utils.subsample),
}

_ENGINE = {
    "ModuleExtension": "extensions.module_extension",
    "SavedQuantities": "extensions.saved_quantities",
    "FirstOrderBackpropExtension": "extensions.firstorder.base",
    "SecondOrderBackpropExtension": "extensions.secondorder.base",
}
_FOUND = _all(SERVED) | {
    name: placeholder(f"backpack.{module}", name, instead_of(module) or "") for name, module in _ENGINE.items()
}
_OF_MODULES = "SumModule Pad Permute ScaleModule Slicing LossHessianStrategy SecondOrderBackpropExtension"
#: Names that BackPACK's modules import from one another, and that programs take from there.
_IMPORTED = {
    "": "BackpropExtension",
    "context": "BackpropExtension",
    "custom_module.graph_utils": "SumModule Permute ReduceTuple ScaleModule _Branch",
    "extensions.backprop_extension": "ModuleExtension SavedQuantities",
    **{f"extensions.firstorder.{name}": "FirstOrderBackpropExtension" for name in _FIRST},
    **{f"extensions.secondorder.{name}": f"{_OF_MODULES} Curvature" for name in _SECOND},
    **{f"extensions.curvmatprod.{name}": "SecondOrderBackpropExtension" for name in _PRODUCTS},
    "hessianfree.ggnvp": "hessian_vector_product L_op R_op",
    "hessianfree.hvp": "R_op",
    "utils.examples": "ggn_vector_product vector_to_parameter_list",
}
for _path, _names in _IMPORTED.items():
    SERVED[_path] = {name: _FOUND[name] for name in _names.split()} | SERVED[_path]
