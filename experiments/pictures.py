"""Pictures of the curvature of a trained network."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from curvopt import backpack
from curvopt.extensions import BatchL2Grad, DiagHessian
from experiments import checkpoints
from experiments.config import Config, check_least
from experiments.curvature import extended_copy, layer_statistics
from experiments.data import ALPHABET, Data
from experiments.plots import COLOURS, MARKERS
from experiments.problems import PROBLEMS

if TYPE_CHECKING:
    from experiments.inspect import Inspection

_SHOWN = 10  # images


def draw(inspection: "Inspection") -> list[Path]:
    """Writes the pictures and returns their paths.

    Raises:
        ValueError: there is no checkpoint that can be read, or a setting is out of its range.
        DataError: its data are not there.
    """
    check_least(inspection, samples=1, hessian_samples=0)
    state = checkpoints.load(inspection.checkpoint)
    if state is None:
        raise ValueError(f"{inspection.checkpoint} holds no checkpoint; train with --save-every other than 0")
    config = state["config"]
    problem = PROBLEMS[config["problem"]]
    npz = config["npz"] and Path(config["npz"])
    given = Config(config["problem"], data=config["data"], npz=npz, data_root=inspection.data_root).load_data()
    model, lossfunc = problem.model(tuple(given.test.x.shape[1:]), given.classes), problem.loss()
    model.load_state_dict(state["model"])
    folder = inspection.checkpoint if inspection.checkpoint.is_dir() else inspection.checkpoint.parent
    out = inspection.out or folder / "inspect"
    out.mkdir(parents=True, exist_ok=True)
    title = f"{config['problem']}, {config['optimizer']['name']}, step {state['step']}"

    x, y = _spread(given, inspection.samples)
    layers, eigenvalues = layer_statistics(model, lossfunc, x, y)
    figures = {
        "traces": draw_traces({name: row["ggn_trace"] for name, row in layers.items()}),
        "spectra": draw_spectra(eigenvalues),
        "gradients": draw_gradients(x, y, *sample_norms(model, lossfunc, x, y)),
    }
    if inspection.hessian_samples:
        figures["hessian"] = draw_hessian(
            hessian_diagonal(model, lossfunc, *_spread(given, inspection.hessian_samples))
        )
    for name, figure in figures.items():
        figure.suptitle(title)
        figure.savefig(out / f"{name}.png", dpi=120)
    return [out / f"{name}.png" for name in figures]


def _spread(given: Data, samples: int) -> tuple[Tensor, Tensor]:
    """Held-out samples at equal distances, so that all classes of sorted ones are there."""
    test = given.test
    chosen = torch.linspace(0, len(test.x) - 1, min(samples, len(test.x))).long()
    return test.x[chosen], test.y[chosen]


def sample_norms(model: nn.Module, lossfunc: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Norm of each sample's own gradient over all parameters ``[N]``, and the outputs of the network."""
    model = extended_copy(model)
    z = model(x)
    with backpack(BatchL2Grad()):
        lossfunc(z, y).backward()
    parameters: list[Any] = [p for p in model.parameters() if p.grad is not None]
    squares = torch.stack([p.batch_l2 for p in parameters]).sum(0)
    return squares.sqrt() * len(x), z.detach()  # gradients of samples carry the 1/N of the mean


