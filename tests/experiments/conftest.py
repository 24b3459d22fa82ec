"""Pictures are drawn where they are looked at."""

from __future__ import annotations

import PIL.Image
import pytest


@pytest.fixture
def pictures() -> None:
    """Named by tests that look at the pictures of a training."""


@pytest.fixture(autouse=True)
def pictures_only_where_looked_at(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw nothing elsewhere: pictures take a second for each run."""
    if "pictures" not in request.fixturenames:
        monkeypatch.setattr("experiments.plots.plot_curves", lambda runs, title, out, *target: out.touch())
        monkeypatch.setattr("experiments.plots.plot_layers", lambda rows, title, out: out.touch())
        monkeypatch.setattr("experiments.tracking._heat_map", lambda rows: PIL.Image.new("RGB", (2, 2)))
