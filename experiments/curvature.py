"""Curvature of a network, one row per parameter: for the log of a training and for experiments.inspect."""

import copy
import math
from collections.abc import Mapping
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from curvopt import backpack, extend
from curvopt.extensions import KFAC, DiagGGNMC, Variance

LARGEST_FACTOR = 1024  # rows; the eigenvalues of larger ones would take seconds


def extended_copy(model: nn.Module) -> nn.Module:
    """A copy in evaluation mode to take curvature of: the training keeps its own, its hooks and its randomness."""
    return extend(copy.deepcopy(model).eval())


def layer_statistics(
    model: nn.Module, lossfunc: nn.Module, x: Tensor, y: Tensor, mc_samples: int = 10
) -> tuple[dict[str, dict[str, Any]], dict[str, Tensor]]:
    """Curvature and gradient noise of every parameter on one batch.

    Args:
        model: the network; it is not changed.
        lossfunc: a loss that is a mean over samples.
        x: inputs ``[N, ...]``.
        y: targets ``[N, ...]``.
        mc_samples: samples per datum of the curvature; a single one misses the rare ones of a confident network.

    Returns:
        For each parameter: ``ggn_trace``, trace of its block of the generalized Gauss-Newton matrix (sampled);
        ``gradient_snr``, ``|g|² / tr Cov(g)`` of the gradient g of this batch; and for each Kronecker factor ``A``
        (inputs), ``B`` (outputs) ``spectrum_*``, its eigenvalues at every tenth of their order, and ``top_*``, the
        largest (factors of more than ``LARGEST_FACTOR`` rows are cut to blocks). Then the logarithms of all
        eigenvalues, under ``<letter>/<parameter>``.
    """
    model = extended_copy(model)
    generator = torch.Generator(x.device).manual_seed(0)  # leaves the training's alone
    kfac = KFAC(mc_samples, generator=generator, max_factor_size=LARGEST_FACTOR)
    with backpack(kfac, DiagGGNMC(mc_samples, generator), Variance()):
        lossfunc(model(x), y).backward()
    layers: dict[str, dict[str, Any]] = {}
    eigenvalues_of: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        p: Any = parameter  # with fields
        if p.grad is None:
            continue
        noise = len(x) * p.variance.sum()  # gradients of samples carry 1/N, their covariances add up
        row: dict[str, Any] = {
            "ggn_trace": p.diag_ggn_mc.sum().item(),
            "gradient_snr": (p.grad.square().sum() / noise.clamp(min=torch.finfo(noise.dtype).tiny)).item(),
        }
        for letter, factor in zip("AB" if p.kfac.transposed else "BA", p.kfac, strict=False):
            eigenvalues = spectrum(factor)
            tenths = torch.linspace(0, 1, 11, device=x.device, dtype=eigenvalues.dtype)
            row[f"spectrum_{letter}"] = eigenvalues.quantile(tenths).tolist()
            row[f"top_{letter}"] = eigenvalues.max().item()
            positive = eigenvalues[eigenvalues > 1e-12 * eigenvalues.max()]
            eigenvalues_of[f"{letter}/{name}"] = positive.log10()
        layers[name] = row
    return layers, eigenvalues_of


def network_statistics(layers: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Three numbers of the whole network, from the statistics of its layers.

    Returns:
        ``curvature/trace`` of the generalized Gauss-Newton matrix, the sum over the parameters;
        ``curvature/largest_eigenvalue`` of a block of it, where that has two Kronecker factors; and
        ``curvature/gradient_snr``, the median over the parameters.
    """
    # JSON has None in place of nan
    rows = [{name: math.nan if value is None else value for name, value in row.items()} for row in layers.values()]
    tops = [row["top_A"] * row["top_B"] for row in rows if {"top_A", "top_B"} <= row.keys()]
    return {
        "curvature/trace": sum(row["ggn_trace"] for row in rows),
        "curvature/gradient_snr": median(row["gradient_snr"] for row in rows),
        **({"curvature/largest_eigenvalue": max(tops)} if tops else {}),
    }


def spectrum(factor: Tensor) -> Tensor:
    """Eigenvalues of a Kronecker factor, of its blocks or groups together, in descending order."""
    values = factor if factor.ndim <= 1 else torch.linalg.eigvalsh(factor)
    return values.flatten().clamp(min=0).sort(descending=True).values
