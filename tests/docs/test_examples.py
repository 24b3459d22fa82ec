"""Every example runs as a script, in seconds, and needs no more than a plain install with the extra ``experiments``."""

from __future__ import annotations

import ast
import os
import re
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("plot_*.py"))
plt = pytest.importorskip("matplotlib.pyplot")

#: Examples that train for about ten seconds.
LONG = ["continual_learning", "finetuning", "influence", "pinn", "pruning", "reinforcement_learning", "vae"]


@pytest.fixture(autouse=True)
def _restore(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("MPLBACKEND", "agg")
    plt.switch_backend("agg")
    dtype = torch.get_default_dtype()
    yield
    torch.set_default_dtype(dtype)
    plt.close("all")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow(reason="trains to the end of its story") if name in LONG else ())
        for name in (example.stem.removeprefix("plot_") for example in EXAMPLES)
    ],
)
def test_example_ends_in_a_picture(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    shown = []
    monkeypatch.setattr(plt, "show", lambda: shown.extend(plt.get_fignums()))
    runpy.run_path(str(ROOT / "examples" / f"plot_{name}.py"), run_name="__main__")
    assert shown
    for number in shown:
        for axes in plt.figure(number).axes:
            # nothing is drawn of curves that are not finite
            for line in axes.lines:
                assert torch.as_tensor(line.get_ydata(), dtype=torch.float64).isfinite().all()


def test_examples_need_a_plain_install_only():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["experiments"]
    provided = {re.split(r"[<>=\[ ]", name)[0].replace("scikit-learn", "sklearn") for name in extras}
    for example in EXAMPLES:
        imported = set()
        for node in ast.walk(ast.parse(example.read_text())):
            if isinstance(node, ast.Import):
                imported |= {name.name.split(".")[0] for name in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                imported.add(node.module.split(".")[0])
        assert imported <= {"curvopt", "torch", *provided, *sys.stdlib_module_names}, example.name


def test_pictures_are_finished_where_they_are_begun():
    """The gallery takes the pictures that there are at the end of each block, and closes them."""
    for example in EXAMPLES:
        blocks = re.split(r"^# %%$", example.read_text(), flags=re.MULTILINE)
        assert not [b for b in blocks if ("plt.subplots(" in b or "plt.figure(" in b) != ("plt.show()" in b)], example


def test_examples_are_titled_stories():
    assert len(EXAMPLES) >= 23
    for example in EXAMPLES:
        title, underline, *_ = (ast.get_docstring(ast.parse(example.read_text())) or "").splitlines()
        assert underline == "=" * len(title), example.name


@pytest.mark.slow(reason="three runs of processes that train together")
def test_a_gpt_that_ranks_divide_is_resumed_by_another_number_of_ranks(tmp_path: Path):
    def losses(ranks: int, steps: int, folder: str) -> list[str]:
        options = "--save-every 2 --log-every 1 --dim 16 --depth 1 --length 16 --batch 12 --dtype float32".split()
        command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command += [str(ROOT / "examples" / "train_gpt_on_ranks.py"), "--steps", str(steps), "--folder", folder]
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(
            [sys.executable, *command, *options],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == 0, done.stderr
        return re.findall(r"step \d+: loss [\d.]+", done.stdout)

    whole = losses(2, 4, "whole")
    assert losses(2, 2, "two") == whole[:2]
    (resumed, *_) = losses(1, 4, "two")
    assert resumed == whole[2]
