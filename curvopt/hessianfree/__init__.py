"""Products with Jacobians, Hessians and Gauss-Newton matrices of a whole net, matrix-free, and conjugate gradients."""

from curvopt.hessianfree.cg import Solution, cg
from curvopt.hessianfree.ggnvp import ggn_vector_product, ggn_vector_product_from_plist
from curvopt.hessianfree.hvp import hessian_vector_product
from curvopt.hessianfree.lop import L_op
from curvopt.hessianfree.rop import R_op

__all__ = [
    "L_op",
    "R_op",
    "Solution",
    "cg",
    "ggn_vector_product",
    "ggn_vector_product_from_plist",
    "hessian_vector_product",
]
