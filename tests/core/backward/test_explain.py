"""What `curvopt.explain` says is what a backward does."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

import curvopt
from curvopt import backpack, extend
from curvopt.extensions import KFAC, BatchGrad, DiagGGNExact


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return extend(nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 3)).double())


x, y = torch.randn(4, 1, 6, 6, dtype=torch.float64), torch.randint(3, (4,))


def test_samples_predictions_terms_layouts_and_fields_are_told():
    z = net()(x)
    found = curvopt.explain(F.cross_entropy(z, y) + 0.1 * F.huber_loss(z, torch.zeros_like(z)) + z[:, 0].mean())
    assert found.refused is None
    assert list(found.samples) == ["the extended Sequential: 4, along axis 0"]
    assert list(found.predictions) == ["[4, 3] AddmmBackward0"]
    known, rest, linear = found.terms
    assert "cross-entropy" in known and "HuberLoss" in rest and linear.startswith("linear, without curvature")
    layouts = {name: (layout, why) for name, _, layout, why in found.operations}
    assert layouts["ReluBackward0"] == ("(1, 4, 32)", "view (ViewBackward0)")
    assert layouts["TBackward0"][0] == "all share it"
    assert {how.split(": ")[1] for how in found.parameters.values()} == {"factors"}
    assert [line.split()[0] for line in str(found).splitlines()[:3]] == ["samples", "predictions", "terms"]


def test_nothing_is_computed_or_changed():
    fields = []
    for explains in (False, True):
        model = net()
        loss = F.cross_entropy(model(x), y)
        if explains:
            curvopt.explain(loss)
            assert all(p.grad is None for p in model.parameters())
        with backpack(DiagGGNExact(), BatchGrad()):
            loss.backward()
        fields.append([(p.grad, p.diag_ggn_exact, p.grad_batch) for p in model.parameters()])
    assert_close(*fields, rtol=0, atol=0)


def test_parts_that_are_no_terms_and_ways_that_are_dear_are_named():
    found = curvopt.explain(F.mse_loss(net()(x).mean(0), torch.zeros(3)))
    assert "the rest (MseLossBackward0)" in found.terms[0]
    mixed = extend(nn.Linear(3, 3))
    h = mixed(torch.randn(5, 3))
    model = extend(nn.Linear(3, 2))
    found = curvopt.explain(model((h @ h.T).softmax(1) @ h).square().sum())
    assert "sample by sample" in found.parameters["weight"]


@pytest.mark.parametrize("batch_axis", [0, None])
def test_refusals_are_told_with_the_argument_that_helps(batch_axis: int | None):
    layer = extend(nn.Linear(3, 2), batch_axis=batch_axis)
    loss = torch.stack([layer(torch.randn(1, 3)), layer(torch.randn(1, 3))]).square().sum()
    found = curvopt.explain(loss)
    assert (found.refused is None) == (batch_axis is None)
    if batch_axis is None:
        assert "batch_axis=None makes a batch one sample" in found.samples[0]
        with backpack(KFAC()):
            loss.backward()
    else:
        assert found.refused is not None and "batch_axis=None" in found.refused
    with pytest.raises(TypeError, match="got a tensor without a graph"):
        curvopt.explain(torch.zeros(()))
