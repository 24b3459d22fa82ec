"""What the table of `benchmarks.abilities` says of this package."""

from __future__ import annotations

import pytest

from benchmarks import abilities


@pytest.mark.parametrize("quantity", abilities.QUANTITIES)
@pytest.mark.parametrize("feature", abilities.FEATURES)
def test_right(feature: str, quantity: str):
    if not abilities.expected(feature, quantity):
        pytest.skip("Kronecker factors have several definitions here")
    assert abilities.verdict("curvopt", feature, quantity) == "right"


def test_wrong_and_missing_numbers_are_noticed(monkeypatch: pytest.MonkeyPatch):
    feature, quantity = next(iter(abilities.FEATURES)), "BatchGrad"
    right = abilities.expected(feature, quantity)
    answers = {
        "wrong": {name: 1.01 * value for name, value in right.items()},
        "incomplete": dict(list(right.items())[:1]),
    }
    for verdict, answer in answers.items():
        monkeypatch.setattr(abilities, "method", lambda *_, answer=answer: answering(answer))
        assert abilities.verdict("curvopt", feature, quantity) == verdict

    def fails(*_: object) -> None:
        raise KeyError

    monkeypatch.setattr(abilities, "method", fails)
    assert abilities.verdict("curvopt", feature, quantity) == "error"


def answering(answer: dict):
    from benchmarks.packages import Method

    return Method(lambda: answer)
