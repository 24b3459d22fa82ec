r"""Hessian-free optimization (Martens 2010; Martens & Sutskever 2012), after Schraudolph (2002) and Pearlmutter (1994).

Each step minimises a quadratic model of the objective f around the parameters θ, with damping λ,

    q(δ) = f(θ) + gᵀδ + ½ δᵀ B δ + ½ λ ‖δ‖²,        B = Jᵀ H J + weight decay,

by conjugate gradients. J is the Jacobian of the network's outputs z in θ, H the Hessian of the loss in z: both are read
off the graph of the closure's loss, and a product with B costs about 4/3 gradients. Nothing is stored but vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import inf, isfinite, isnan, nan
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.attention import SDPBackend, sdpa_kernel

from curvopt.core.derivatives.functional_losses import find_losses
from curvopt.core.derivatives.losses import LossCurvature
from curvopt.core.graph import records_behind
from curvopt.core.jacobians import widened
from curvopt.core.residuals import precisions
from curvopt.core.uses import Loss, TermUse, listen, unheard
from curvopt.distributed import Peers, peers_of
from curvopt.errors import CurvoptError
from curvopt.hessianfree.cg import Product, Solution, cg, dot
from curvopt.hessianfree.rop import linearise
from curvopt.optim.base import CurvatureOptimizer, check_new_group
from curvopt.optim.closures import Closure, without_autocast

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Vector = list[Tensor]  # like the parameters

# ------------------------------------------------------------------------------------------------ the quadratic model


class Differentiated:
    """The gradient of ``Σ_i c_i root_i``, and the factor by which each loss and each regularizer enters that sum.

    Args:
        roots: tensors; their graph is kept.
        cotangents: ``c_i``, like the roots.
        parameters: what to differentiate with respect to.

    Attributes:
        gradient: like the parameters.
        losses: with what arrives at them in the backward, and where their inputs lie.
        terms: instances of ``L2Regularizer`` that were called, with what arrives at them.

    Raises:
        CurvoptError: if the roots are no linear function of losses that are known.
    """

    def __init__(self, roots: Sequence[Tensor], cotangents: Sequence[Tensor], parameters: Sequence[Tensor]):
        self.losses: list[tuple[Loss, Tensor, GradientEdge]] = []
        self.terms: list[tuple[TermUse, Tensor]] = []
        leaves = {get_gradient_edge(p).node for p in parameters}
        nodes = [root.grad_fn for root in roots if root.grad_fn is not None]
        known, nonlinear = find_losses(nodes, leaves)
        if nonlinear or not known:
            what = f"depends on {', '.join(dict.fromkeys(nonlinear))} of" if nonlinear else "contains none of"
            raise CurvoptError(
                f"HessianFree: what the closure differentiates {what} the parameters outside of the losses that are "
                "known (cross-entropy, squared error, binary cross-entropy of logits, as modules or functions). "
                "Mark a loss of your own by curvopt.extend(loss, loss=True); for weight decay use the option "
                "weight_decay or curvopt.L2Regularizer."
            )
        handles = [listen(edge, partial(self._loss, loss)) for loss, edge in known.items()]
        handles += [listen(edge, partial(self._term, term)) for term, edge in records_behind(nodes, TermUse)]
        try:
            with unheard():
                self.gradient: Vector = list(
                    torch.autograd.grad(roots, parameters, cotangents, retain_graph=True, materialize_grads=True)
                )
        finally:
            for handle in handles:
                handle.remove()

    def _term(self, use: TermUse, grad: Tensor) -> None:
        self.terms.append((use, grad))

    def _loss(self, use: Loss, grad: Tensor) -> None:
        if use.edge is not None:
            self.losses.append((use, grad, use.edge))


class QuadraticModel:
    """Gradient and Gauss-Newton matrix of the objective at the parameters that the graph was built with.

    Args:
        differentiated: the losses.
        parameters: θ.
        decays: weight decay of each.
        peers: other processes, of whose losses the objective is the mean.

    Attributes:
        gradient: ``g``.
        shifts: multiples of the identity in ``B``, by parameter.
        weight: how many mean losses the objective is, see `curvopt.backpack.loss_weight`.

    Raises:
        CurvoptError: if a loss is not convex in its input.
    """

    def __init__(
        self,
        differentiated: Differentiated,
        parameters: Sequence[Tensor],
        decays: Sequence[float],
        peers: Peers | None = None,
    ):
        self.parameters, self._peers = parameters, peers
        gradient = mean_of(peers, differentiated.gradient)
        self.gradient = [g + decay * p for g, p, decay in zip(gradient, parameters, decays, strict=True)]
        self.shifts: list[float | Tensor] = list(decays)
        for use, grad in differentiated.terms:
            regularized = set(use.parameters)
            self.shifts = [
                shift + use.weight * grad if p in regularized else shift
                for shift, p in zip(self.shifts, parameters, strict=True)
            ]
        weight = torch.zeros((), dtype=torch.float64, device=parameters[0].device)
        self._curvatures: list[tuple[LossCurvature, Tensor]] = []
        self._slopes: list[Tensor] = []
        for loss, grad, _ in differentiated.losses:
            curvature, scale = loss.curvature(grad)
            assert curvature.weights is not None
            weight += (curvature.weights.sum() * scale.square()).to(weight)
            self._curvatures.append((curvature, scale))
            with torch.enable_grad(), unheard():
                self._slopes.append(loss.slope(grad))
        self.weight = float(mean_of(peers, [weight])[0])
        self._edges = [edge for *_, edge in differentiated.losses]
        self._inputs = [loss.input for loss, *_ in differentiated.losses]
        self._jacobian = linearise(self._edges, parameters, self._inputs)
        self._checked = False

    def product(self, v: Vector) -> Vector:
        """``B v``: forwards through the network (R-operator), the Hessian of the loss, and backwards.

        Raises:
            CurvoptError: if an operation of the network has no second derivative.
        """
        try:
            Jv = self._jacobian(v)
        except RuntimeError as error:
            if not any(words in str(error) for words in ("derivative", "double backward")):
                raise
            raise CurvoptError(
                f"HessianFree: PyTorch has no second derivative of an operation of the network ({error}). Attention "
                "has one unless a kernel other than SDPBackend.MATH is chosen for it, cuDNN's recurrent nets with "
                "torch.backends.cudnn.flags(enabled=False), compiled models before they are compiled."
            ) from error
        HJv = [_hessian_product(*term) for term in zip(self._slopes, self._edges, Jv, strict=True)]
        if not self._checked:
            self._check_transposed(v, Jv)
        Gv = mean_of(self._peers, self._pulled_back(HJv))
        return [Gt + shift * t for Gt, shift, t in zip(Gv, self.shifts, v, strict=True)]

    def _check_transposed(self, v: Vector, Jv: Sequence[Tensor]) -> None:
        """``uᵀ (J v) = vᵀ (Jᵀ u)``: a backward that hides from autograd what it does makes J v wrong in silence."""
        self._checked = True
        u = [slope.detach().to(z.dtype) for slope, z in zip(self._slopes, self._inputs, strict=True)]
        Jtu = self._pulled_back(u)
        left, right = dot(u, Jv), dot(v, Jtu)
        eps = max(torch.finfo(dtype).eps for dtype in precisions([edge.node for edge in self._edges]))
        # near a minimum what the samples bring to Jᵀu cancels, and its rounding errors are those of J v
        lengths = (dot(v, v) * dot(Jtu, Jtu)) ** 0.5 + (dot(u, u) * dot(Jv, Jv)) ** 0.5
        rounding = 100 * eps * lengths + torch.finfo(torch.float32).tiny
        if abs(left - right) > eps**0.3 * max(abs(left), abs(right)) + rounding:
            raise CurvoptError(
                "HessianFree: the Jacobian of the network by double backward is not that by backward "
                f"({left:.6g} and {right:.6g}). An autograd.Function or hook in it does something in its backward that "
                "PyTorch cannot differentiate (.data, .detach(), numpy, in-place changes)."
            )

    def sampled_diagonal(self, samples: int) -> Vector:
        """Unbiased estimate of B's diagonal: mean squares of Jᵀs with random s, E[s sᵀ] = H (Chapelle & Erhan 2011).

        The same random numbers are used at each step.
        """
        generators = {z.device: torch.Generator(z.device).manual_seed(0) for z in self._inputs}
        squares = [torch.zeros_like(p) for p in self.parameters]
        for _ in range(samples):
            columns = [
                (scale * curvature.sample(1, generators[z.device])[0]).to(z.dtype)
                for (curvature, scale), z in zip(self._curvatures, self._inputs, strict=True)
            ]
            for square, column in zip(squares, self._pulled_back(columns), strict=True):
                square.addcmul_(column, column, value=1 / samples)
        return [square + shift for square, shift in zip(mean_of(self._peers, squares), self.shifts, strict=True)]

    def _pulled_back(self, vectors: Vector) -> Sequence[Tensor]:
        with unheard():
            return torch.autograd.grad(self._edges, self.parameters, vectors, retain_graph=True, materialize_grads=True)


def _hessian_product(slope: Tensor, edge: GradientEdge, u: Tensor) -> Tensor:
    """``H u`` from the gradient of a loss in what lies at ``edge``."""
    if not slope.requires_grad:
        return torch.zeros_like(u)
    with unheard():
        (Hu,) = torch.autograd.grad(slope, edge, u.to(slope.dtype), retain_graph=True, allow_unused=True)
    return torch.zeros_like(u) if Hu is None else Hu


# ------------------------------------------------------------------------------------------------- steps of the paper


def solve(
    model: QuadraticModel, damping: Sequence[float], x0: Vector | None, maxiter: int, progress: float, samples: int
) -> tuple[Solution, list[Vector]]:
    """CG on ``(B + λ) x = -g``.

    Returns:
        The solution, and the iterates 1, 1.3, 1.3², ... rounded up, and the last.
    """
    damping = [model.weight * value for value in damping]

    def product(v: Vector) -> Vector:
        return [Bv + value * t for Bv, value, t in zip(model.product(v), damping, v, strict=True)]

    preconditioner: Product | None = None
    if samples:
        diagonal = model.sampled_diagonal(samples)
        tiny = torch.finfo(diagonal[0].dtype).tiny
        inverse = [(t + value).clamp(min=tiny) ** -0.75 for t, value in zip(diagonal, damping, strict=True)]
        preconditioner = lambda r: [m * t for m, t in zip(inverse, r, strict=True)]  # noqa: E731

    iterates: list[Vector] = []
    due = 1.0

    def keep(iteration: int, x: Vector) -> None:
        nonlocal due
        if iteration >= due:
            iterates.append(x)
            while due <= iteration:
                due *= 1.3

    right = [-g for g in model.gradient]
    found = cg(product, right, x0, maxiter, 1e-10, preconditioner=preconditioner, progress=progress, callback=keep)
    if not iterates or iterates[-1] is not found.x:
        iterates.append(found.x)
    return found, iterates


def backtrack(f: Callable[[Vector], float], iterates: Sequence[Vector]) -> tuple[float, Vector]:
    """From the last iterate of CG backwards, as long as f decreases (or is infinite).

    Returns:
        f and the iterate.
    """
    best, x = inf, iterates[-1]
    for candidate in reversed(iterates):
        value = f(candidate)
        if value >= best and best < inf:
            break
        best, x = value, candidate
    return best, x


def line_search(
    f: Callable[[float], float], start: float, end: float, slope: float, resolution: float = 0.0
) -> tuple[float, float]:
    """The first of the rates 1, 0.8, 0.8², ... that meets Armijo's condition.

    Args:
        f: the objective by rate.
        start: f(0).
        end: f(1).
        slope: derivative of f at 0.
        resolution: what f may change by rounding alone; rates that promise no more are not tried.

    Returns:
        f and the rate, which is 0 if there is none.
    """
    rate, value = 1.0, end
    while not (slope <= 0 and value <= start + 0.01 * rate * slope):
        rate *= 0.8
        if not -rate * slope > resolution or rate < 1e-4:
            return start, 0.0
        value = f(rate)
    return value, rate


def levenberg_marquardt(ratio: float) -> float:
    """What damping is multiplied with, by the reduction ratio ``ρ = (f(θ + δ) - f(θ)) / (q(δ) - q(0))``."""
    return 3 / 2 if ratio < 1 / 4 else 2 / 3 if ratio > 3 / 4 else 1.0


def mean_of(peers: Peers | None, tensors: Sequence[Tensor]) -> Vector:
    """The mean over all processes that train the model together."""
    return list(tensors) if peers is None else peers.mean(tensors)


# ---------------------------------------------------------------------------------------- the closure as an objective


class Objective:
    """``f(θ + δ)`` by a closure: first with its graph, then for other δ, unnoticed.

    Args:
        closure: as for `HessianFree.step`.
        parameters: θ.
        decays: weight decay of each.
        sign: -1 if what the closure computes is to be maximised.
        peers: other processes; f is the mean over all.

    Attributes:
        start: ``f(θ)``.
        resolution: what f may change by rounding alone.
        evaluations: how often it was called.
    """

    def __init__(
        self,
        closure: Closure,
        parameters: Sequence[Tensor],
        decays: Sequence[float],
        sign: float = 1.0,
        peers: Peers | None = None,
    ):
        self.closure, self.parameters, self.decays, self.sign, self.peers = closure, parameters, decays, sign, peers
        self.theta = [p.detach().clone() for p in parameters]
        self.evaluations = 0

    def differentiate(self) -> Differentiated:
        """Run the closure as it is, but keep the graph.

        Raises:
            CurvoptError: if it shows no loss, or one that is not known.
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
        (mean,) = mean_of(self.peers, [torch.tensor(of_closure, dtype=torch.float64, device=self.parameters[0].device)])
        decayed = [(decay, p) for decay, p in zip(self.decays, self.parameters, strict=True) if decay != 0]
        return self.sign * float(mean) + sum(decay / 2 * float(p.square().sum()) for decay, p in decayed)


