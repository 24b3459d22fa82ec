r"""The quadratic model of an objective around the parameters, by products with vectors.

    q(δ) = f(θ) + gᵀδ + ½ δᵀ B δ,        B = Jᵀ H J + weight decay

J is the Jacobian of the network's outputs z in θ, H the Hessian of the loss in z: both are read off the graph of the
loss, and a product with B costs about 4/3 gradients. Nothing is stored but vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import inf, isfinite

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from curvopt.core.graph import records_behind
from curvopt.core.losses.any import loss_weight
from curvopt.core.losses.known import KnownLoss, find_terms
from curvopt.core.losses.roots import LossCurvature
from curvopt.core.nodes import precisions
from curvopt.core.record import TermCall
from curvopt.core.vjp import listen, own_backward
from curvopt.distributed import Ranks, mean_of
from curvopt.errors import CurvoptError
from curvopt.hessianfree.cg import dot
from curvopt.hessianfree.lop import L_op, check_differentiable
from curvopt.hessianfree.rop import linearise
from curvopt.optim.closures import Closure

Vector = list[Tensor]  # like the parameters


class Differentiated:
    """The gradient of ``Σ_i c_i root_i``, and the factor by which each loss and each regularizer enters that sum.

    Args:
        roots: tensors; their graph is kept.
        cotangents: ``c_i``, like the roots.
        parameters: those to differentiate with respect to.

    Attributes:
        gradient: like the parameters.
        losses: the known terms of the sum.
        terms: calls of ``L2Regularizer``, each with its gradient in the backward.
        is_known: whether the roots are a linear function of losses that are known.
    """

    def __init__(self, roots: Sequence[Tensor], cotangents: Sequence[Tensor], parameters: Sequence[Tensor]):
        self.terms: list[tuple[TermCall, Tensor]] = []
        leaves = {get_gradient_edge(p).node for p in parameters}
        nodes = [root.grad_fn for root in roots if root.grad_fn is not None]
        found = find_terms([(root.grad_fn, root.output_nr) for root in roots if root.grad_fn is not None], leaves)
        found.receive([c for root, c in zip(roots, cotangents, strict=True) if root.grad_fn is not None])
        self.losses: list[KnownLoss] = found.known
        self.roots, self.cotangents, self.parameters = roots, cotangents, parameters
        self.is_known = bool(found.known) and not found.nonlinear
        handles = [listen(edge, partial(self._term, term)) for term, edge in records_behind(nodes, TermCall)]
        try:
            with own_backward():
                self.gradient: Vector = list(
                    torch.autograd.grad(roots, parameters, cotangents, retain_graph=True, materialize_grads=True)
                )
        finally:
            for handle in handles:
                handle.remove()

    def twice(self) -> Vector:
        """The gradient with its graph."""
        check_differentiable("HessianFree", self.roots, twice=True)
        with torch.enable_grad():
            return list(L_op(self.roots, self.parameters, self.cotangents, detach=False))

    @property
    def weight(self) -> Tensor:
        """How many means over the samples the roots are, if their losses are not known."""
        edges = [get_gradient_edge(root) for root in self.roots]
        return loss_weight(edges, [cotangent.detach() for cotangent in self.cotangents], 1, "mean")

    def _term(self, use: TermCall, grad: Tensor) -> None:
        self.terms.append((use, grad))


class QuadraticModel:
    """Gradient and Gauss-Newton matrix of the objective at the parameters that the graph was built with.

    If its losses are not known, or not convex in their input, the Hessian takes the place of the Gauss-Newton matrix.

    Args:
        differentiated: the losses.
        parameters: θ.
        decays: weight decay of each.
        ranks: those that train together; the objective is the mean of their losses.

    Attributes:
        gradient: ``g``.
        shifts: multiples of the identity in ``B``, by parameter.
        weight: how many mean losses the objective is, see `curvopt.backpack.loss_weight`.
        is_hessian: whether ``B`` is the Hessian.
    """

    def __init__(
        self,
        differentiated: Differentiated,
        parameters: Sequence[Tensor],
        decays: Sequence[float],
        ranks: Ranks | None = None,
    ):
        self.parameters, self._ranks = parameters, ranks
        gradient = mean_of(ranks, differentiated.gradient)
        self.gradient = [g + decay * p for g, p, decay in zip(gradient, parameters, decays, strict=True)]
        self.shifts: list[float | Tensor] = list(decays)
        for use, grad in differentiated.terms:
            regularized = set(use.parameters)
            self.shifts = [
                shift + use.weight * grad if p in regularized else shift
                for shift, p in zip(self.shifts, parameters, strict=True)
            ]
        self._curvatures: list[LossCurvature] = []
        self._slopes: list[Tensor] = []
        try:
            if differentiated.is_known:
                self._curvatures = [loss.curvature() for loss in differentiated.losses]
        except CurvoptError:
            self._curvatures = []
        self.is_hessian = not self._curvatures
        if self.is_hessian:
            self._gradient = differentiated.twice()
            weight = differentiated.weight.to(parameters[0].device, torch.float64)
        else:
            weight = self._gauss_newton(differentiated)
        self.weight = float(mean_of(ranks, [weight])[0])

    def _gauss_newton(self, differentiated: Differentiated) -> Tensor:
        """Prepare products with the Gauss-Newton matrix; returns how many mean losses the objective is."""
        weight = torch.zeros((), dtype=torch.float64, device=self.parameters[0].device)
        for loss, curvature in zip(differentiated.losses, self._curvatures, strict=True):
            assert curvature.weights is not None
            weight += curvature.weights.sum().to(weight)
            with torch.enable_grad(), own_backward():
                self._slopes.append(loss.slope())
        self._edges = [loss.edge for loss in differentiated.losses]
        self._inputs = [loss.input for loss in differentiated.losses]
        self._jacobian = linearise(self._edges, self.parameters, self._inputs)
        self._checked = False
        return weight

    def product(self, v: Vector) -> Vector:
        """``B v``.

        Raises:
            CurvoptError: if an operation of the network has no second derivative.
        """
        try:
            Cv = self._hessian_times(v) if self.is_hessian else self._gauss_newton_times(v)
        except RuntimeError as error:
            if isinstance(error, CurvoptError) or not any(w in str(error) for w in ("derivative", "double backward")):
                raise
            raise CurvoptError(
                f"HessianFree: PyTorch has no second derivative of an operation of the network ({error}). Attention "
                "has one unless a kernel other than SDPBackend.MATH is chosen for it, cuDNN's recurrent nets with "
                "torch.backends.cudnn.flags(enabled=False), compiled models before they are compiled."
            ) from error
        return [Ct + shift * t for Ct, shift, t in zip(mean_of(self._ranks, Cv), self.shifts, v, strict=True)]

    def _hessian_times(self, v: Vector) -> Sequence[Tensor]:
        curved = [(slope, t) for slope, t in zip(self._gradient, v, strict=True) if slope.requires_grad]
        if not curved:
            return [torch.zeros_like(p) for p in self.parameters]
        return L_op([slope for slope, _ in curved], self.parameters, [t for _, t in curved])

    def _gauss_newton_times(self, v: Vector) -> Sequence[Tensor]:
        """Forwards through the network (R-operator), the Hessian of the loss, and backwards."""
        Jv = self._jacobian(v)
        HJv = [_hessian_product(*term) for term in zip(self._slopes, self._edges, Jv, strict=True)]
        if not self._checked:
            self._check_transposed(v, Jv)
        return self._pulled_back(HJv)

    def _check_transposed(self, v: Vector, Jv: Sequence[Tensor]) -> None:
        """Check ``uᵀ (J v) = vᵀ (Jᵀ u)``: J v is wrong where a backward hides its operations from autograd."""
        self._checked = True
        u = [slope.detach().to(z.dtype) for slope, z in zip(self._slopes, self._inputs, strict=True)]
        Jtu = self._pulled_back(u)
        left, right = dot(u, Jv), dot(v, Jtu)
        eps = max(torch.finfo(dtype).eps for dtype in precisions([edge.node for edge in self._edges]))
        # near a minimum the samples' terms of Jᵀu cancel, and its rounding errors are those of J v
        lengths = (dot(v, v) * dot(Jtu, Jtu)) ** 0.5 + (dot(u, u) * dot(Jv, Jv)) ** 0.5
        rounding = 100 * eps * lengths + torch.finfo(torch.float32).tiny
        if abs(left - right) > eps**0.3 * max(abs(left), abs(right)) + rounding:
            raise CurvoptError(
                "HessianFree: the Jacobian of the network by double backward is not that by backward "
                f"({left:.6g} and {right:.6g}). An autograd.Function or hook in it does something in its backward that "
                "PyTorch cannot differentiate (.data, .detach(), numpy, in-place changes)."
            )

    def _pulled_back(self, vectors: Vector) -> Sequence[Tensor]:
        with own_backward():
            return torch.autograd.grad(self._edges, self.parameters, vectors, retain_graph=True, materialize_grads=True)


def _hessian_product(slope: Tensor, edge: GradientEdge, u: Tensor) -> Tensor:
    """``H u`` from the gradient of a loss with respect to the tensor at ``edge``."""
    if not slope.requires_grad:
        return torch.zeros_like(u)
    with own_backward():
        (Hu,) = torch.autograd.grad(slope, edge, u.to(slope.dtype), retain_graph=True, allow_unused=True)
    return torch.zeros_like(u) if Hu is None else Hu


class Objective:
    """``f(θ + δ)`` by a closure: first with its graph, then for other δ without side effects.

    Args:
        closure: as for `HessianFree.step`.
        parameters: θ.
        decays: weight decay of each.
        sign: -1 to maximise the value of the closure.
        ranks: those that train together; f is the mean over them.

    Attributes:
        start: ``f(θ)``.
        resolution: change of f by rounding alone.
        evaluations: how often it was called.
    """

    def __init__(
        self,
        closure: Closure,
        parameters: Sequence[Tensor],
        decays: Sequence[float],
        sign: float = 1.0,
        ranks: Ranks | None = None,
    ):
        self.closure, self.parameters, self.decays, self.sign, self.ranks = closure, parameters, decays, sign, ranks
        self.theta = [p.detach().clone() for p in parameters]
        self.evaluations = 0

    def differentiate(self) -> Differentiated:
        """Run the closure normally, but keep the graph.

        Raises:
            CurvoptError: if it computes no loss, or one that is not known.
        """
        self.closure.first(keep_graph=True)
        self.evaluations += 1
        self.start = self._value(self.closure.start)
        self.resolution = self.closure.eps * abs(self.start)
        return Differentiated(self.closure.roots, [self.sign * c for c in self.closure.cotangents], self.parameters)

    def __call__(self, delta: Vector) -> float:
        """Value at θ + δ, infinite if it is not finite. The parameters stay there until `return_to_start`."""
        # through .data, which leaves the version alone: the graph at θ is used again when they are back there
        for p, old, d in zip(self.parameters, self.theta, delta, strict=True):
            p.data.copy_(old + d)
        self.evaluations += 1
        value = self._value(self.closure.again())
        return value if isfinite(value) else inf

    def return_to_start(self) -> None:
        """Put the parameters back, bit for bit."""
        for p, old in zip(self.parameters, self.theta, strict=True):
            p.data.copy_(old)

    def _value(self, of_closure: float) -> float:
        (mean,) = mean_of(self.ranks, [torch.tensor(of_closure, dtype=torch.float64, device=self.parameters[0].device)])
        decayed = [(decay, p) for decay, p in zip(self.decays, self.parameters, strict=True) if decay != 0]
        return self.sign * float(mean) + sum(decay / 2 * float(p.square().sum()) for decay, p in decayed)
