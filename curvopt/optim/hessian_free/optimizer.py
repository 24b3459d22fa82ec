r"""Hessian-free optimization (Martens 2010; Martens & Sutskever 2012), after Schraudolph (2002) and Pearlmutter (1994).

Each step minimises a quadratic model of the objective f around the parameters θ, with damping λ,

    q(δ) = f(θ) + gᵀδ + ½ δᵀ B δ + ½ λ ‖δ‖²,        B = Jᵀ H J + weight decay,

by conjugate gradients, see `curvopt.optim.hessian_free.quadratic_model`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, isfinite, isnan, nan
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from curvopt.core.products.base import widened
from curvopt.distributed import ranks_of
from curvopt.errors import CurvoptError
from curvopt.hessianfree.cg import Solution, cg, dot
from curvopt.optim.closures import Closure, without_autocast
from curvopt.optim.hessian_free.quadratic_model import Objective, QuadraticModel, Vector
from curvopt.optim.options import (
    check_count,
    check_known,
    check_new_group,
    check_number,
    parameter_names,
    parameters_of,
    shown,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


#: Options of a param group, and of the whole optimizer.
_OF_GROUP = ("lr", "damping", "weight_decay")
_OF_RUN = ("maximize", "cg_iterations", "cg_progress", "cg_decay")


class HessianFree(torch.optim.Optimizer):
    """Newton's method for networks: each step nearly minimises a quadratic model of the loss; for large batches.

    The model has the gradient and the curvature of the whole network, no matrix of which is ever formed: conjugate
    gradients (CG) need its products with vectors only (Martens 2010). A step costs tens to hundreds of gradients, and
    training needs few of them, so take it for small networks, the full batch, and where accuracy matters most. A step
    evaluates the loss several times, by a closure::

        import torch
        from curvopt.optim import HessianFree

        model, lossfunc = torch.nn.Linear(64, 10), torch.nn.CrossEntropyLoss()
        optimizer = HessianFree(model)
        x, y = torch.rand(512, 64), torch.randint(10, (512,))

        def closure():
            optimizer.zero_grad()
            loss = lossfunc(model(x), y)
            loss.backward()  # may be left out
            return loss

        for step in range(5):
            loss = optimizer.step(closure)

    **In symbols**, the model of the objective ``f`` around the parameters ``θ`` is
    ``q(δ) = f(θ) + gᵀδ + ½ δᵀ B δ + ½ λ ‖δ‖²`` for a step ``δ``, with the gradient ``g``, the Gauss-Newton matrix ``B``
    (the Hessian without second derivatives of the network) and the damping ``λ``. CG starts from the previous step
    (times ``cg_decay``) and runs until it makes no more progress. The best of its iterates is the direction (CG
    backtracking), which is shortened until the objective decreases by Armijo's condition. The damping is adapted by how
    well the model predicted the decrease (Levenberg-Marquardt). If the objective does not decrease at all, parameters
    stay and damping rises. A step costs about 4/3 gradients for each iteration of CG and a third of one for each
    further call of the closure; ``metrics()`` counts both. It takes memory for two graphs of the closure and some 20
    copies of the parameters.

    **The closure** works as for ``torch.optim.LBFGS``. Its first call, with gradients enabled, is the usual one, but
    graphs are kept. The objective is the sum of all tensors that it calls ``backward`` on, or if it calls none, its
    result. Where it is a linear function of losses that are known and convex (cross-entropy, squared error, binary
    cross-entropy of logits, as modules or functions), B is the Gauss-Newton
    matrix. For any other objective it is the Hessian; CG stops where that is not positive, and the damping rises until
    steps are found. ``metrics()["is_hessian"]`` tells. The model need not be extended, and
    may hold any operation that PyTorch differentiates twice; attention uses the kernel that has second derivatives
    (``SDPBackend.MATH``). ``.grad`` is left to the closure, and is not read. Further calls run without gradients
    (unless the closure calls ``torch.autograd.grad``), and their backwards do nothing. They must compute the function
    of the first call on its data: PyTorch's random numbers (dropout) are those of the first call, and modules work on
    copies of their buffers, so that running statistics change once in a step. Contexts (``backpack``) see the first
    call alone. Anything else that the closure changes, it changes at each call.

    In several processes the objective is the mean of theirs, see `curvopt.distributed`.

    Args:
        params: a model, or parameters, named parameters or param groups; ``lr``, ``damping`` and ``weight_decay`` may
            differ between groups.
        lr: factor of the direction, before the line search.
        damping: λ to begin with, in units of the curvature of a mean-reduced loss, whatever the loss' reduction,
            scale and batch size are. Adapted: the group's entry is multiplied by 2/3 or 3/2. Zero stays zero.
        weight_decay: factor of ``½ ‖θ‖²`` in the objective, its gradient and its curvature.
        maximize: maximise the objective, which must be concave in the network's outputs.
        cg_iterations: largest number of iterations of CG.
        cg_progress: CG stops once its last k steps improved the model by less than ``k * cg_progress`` relatively.
        cg_decay: factor of the previous solution where CG starts, 0 to start at zero.

    Raises:
        ValueError: an option is out of its range.
    """

    #: As in `curvopt.optim.step.CurvatureOptimizer`.
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
        **options: Any,
    ) -> None:
        check_known("HessianFree", options)
        check_count("cg_iterations", cg_iterations)
        check_number("cg_progress", cg_progress)
        check_number("cg_decay", cg_decay)
        self.maximize, self.cg_iterations, self.cg_progress = maximize, cg_iterations, cg_progress
        self.cg_decay = cg_decay
        self._metrics: dict[str, float | str] = {}
        super().__init__(parameters_of(params), {"lr": lr, "damping": damping, "weight_decay": weight_decay})
        self.defaults |= {name: getattr(self, name) for name in _OF_RUN}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group, before or during training; ``lr``, ``damping`` and ``weight_decay`` may be set in it."""
        for name in _OF_GROUP:
            check_number(name, param_group.get(name, self.defaults[name]))
        super().add_param_group(param_group)
        for name in _OF_RUN:  # torch copies all of `defaults`
            self.param_groups[-1].pop(name, None)
        check_new_group(self)

    def __repr__(self) -> str:
        """The options of the whole optimizer, then those of each param group."""
        return shown("HessianFree", {name: getattr(self, name) for name in _OF_RUN}, self.param_groups)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a ``state_dict()``.

        Raises:
            CurvoptError: if it is the state of another optimizer. Nothing has changed then.
        """
        complete = all(group.keys() >= {*_OF_GROUP} for group in state_dict["param_groups"])
        if not complete or any("run" in group for group in state_dict["param_groups"]):
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
            The result of the first call of the closure, detached.

        Raises:
            CurvoptError: no closure, an objective that PyTorch cannot differentiate twice, or a loss or gradient
                that is not finite or sparse. Parameters, their buffers and the state have not changed then.
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
        ranks = ranks_of(self.process_group, params[0].device)
        objective = Objective(evaluated, params, decays, -1.0 if self.maximize else 1.0, ranks)
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
            model = QuadraticModel(differentiated, params, decays, ranks)
            infinite = self._where(lambda g: not g.isfinite().all(), params, model.gradient)
            if infinite:
                raise self._not_finite(f"gradient of {', '.join(infinite[:5])}")
            if isnan(model.weight):  # a loss on an accelerator, whose convexity was not checked until now
                raise CurvoptError(
                    "closure: its loss is not convex; HessianFree needs one that is minimised, or maximize=True."
                )
            found, iterates = solve(model, dampings, x0, self.cg_iterations, self.cg_progress)

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
        if not found.iterations and found.reason == "curvature":
            ratio = -inf  # the first direction has negative curvature, so that the step is zero
        elif abs(slope) <= objective.resolution or length <= eps * of_start:
            ratio = nan  # the change is rounding, which says nothing about the damping
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
            "is_hessian": float(model.is_hessian),
        }
        result = evaluated.result
        return result.detach() if isinstance(result, Tensor) else result

    def _cg_start(self, params: Sequence[Tensor]) -> Vector | None:
        """The decayed solution of the step before; ``None`` without one."""
        start = []
        for p in params:
            direction = self.state[p].get("direction", torch.zeros_like(p))
            if direction.shape != p.shape:
                raise CurvoptError(
                    f"{self._names()[p]}: the state of HessianFree belongs to a parameter of shape "
                    f"{list(direction.shape)}, but this one has {list(p.shape)}; build a new optimizer when "
                    "parameters change, and load the state of the same model."
                )
            start.append(self.cg_decay * direction)
        known = self.cg_decay > 0 and any("direction" in self.state[p] for p in params)
        return start if known else None

    def _where(self, holds: Callable[[Tensor], Any], params: Sequence[Tensor], gradient: Sequence[Tensor]) -> list[str]:
        """Names of the parameters whose gradients satisfy a condition."""
        names = self._names()
        return [names[p] for p, g in zip(params, gradient, strict=True) if holds(g)]

    def _not_finite(self, name: str) -> CurvoptError:
        return CurvoptError(
            f"HessianFree: the {name} is not finite. Parameters and state are unchanged; skip this batch, or look for "
            "the cause in the data."
        )

    def metrics(self) -> dict[str, float | str]:
        """Numbers of the last step.

        ``loss_before`` and ``loss_after``: the objective, weight decay included and negative if maximised.
        ``reduction_ratio``: its change over the predicted one; ``-inf`` if no decrease was found, or the first
        direction of CG has no positive curvature, nan (and the damping stays) where the objective or the parameters are
        rounded to more than the direction changes. ``cg_iterations`` and ``cg_reason``, see
        `curvopt.hessianfree.Solution`. ``evaluations``: calls of the closure. ``rate``: the line search's, 0 if no
        decrease was found. ``step_norm``. ``damping``: of the first group, in this step.
        ``is_hessian``: 1 where the Hessian took the place of the Gauss-Newton matrix.
        """
        return dict(self._metrics)

    def _names(self) -> dict[Tensor, str]:
        return parameter_names(self.param_groups)

    def __getstate__(self) -> dict[str, Any]:
        alone = {"process_group": None} if self.process_group is None else {}
        return {**super().__getstate__(), **{name: self.__dict__[name] for name in (*_OF_RUN, "_metrics")}, **alone}


def solve(
    model: QuadraticModel, damping: Sequence[float], x0: Vector | None, maxiter: int, progress: float
) -> tuple[Solution, list[Vector]]:
    """CG on ``(B + λ) x = -g``.

    Returns:
        The solution, and the iterates 1, 1.3, 1.3², ... rounded up, and the last.
    """
    damping = [model.weight * value for value in damping]

    def product(v: Vector) -> Vector:
        return [Bv + value * t for Bv, value, t in zip(model.product(v), damping, v, strict=True)]

    iterates: list[Vector] = []
    due = 1.0

    def keep(iteration: int, x: Vector) -> None:
        nonlocal due
        if iteration >= due:
            iterates.append(x)
            while due <= iteration:
                due *= 1.3

    right = [-g for g in model.gradient]
    found = cg(product, right, x0, maxiter, 1e-10, progress=progress, callback=keep)
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
        resolution: change of f by rounding alone; rates that promise no more are not tried.

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
    """The factor of the damping, by the reduction ratio ``ρ = (f(θ + δ) - f(θ)) / (q(δ) - q(0))``."""
    return 3 / 2 if ratio < 1 / 4 else 2 / 3 if ratio > 3 / 4 else 1.0
