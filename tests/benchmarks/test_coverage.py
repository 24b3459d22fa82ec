"""The table of layers and extensions: computed, not believed; and what the documentation says of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import coverage
from curvopt.core.layers import rule as rules
from curvopt.core.layers.affine import Linear
from curvopt.extensions import KFRA

DOCUMENT = Path(__file__).parents[2] / "docs" / "supported_layers.md"


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[coverage.Kind, coverage.Cell]]:
    return coverage.table()


def test_no_cell_is_wrong(rows):
    wrong = [
        (name, kind.__name__, cell.note)
        for name, row in rows.items()
        for kind, cell in row.items()
        if cell.how == "wrong"
    ]
    assert not wrong


def test_the_document_shows_the_table(rows):
    assert DOCUMENT.read_text() == coverage.markdown(rows), (
        f"run python -m benchmarks.coverage --markdown {DOCUMENT.relative_to(DOCUMENT.parents[1])}"
    )


def test_every_layer_with_a_rule_has_a_row():
    listed = {type(module) for layer in coverage.LAYERS for module in layer.make().modules()}
    # other tests may have registered rules of their own
    assert listed >= {
        kind for kind in rules._rules if isinstance(kind, type) and kind.__module__.startswith("torch.nn")
    }


# factors of KFRA are only checked to be factors
@pytest.mark.parametrize("kind", [kind for kind in coverage.EXTENSIONS if kind is not KFRA], ids=lambda k: k.__name__)
def test_a_wrong_number_is_noticed(kind, monkeypatch):
    layer = coverage.LAYERS[0]
    expected = coverage.definitions(layer)
    assert coverage.cell(layer, kind, expected).how == "rule"
    fold = Linear.fold
    monkeypatch.setattr(Linear, "fold", lambda self, module, grad, x: 0.9 * fold(self, module, grad, x))
    assert coverage.cell(layer, kind, expected).how == "wrong"


def test_an_error_that_is_no_refusal_is_wrong(monkeypatch):
    monkeypatch.setattr(Linear, "unfold", lambda self, module, x: x.reshape(-1, 7, 7, 7))
    cell = coverage.cell(coverage.LAYERS[0], coverage.EXTENSIONS[0], {})
    assert cell.how == "wrong" and cell.note.startswith("RuntimeError: shape")