# ------------------------------------------------------------------------------------------------------ the optimizer


class HessianFree(torch.optim.Optimizer):
    """Truncated Newton steps on the Gauss-Newton matrix of the batch; meant for the full batch or large ones.

    ::

        optimizer = HessianFree(model.parameters())

        def closure():
            optimizer.zero_grad()
            loss = lossfunc(model(x), y)
            loss.backward()  # may be left out
            return loss

        for _ in range(30):
            loss = optimizer.step(closure)

    A step runs CG from the previous step's solution (times ``cg_decay``) until it makes no more progress, takes the
    best of its iterates as direction (CG backtracking), shortens it until the objective decreases by Armijo's
    condition, and adapts the damping by how well the model predicted the decrease (Levenberg-Marquardt). If the
    objective does not decrease at all, parameters stay and damping rises. A step costs about 4/3 gradients for each
    iteration of CG and a third of one for each further call of the closure; ``metrics()`` counts both. It takes memory
    for two graphs of the closure and some 20 copies of the parameters.

    **The closure** works as for ``torch.optim.LBFGS``. Its first call, with gradients enabled, is the usual one, but
    graphs are kept; if it calls ``backward``, several times perhaps, the objective is the sum of what it called it on,
    else what it returns. This must be a linear function of losses that are known: cross-entropy, squared error, binary
    cross-entropy of logits, as modules or functions, or others by ``extend(loss, loss=True)``. The model need not be
    extended, and may hold any operation that PyTorch differentiates twice; attention is computed by the kernel of which
    that is true (``SDPBackend.MATH``). ``.grad`` is what the closure makes of it, and is not read. Further calls run
    without gradients (unless the closure calls ``torch.autograd.grad``), and their backwards do nothing. They must
    compute the same function of the same data: PyTorch's random numbers (dropout) are those of the first call, and
    modules work on copies of their buffers, so that running statistics change once in a step. Contexts (``backpack``)
    are told of the first call alone. Whatever else the closure changes, it changes at each call.

    In several processes the objective is the mean of theirs, see `curvopt.distributed`.

    Args:
        params: parameters, named parameters or param groups; ``lr``, ``damping`` and ``weight_decay`` may differ
            between groups.
        lr: factor of the direction, before the line search.
        damping: λ to begin with, in units of the curvature of a mean-reduced loss, whatever the loss' reduction,
            scale and batch size are. Adapted: the group's entry is multiplied by 2/3 or 3/2. Zero stays zero.
        weight_decay: factor of ``½ ‖θ‖²`` in the objective, its gradient and its curvature.
        maximize: maximise what the closure computes, which must be concave in the network's outputs.
        cg_iterations: largest number of iterations of CG.
        cg_progress: CG stops once its last k steps improved the model by less than ``k * cg_progress`` relatively.
        cg_decay: factor of the previous solution where CG starts, 0 to start at zero.
        preconditioner_samples: precondition CG by ``(diag B + λ)^-¾``, with the diagonal estimated from so many random
            backwards; 0 for none. Ten save products where curvature differs much, as in deep autoencoders.

    Raises:
        ValueError: an option is out of its range.
    """

    #: As in `curvopt.optim.base.CurvatureOptimizer`.
    process_group: ProcessGroup | Literal["world"] | None = "world"

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1.0,
        *,
        damping: float = 0.1,
        weight_decay: float = 0.0,
        maximize: bool = False,
        cg_iterations: int = 250,
        cg_progress: float = 0.0005,
        cg_decay: float = 0.95,
        preconditioner_samples: int = 0,
    ) -> None:
        for name, value, least in (
            ("cg_iterations", cg_iterations, 1),
            ("cg_progress", cg_progress, 0),
            ("cg_decay", cg_decay, 0),
            ("preconditioner_samples", preconditioner_samples, 0),
        ):
            if not value >= least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        self.maximize, self.cg_iterations, self.cg_progress = maximize, cg_iterations, cg_progress
        self.cg_decay, self.preconditioner_samples = cg_decay, preconditioner_samples
        self._metrics: dict[str, float | str] = {}
        super().__init__(params, {"lr": lr, "damping": damping, "weight_decay": weight_decay})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group, before or during training; ``lr``, ``damping`` and ``weight_decay`` may be set in it."""
        for name, default in self.defaults.items():
            value = param_group.get(name, default)
            if not value >= 0:
                raise ValueError(f"{name} must be at least 0, got {value}")
        super().add_param_group(param_group)
        check_new_group(self, self._names())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict()`` returned.

        Raises:
            CurvoptError: if it is the state of another optimizer. Nothing has changed then.
        """
        complete = all(group.keys() >= self.defaults.keys() for group in state_dict["param_groups"])
        if not complete or "curvature" in state_dict:
            raise CurvoptError(
                "HessianFree.load_state_dict(): this is the state of another optimizer; build that one. Nothing has "
                "changed."
            )
        super().load_state_dict(state_dict)

    @torch.no_grad()
    @sdpa_kernel(SDPBackend.MATH)  # no other has a second derivative
    @without_autocast
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Take one step.

        Args:
            closure: computes the loss, returns it or calls ``backward`` on it, or both; see the class.

        Returns:
            What the closure returned at first, detached.

        Raises:
            CurvoptError: no closure, a loss that is not known or not convex in the network's outputs, or a loss or
                gradient that is not finite or sparse. Parameters, their buffers and the state have not changed then.
        """
        if closure is None:
            raise CurvoptError("HessianFree.step() evaluates the loss several times: call optimizer.step(closure).")
        owned = [(p, group) for group in self.param_groups for p in group["params"] if p.requires_grad]
        params = [p for p, _ in owned]
        if not params:
            raise CurvoptError(
                "HessianFree: no parameter requires a gradient; call requires_grad_() on those to train."
            )
        lrs, decays, dampings = (
            [float(group[name]) for _, group in owned] for name in ("lr", "weight_decay", "damping")
        )
        x0 = self._cg_start(params)
        evaluated = Closure(closure, params)
        peers = peers_of(self.process_group, params[0].device)
        objective = Objective(evaluated, params, decays, -1.0 if self.maximize else 1.0, peers)
        try:
            differentiated = objective.differentiate()
            sparse = self._where(lambda g: g.layout != torch.strided, params, differentiated.gradient)
            if sparse:
                raise CurvoptError(
                    f"{sparse[0]}: HessianFree needs a dense gradient, got a sparse one; build the embedding with "
                    "sparse=False."
                )
            if not isfinite(objective.start):
                raise self._not_finite(f"loss of the closure ({objective.start})")
            model = QuadraticModel(differentiated, params, decays, peers)
            infinite = self._where(lambda g: not g.isfinite().all(), params, model.gradient)
            if infinite:
                raise self._not_finite(f"gradient of {', '.join(infinite[:5])}")
            if isnan(model.weight):  # a loss that was not looked at until now, on an accelerator
                raise CurvoptError(
                    "closure: its loss is not convex; HessianFree needs one that is minimised, or maximize=True."
                )
            found, iterates = solve(
                model, dampings, x0, self.cg_iterations, self.cg_progress, self.preconditioner_samples
            )

            def scaled(x: Vector, rate: float = 1.0) -> Vector:
                return [rate * lr * t for t, lr in zip(x, lrs, strict=True)]

            best, x = backtrack(lambda x: objective(scaled(x)), iterates)
            slope = dot(model.gradient, scaled(x))
            value, rate = line_search(
                lambda rate: objective(scaled(x, rate)), objective.start, best, slope, objective.resolution
            )
            objective.return_to_start()
            delta = scaled(x, rate) if rate > 0 else [torch.zeros_like(t) for t in x]  # 0 times infinity is none
            predicted = dot(model.gradient, delta) + dot(delta, model.product(delta)) / 2
        except BaseException:
            objective.return_to_start()
            evaluated.restore_buffers()
            raise

        ratio = (value - objective.start) / predicted if predicted != 0 else nan if rate > 0 else -inf
        eps = max(torch.finfo(widened(p).dtype).eps for p in params)
        of_start, length = (dot(each, each) ** 0.5 for each in (objective.theta, scaled(x)))
        if abs(slope) <= objective.resolution or length <= eps * of_start:
            ratio = nan  # what is left is rounding, which says nothing of the damping
        for p, d, direction in zip(params, delta, found.x, strict=True):
            p.add_(d)
            if rate > 0:
                self.state[p]["direction"] = direction
            else:
                self.state[p].pop("direction", None)
        for group in self.param_groups:
            group["damping"] = group["damping"] * levenberg_marquardt(ratio)
        self._metrics = {
            "loss_before": objective.start,
            "loss_after": value,
            "reduction_ratio": ratio,
            "cg_iterations": found.iterations,
            "cg_reason": found.reason,
            "evaluations": objective.evaluations,
            "rate": rate,
            "step_norm": dot(delta, delta) ** 0.5,
            "damping": dampings[0],
        }
        result = evaluated.result
        return result.detach() if isinstance(result, Tensor) else result

    def _cg_start(self, params: Sequence[Tensor]) -> Vector | None:
        """The decayed solution of the step before, if there is any."""
        start = []
        for p in params:
            direction = self.state[p].get("direction", torch.zeros_like(p))
            if direction.shape != p.shape:
                raise CurvoptError(
                    f"{self._names()[p]}: the state of HessianFree belongs to a parameter of shape "
                    f"{list(direction.shape)}, but this one has {list(p.shape)}; build the optimizer anew when "
                    "parameters change, and load the state of the same model."
                )
            start.append(self.cg_decay * direction)
        known = self.cg_decay > 0 and any("direction" in self.state[p] for p in params)
        return start if known else None

    def _where(self, holds: Callable[[Tensor], Any], params: Sequence[Tensor], gradient: Sequence[Tensor]) -> list[str]:
        """Names of the parameters for whose gradients something holds."""
        names = self._names()
        return [names[p] for p, g in zip(params, gradient, strict=True) if holds(g)]

    def _not_finite(self, what: str) -> CurvoptError:
        return CurvoptError(
            f"HessianFree: the {what} is not finite. Parameters and state are unchanged; skip this batch, or look for "
            "the cause in the data."
        )

    def metrics(self) -> dict[str, float | str]:
        """Numbers of the last step.

        ``loss_before`` and ``loss_after``: the objective, weight decay included and negative if maximised.
        ``reduction_ratio``: its change over the predicted one; ``-inf`` if no decrease was found, nan (and the damping
        stays) where the objective or the parameters are rounded to more than the direction changes. ``cg_iterations``
        and ``cg_reason``, see `curvopt.hessianfree.Solution`. ``evaluations``: calls of the closure. ``rate``: the line
        search's, 0 if no decrease was found. ``step_norm``. ``damping``: of the first group, in this step.
        """
        return dict(self._metrics)

    _names = CurvatureOptimizer._names

    def __getstate__(self) -> dict[str, Any]:
        own = ("maximize", "cg_iterations", "cg_progress", "cg_decay", "preconditioner_samples", "_metrics")
        alone = {"process_group": None} if self.process_group is None else {}
        return {**super().__getstate__(), **{name: self.__dict__[name] for name in own}, **alone}
