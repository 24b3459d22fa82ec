"""Errors and warnings: they name the cause and the remedy, in at most three sentences."""

from __future__ import annotations

import ast
import re
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import curvopt
from curvopt import CurvoptError, CurvoptWarning, backpack, extend
from curvopt.extensions import KFAC, BatchGrad, DiagGGNExact, DiagGGNMC, DiagHessian

PACKAGE = Path(curvopt.__file__).parent
SPOKEN = {"CurvoptError", "CurvoptWarning", "EmptyBatch", "ValueError", "TypeError", "ImportError", "warn"}
X, Y = torch.randn(5, 4), torch.randint(3, (5,))


def text_of(node: ast.expr) -> str:
    """A message as it is written, with ``x`` for what is filled in."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join("x" if isinstance(part, ast.FormattedValue) else text_of(part) for part in node.values)
    if isinstance(node, ast.BinOp):
        return text_of(node.left) + text_of(node.right)
    return "x"


def messages():
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and node.args:
                name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                if name in SPOKEN:
                    yield f"{path.name}:{node.lineno}", text_of(node.args[0])


def test_messages_have_at_most_three_sentences():
    found = dict(messages())
    assert len(found) > 100
    long = {where: text for where, text in found.items() if len(re.findall(r"[.!?](?=\s+[A-Z]|$)", text)) > 3}
    assert not long, "\n".join(f"{where}: {text}" for where, text in long.items())


def test_batch_norm_without_running_statistics_is_not_told_to_go_to_eval_mode():
    norm = nn.BatchNorm1d(5, track_running_stats=False)
    model = extend(nn.Sequential(nn.Linear(4, 5), norm, nn.Linear(5, 3))).eval()
    with pytest.raises(CurvoptError, match="has no running statistics.*train it with track_running_stats") as error:
        with backpack(BatchGrad()):
            F.cross_entropy(model(X), Y).backward()
    assert "model.eval()" not in str(error.value)


@pytest.mark.parametrize("loss", [F.cross_entropy, lambda z, y: F.mse_loss(z, torch.ones_like(z))])
@pytest.mark.parametrize("extension", [BatchGrad, DiagGGNExact, DiagHessian])
def test_batch_norm_in_the_loss_mixes_the_samples_of_all_layers(extension, loss):
    model = extend(nn.Linear(4, 3))
    with pytest.raises(CurvoptError, match="independent samples"), backpack(extension()):
        loss(F.batch_norm(model(X), None, None, training=True), Y).backward()
    with backpack(KFAC()):
        loss(F.batch_norm(model(X), None, None, training=True), Y).backward()
    with backpack(extension()):  # an instance norm mixes none
        z = model(X)
        loss(F.instance_norm(z.unsqueeze(1)).squeeze(1), Y).backward()


@pytest.mark.parametrize("vocabulary", [10, 200])
def test_many_columns_are_announced(vocabulary):
    model = extend(nn.Sequential(nn.Embedding(vocabulary, 2), nn.Linear(2, vocabulary)))
    ids = torch.randint(vocabulary, (1, 8))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CurvoptWarning)
        for extension in (DiagGGNExact(), DiagGGNMC()):
            with backpack(extension):
                F.cross_entropy(model(ids).transpose(1, 2), ids).backward()
    said = [str(warning.message) for warning in caught]
    assert [f"{8 * (vocabulary - 1):,} columns" in message for message in said] == [True] * (vocabulary > 100)


def test_attention_has_its_second_derivative_inside_of_the_context():
    layer = nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True)
    model = extend(nn.Sequential(layer, nn.Flatten(), nn.Linear(12, 3)))
    x = torch.randn(5, 3, 4)
    with backpack(DiagHessian()):
        F.cross_entropy(model(x), Y).backward()
    assert layer.self_attn.in_proj_weight.diag_h.isfinite().all()
    loss = F.cross_entropy(model(x), Y)
    with pytest.raises(CurvoptError, match="forward pass inside of the context"), backpack(DiagHessian()):
        loss.backward()