def hessian_diagonal(model: nn.Module, lossfunc: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Diagonal of the Hessian of the mean loss, by parameter."""
    model = extended_copy(model)
    with sdpa_kernel(SDPBackend.MATH), backpack(DiagHessian()):  # other kernels have no second derivative
        lossfunc(model(x), y).backward()
    parameters: list[tuple[str, Any]] = [(name, p) for name, p in model.named_parameters() if p.grad is not None]
    return {name: p.diag_h.flatten() for name, p in parameters}


def draw_traces(traces: Mapping[str, float]) -> Figure:
    """Trace per parameter, the first layer on top."""
    figure = Figure(figsize=(8, 1.8 + 0.22 * len(traces)), layout="constrained")
    axes = figure.subplots()
    rows = list(enumerate(traces.items()))
    for colour, what, suffix in ((COLOURS[1], "biases", True), (COLOURS[0], "weights", False)):
        chosen = [(row, trace) for row, (name, trace) in rows if name.endswith("bias") == suffix]
        axes.barh([row for row, _ in chosen], [trace for _, trace in chosen], color=colour, label=what)
    axes.set_yticks(range(len(traces)), list(traces))
    axes.margins(y=0.5 / len(traces))
    axes.legend()
    axes.set(xscale="log", xlabel="trace of the generalized Gauss-Newton block / (nats / parameter²)")
    axes.invert_yaxis()
    axes.grid(alpha=0.3, axis="x")
    return figure


def draw_spectra(eigenvalues: Mapping[str, Tensor]) -> Figure:
    """Eigenvalues of the factors of weights in descending order, from their logarithms."""
    figure = Figure(figsize=(13, 5), layout="constrained")
    for axes, letter, title in zip(
        figure.subplots(1, 2), "AB", ("A: second moment of inputs", "B: curvature of outputs"), strict=True
    ):
        spectra = {
            key[2:]: 10 ** values.numpy()
            for key, values in eigenvalues.items()
            if key.startswith(f"{letter}/") and f"A/{key[2:]}" in eigenvalues
        }
        for index, (name, values) in enumerate(spectra.items()):
            axes.plot(
                range(1, len(values) + 1),
                values,
                label=name,
                color=COLOURS[index % len(COLOURS)],
                marker=MARKERS[index // len(COLOURS) % len(MARKERS)],
                markersize=3,
                lw=1,
                markevery=0.1,
            )
        axes.set(xscale="log", yscale="log", xlabel="index", ylabel="eigenvalue", title=title)
        axes.grid(alpha=0.3)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, fontsize=8)
    return figure


def draw_gradients(x: Tensor, y: Tensor, norms: Tensor, z: Tensor) -> Figure:
    """Histogram of gradient norms, and the samples with the largest ones: images, text, or else their labels."""
    figure = Figure(figsize=(13, 5.5), layout="constrained")
    above, below = figure.subfigures(2, 1, squeeze=False, height_ratios=(1.6, 1))[:, 0]
    axes = above.subplots()
    positive = norms.clamp(min=norms.max() * 1e-6)
    bins = torch.logspace(float(positive.min().log10()), float(positive.max().log10()), 50)
    axes.hist(positive.numpy(), bins=bins.tolist(), color=COLOURS[0])
    axes.set(xscale="log", xlabel="norm of a sample's gradient / (nats / parameter)", ylabel="held-out samples")
    axes.grid(alpha=0.3)
    hardest = norms.argsort(descending=True)[:_SHOWN].tolist()

    def describe(i: int) -> str:
        if not x.is_floating_point():
            return repr("".join(ALPHABET[code] for code in x[i]))
        return "" if y.is_floating_point() else f"is {y[i]}, said {z[i].argmax()}"

    if x.ndim == 4 and x.shape[1] in (1, 3):
        panels = below.subplots(1, _SHOWN, squeeze=False)[0]
        for axes, i in zip(panels, hardest, strict=False):
            image = x[i] - x.amin()
            axes.imshow((image / (x.amax() - x.amin())).permute(1, 2, 0).numpy(), cmap="gray", vmin=0, vmax=1)
            axes.set_title(f"{describe(i)}\nnorm {norms[i]:.3g}".lstrip(), fontsize=9)
            axes.axis("off")
    else:
        lines = ["    norm  sample", *(f"{norms[i]:8.3g}  {describe(i)}" for i in hardest)]
        below.text(0.02, 0.95, "\n".join(lines), va="top", family="monospace", fontsize=9)
    return figure


def draw_hessian(diagonals: Mapping[str, Tensor]) -> Figure:
    """Quantiles of the Hessian diagonal per parameter, on both sides of zero."""
    figure = Figure(figsize=(9, 1.8 + 0.22 * len(diagonals)), layout="constrained")
    axes = figure.subplots()
    boxes = []
    for values in diagonals.values():
        low, lower, median, upper, high = _quantiles(values, (0, 0.25, 0.5, 0.75, 1))
        boxes.append({"whislo": low, "q1": lower, "med": median, "q3": upper, "whishi": high, "fliers": []})
    axes.bxp(boxes, orientation="horizontal", showfliers=False, medianprops={"color": COLOURS[1]})
    axes.set_yticks(range(1, len(diagonals) + 1), list(diagonals))
    low = min(box["whislo"] for box in boxes)
    high = max(box["whishi"] for box in boxes)
    decade = math.ceil(math.log10(max(-low, high, 1e-30)))
    axes.set_xscale("symlog", linthresh=10.0 ** (decade - 7), linscale=0.5)
    powers = [10.0**power for power in range(decade - 6, decade + 1, 2)]
    axes.set_xticks([*(-power for power in powers), 0, *powers])
    margin = 10.0 ** (decade - 7)
    axes.set_xlim(1.5 * low - margin, 1.5 * high + margin)
    axes.axvline(0, color="0.5", lw=0.8)
    axes.set_xlabel("diagonal of the Hessian / (nats / parameter²): quartiles, smallest and largest entry")
    axes.invert_yaxis()
    axes.grid(alpha=0.3, axis="x")
    return figure


def _quantiles(values: Tensor, at: tuple[float, ...]) -> list[float]:
    ordered = values.sort().values  # torch.quantile takes no more than 16 million values
    return [float(ordered[round(q * (len(ordered) - 1))]) for q in at]
