"""The benchmarks end to end, on a tiny network: what they measure, and that wrong numbers do not pass."""

from __future__ import annotations

import json
import socket
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch import nn

from benchmarks import (
    agreement,
    costmodel,
    gpu,
    gpu_numbers,
    gpu_parts,
    losses,
    memory,
    packages,
    python_share,
    quantities,
    ranks,
    scaling,
    tables,
    timing,
)
from benchmarks.packages import EXACT, PACKAGES, PRODUCTS, QUANTITIES
from benchmarks.problems import PROBLEMS, Problem
from curvopt.core.nodes import name_of, walk
from curvopt.core.products import costs
from experiments import models

TINY = PROBLEMS["tiny"]


@pytest.fixture(scope="module")
def checker():
    return agreement.Checker(TINY)


def command(monkeypatch, module, *arguments):
    monkeypatch.setattr(sys, "argv", ["benchmark", *map(str, arguments)])
    module.main()


# --------------------------------------------------------------------------------------------------------- agreement


@pytest.mark.parametrize("package", PACKAGES)
def test_every_package_agrees_with_the_definition(checker, package):
    pytest.importorskip(PACKAGES[package][0])
    for quantity in QUANTITIES:
        try:
            error, dtype = checker.error(package, quantity)
        except packages.NotOffered:
            assert package != "curvopt", quantity
            continue
        assert dtype == torch.float64, quantity
        assert error < agreement.TOLERANCE[dtype], quantity


def test_wrong_numbers_are_noticed(checker):
    def spoiled(value):
        if isinstance(value, list):
            return [factor[0] + 0.01 * factor[0].trace() * torch.eye(len(factor[0])) for factor in value]
        return 1.01 * value

    for quantity in QUANTITIES:
        if quantity == "KFRA":  # for which curvopt is the reference
            continue
        reference = checker.reference(quantity)
        with agreement.default_dtype(torch.float64):
            wrong = {name: spoiled(value) for name, value in reference.items()}
            assert agreement.error_of(wrong, reference) > agreement.TOLERANCE[torch.float64], quantity
            right = {name: [f[0] for f in v] if isinstance(v, list) else v for name, v in reference.items()}
            assert agreement.error_of(right, reference) < agreement.TOLERANCE[torch.float64], quantity


def test_a_parameter_that_is_left_out_is_noticed(checker):
    reference = checker.reference("BatchGrad")
    with pytest.raises(RuntimeError, match="nothing for 0.weight"):
        agreement.error_of({name: v for name, v in reference.items() if name != "0.weight"}, reference)


# ------------------------------------------------------------------------------------------------------------ timing


def test_ratios_are_multiples_of_the_unit():
    x = torch.randn(200, 200)

    def work(times):
        for _ in range(times):
            x @ x

    found = timing.ratios(lambda: work(20), {"same": lambda: work(20), "triple": lambda: work(60)}, rounds=7)
    assert 0.6 < found["same"]["cpu"] < 1.6
    assert 1.8 < found["triple"]["cpu"] < 5
    assert found["triple"]["rounds"] == 7


def spin(length):
    begin = time.process_time()
    while time.process_time() < begin + length:
        pass


def test_what_fails_and_what_takes_too_long_is_recorded():
    def fail():
        raise ValueError("no such layer")

    found = timing.ratios(lambda: sum(range(1000)), {"fails": fail, "spins": lambda: spin(1e9)}, rounds=2, limit=0.2)
    assert found["fails"] == {"fails": "ValueError: no such layer"}
    assert found["spins"]["fails"].startswith("TimeoutError") and found["spins"]["slow"] > 10
    assert tables.cell(found["fails"], "cpu") == "fails"
    assert tables.cell(found["spins"], "cpu").startswith("> ")


def test_the_first_turn_counts_only_for_what_is_very_long():
    lengths = iter([0.6] + 9 * [0.05])
    found = timing.ratios(lambda: spin(0.05), {"slow at first": lambda: spin(next(lengths))}, rounds=3, budget=0.5)
    assert found["slow at first"]["cpu"] < 3
    assert found["slow at first"]["rounds"] == 3
    found = timing.ratios(lambda: spin(0.05), {"very long": lambda: spin(0.5)}, rounds=3, budget=0.1)
    assert found["very long"]["rounds"] == 1


class Hog(nn.Module):
    """Holds 64 MiB for a moment, in its backward too."""

    def forward(self, x):
        return x * torch.ones(1 << 24).sum()


def hog(classes):
    return nn.Sequential(nn.Linear(4, classes), Hog())


def allocate(mib):
    torch.ones(mib << 18)
    return timing.peak_memory()


def test_results_are_of_a_commit_unless_code_was_changed(git, tmp_path, monkeypatch):
    names = ("benchmarks/timing.py", "benchmarks/results/a.json", "docs/a.md", "README.md")
    files = [tmp_path / name for name in names]
    for path in files:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("before")
    monkeypatch.setattr(timing, "__file__", str(files[0]))
    git("add", ".")
    git("commit", "-m", "all")
    for path in files[::-1]:
        assert timing.machine()["commit"] and not timing.machine()["commit"].endswith("-dirty")
        path.write_text("after")
    assert timing.machine()["commit"].endswith("-dirty")


def test_memory_is_that_of_a_fresh_process():
    ballast = torch.ones(256 << 18)
    small, large = (timing.in_fresh_process(allocate, mib) for mib in (1, 200))
    assert 150 < large - small < 250
    assert small < timing.peak_memory()
    assert ballast.numel()


def test_memory_beyond_that_of_the_gradient(monkeypatch):
    N, mlp = 20_000, partial(models.mlp, 64, 8, 8)
    monkeypatch.setattr(memory, "PROCESSES", 3)
    many = Problem(mlp, classes=4, N=N, inputs=(64,))
    own = memory.peak(many, "curvopt", "BatchGrad")
    assert own["peak_mib"] > 0.5 * 4 * N * sum(p.numel() for p in mlp(4).parameters()) / 2**20
    assert memory.peak(many, "curvopt", "Idle")["peak_mib"] < 0.2 * own["peak_mib"]
    same = memory.peak(Problem(hog, classes=3, N=2, inputs=(4,)), "curvopt", "BatchL2Grad")
    assert same["peak_mib"] < 32 < 64 < same["gradient_peak_mib"]


# ------------------------------------------------------------------------------------------------------ the commands


@pytest.fixture
def in_this_process(monkeypatch):
    """Measures memory here, as two tests above and `test_memory` have fresh processes, which take seconds to start."""
    monkeypatch.setattr(memory, "in_fresh_process", lambda function, *arguments: function(*arguments))


@pytest.mark.usefixtures("in_this_process")
def test_quantities(monkeypatch, tmp_path, capsys):
    asked = ("Idle", "KFAC", "DiagGGNExact")
    options = ("--package", "curvopt", "torch.func", "--rounds", 2, "--budget", 0.5, "--out", tmp_path)
    figure = tmp_path / "shown" / "quantities.png"
    command(monkeypatch, quantities, "--problem", "tiny", "--quantity", *asked, *options, "--figure", figure)
    written = json.loads((tmp_path / "quantities-tiny.json").read_text())
    assert {"cpu", "threads", "versions", "commit"} <= written["machine"].keys()
    rows = written["rows"]
    assert tuple(rows) == asked
    assert all(row["curvopt"]["cpu"] > 0 and not row["curvopt"]["wrong"] for row in rows.values())
    assert all(row["curvopt"]["peak_mib"] < 50 for row in rows.values())
    assert rows["KFAC"]["torch.func"]["absent"]
    assert rows["DiagGGNExact"]["torch.func"]["gradient"] is False
    assert figure.stat().st_size > 1000
    assert "| KFAC | **" in capsys.readouterr().out


def test_a_wrong_package_is_shown_as_wrong(monkeypatch, checker):
    right = packages.PACKAGES["torch.func"]

    def halved(task, quantity):
        method = right[1](task, quantity)
        return packages.Method(method.run, lambda values: {name: 0.5 * v for name, v in values.items()})

    monkeypatch.setitem(packages.PACKAGES, "torch.func", ("torch.func", halved))
    _, result = quantities.prepared("tiny", "torch.func", "BatchGrad", "cpu", checker)
    assert result["wrong"]
    row = {"torch.func": result | {"cpu": 1.0}, "curvopt": {"cpu": 2.0}}
    assert tables.best("BatchGrad", row, "cpu") == "curvopt"
    assert "wrong (1.00)" in tables.markdown("tiny", {"BatchGrad": row}, "cpu")


@pytest.mark.parametrize(
    ("quantity", "key", "first"), [("KFAC", "cpu", "b"), ("BatchGrad", "cpu", "a"), ("KFAC", "peak_mib", "a")]
)
def test_the_best_of_a_row_has_the_gradient_too(quantity: str, key: str, first: str):
    row = {"a": {key: 2.0, "gradient": False}, "b": {key: 2.9, "gradient": True}}
    assert tables.best(quantity, row, key) == first


def test_memory_of_what_raises_an_error_is_not_shown():
    row = {"asdl": {"fails": "KeyError", "peak_mib": 1.0}, "curvopt": {"peak_mib": 2.0}}
    assert tables.best("KFAC", row, "peak_mib") == "curvopt"
    assert "fails" in tables.markdown("tiny", {"KFAC": row}, "peak_mib")


def test_memory(monkeypatch, tmp_path, capsys):
    row = {"opacus": {"peak_mib": 7}, "curvopt": {"cpu": 1.5, "memory_fails": "no memory"}}
    tables.save_rows(tmp_path, "tiny", {"BatchGrad": row}, tables.Choice())
    monkeypatch.setattr(memory, "PROCESSES", 1)
    asked = ("--problem", "tiny", "--quantity", "BatchGrad", "KFRA", "--package", "curvopt", "torch.func")
    command(monkeypatch, memory, *asked, "--out", tmp_path)
    rows = json.loads((tmp_path / "quantities-tiny.json").read_text())["rows"]
    assert rows["KFRA"]["torch.func"]["absent"]
    assert rows["BatchGrad"]["curvopt"]["peak_mib"] < 50
    assert rows["BatchGrad"]["opacus"]["peak_mib"] == 7  # what is not asked for stays
    assert rows["BatchGrad"]["curvopt"]["cpu"] == 1.5 and "memory_fails" not in rows["BatchGrad"]["curvopt"]
    assert (tmp_path / "memory.png").exists()
    assert "MiB" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:Attempting to set identical low and high")  # no memory is needed beyond the first's
@pytest.mark.usefixtures("in_this_process")
def test_scaling(monkeypatch, tmp_path):
    monkeypatch.setattr(scaling, "SIZES", {"classes": (lambda size: scaling.images(4, 4, 2, size), (2, 5))})
    asked = ("--quantity", "BatchL2Grad", "DiagGGNExact", "--rounds", 1, "--size", "classes", "--out", tmp_path)
    command(monkeypatch, scaling, *asked)
    curves = json.loads((tmp_path / "scaling.json").read_text())["curves"]
    for costs_at in curves["classes"].values():
        assert costs_at["curvopt DiagGGNExact"]["cpu"] > 0 and "peak_mib" in costs_at["curvopt BatchL2Grad"]
    assert (tmp_path / "scaling.png").exists()


@pytest.mark.parametrize("name", python_share.TWINS)
def test_python_share_is_measured_on_twins_with_the_same_operations(name):
    def operations(problem):
        task = problem.make()
        return Counter(map(name_of, walk([task.lossfunc(task.model(task.x), task.y).grad_fn])))

    assert operations(python_share.TWINS[name]) == operations(PROBLEMS[name])


def test_python_share(monkeypatch, capsys):
    monkeypatch.setattr(python_share, "PROBLEMS", python_share.TWINS)
    command(monkeypatch, python_share, "--problem", "mlp", "--rounds", 3)
    assert "KFAC" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("module", "option"), [(scaling, "--size"), (costmodel, "--problem"), (python_share, "--quantity")]
)
def test_names_that_are_not_known_are_refused(module, option, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        command(monkeypatch, module, option, "nothing")
    assert "nothing" in capsys.readouterr().err


def test_costmodel(monkeypatch, tmp_path, capsys):
    command(monkeypatch, costmodel, "--problem", "tiny", "--rounds", 1, "--out", tmp_path)
    results = json.loads((tmp_path / "costmodel.json").read_text())["results"]
    expected = {"norms by Gram matrices", "squares by pairs of positions", "rows of a moment at once"}
    assert {r["choice"] for r in results} >= expected
    assert all(r["regret"] >= 1 and str(r["chosen"]) in r["milliseconds"] for r in results)
    assert "| norms by Gram matrices | 1 |" in capsys.readouterr().out


@torch.no_grad()
def test_every_choice_that_is_measured_is_made():
    for case in costmodel.cases_of_layers("tiny"):
        assert costmodel.chosen(case) is not None, f"{case.choice} does not ask costs.{case.function}"


@torch.no_grad()
def test_forced_choices_give_equal_numbers(monkeypatch):
    for case in costmodel.cases_of_layers("tiny"):
        values = []
        for answer in case.answers:
            with monkeypatch.context() as patch:
                patch.setattr(costs, case.function, lambda *_, answer=answer: answer)
                values.append(case.call())
        assert all(torch.allclose(value, values[0], rtol=1e-3) for value in values)


# -------------------------------------------------------------------------------------------------------------- CUDA


def test_gpu(monkeypatch, tmp_path, capsys):
    """Every part on the CPU, which has neither launches of kernels nor waits."""
    monkeypatch.setattr(gpu, "SHOWN", ("Idle", "BatchGrad", "KFAC"))
    monkeypatch.setattr(gpu, "COLUMNS", ("DiagGGNExact",))
    monkeypatch.setattr(gpu, "QUANTITIES", ("BatchGrad", "KFLR"))
    gpu.main(["--quick", "--device", "cpu", "--out", str(tmp_path)])
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert not found["skipped"] and found["machine"]["device"] == "cpu"
    correct = found["correctness"]
    assert correct["tiny"].keys() >= {"BatchGrad", "KFLR", "KFACSGD"}
    assert all(cell["right"] for name in ("tiny", "text") for cell in correct[name].values())
    assert all("fails" not in cell for row in correct["waits"].values() for cell in row.values())
    for name in ("3c3d", "resnet18", "transformer"):
        rows = found["quantities"][name]
        assert rows["gradient"]["torch"]["ms"] > 0
        assert all(rows[q]["curvopt"]["ratio"] > 0 and rows[q]["curvopt"]["launches"] > 50 for q in gpu.SHOWN)
        assert rows["BatchGrad"]["curvopt"]["launches"] > rows["Idle"]["curvopt"]["launches"]
        assert rows["KFAC"]["torch.func"] == {"absent": True}
    assert found["optimizers"].keys() == {"transformer", "resnet18"}
    for rows in found["optimizers"].values():
        assert all(cell["ms"] > 0 for cell in rows.values())
        assert all(rows[kind.__name__]["refreshes"] > 2 for kind in gpu_parts.OURS)
        assert rows["AdamW"]["refreshes"] == 0
    for rows in found["chunks"].values():
        assert all(cell["default"] and str(cell["best"]) in cell["sizes"] for cell in rows.values())
    printed = capsys.readouterr()
    assert "| KFAC | curvopt |" in printed.out and "chunks 3c3d" in printed.err


def test_cells_of_the_gpu_table_that_fail_or_lack_time_are_named(tmp_path):
    effort = gpu_parts.Effort("cpu", 1, 0.01)
    run = gpu.Run(tmp_path / "gpu.json", 1.0, effort, quick=True)

    def fail(task):
        raise torch.OutOfMemoryError("too much\nsecond line")

    run.cell("quantities", ("tiny", "KFAC", "curvopt"), partial(run.guarded_task, "tiny", TINY, fail))
    run.begin -= 50
    run.cell("quantities", ("tiny", "KFLR", "curvopt"), lambda: {"ms": 1.0})
    run.cell("optimizers", ("tiny", "AdamW"), lambda: {"ms": 1.0})
    found = json.loads(run.path.read_text())
    assert found["quantities"] == {"tiny": {"KFAC": {"curvopt": {"fails": "OutOfMemoryError: too much"}}}}
    assert found["optimizers"] == {"tiny": {"AdamW": {"ms": 1.0}}}
    assert found["skipped"] == ["quantities tiny KFLR curvopt"]
    assert "| KFAC | curvopt | OutOfMemoryError: too much |" in gpu.markdown(found)


def test_numbers_that_differ_on_the_device_are_noticed(monkeypatch):
    right, factors = gpu_numbers.fields, [1.0, 1.0]

    def spoiled(*args):
        factor = factors.pop()
        return {name: [factor * v for v in values] for name, values in right(*args).items()}

    monkeypatch.setattr(gpu_numbers, "fields", spoiled)
    assert gpu_numbers.compared(TINY, "KFAC", "cpu")["right"]
    factors += [1.001, 1.0]
    assert not gpu_numbers.compared(TINY, "KFAC", "cpu")["right"]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_quantities_on_cuda():
    for problem in (TINY, scaling.text(7)):
        for quantity in QUANTITIES:
            if problem.exact or quantity not in (*EXACT, *PRODUCTS):
                assert gpu_numbers.compared(problem, quantity, "cuda").get("right"), quantity


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_benchmark_on_cuda(monkeypatch, tmp_path):
    options = "--device cuda --package curvopt --rounds 2".split()
    options += ["--out", tmp_path, "--figure", tmp_path / "f.png"]
    command(monkeypatch, quantities, "--problem", "tiny", "--quantity", "BatchGrad", "KFLR", *options)
    written = json.loads((tmp_path / "quantities-tiny.json").read_text())
    assert written["machine"]["device"] != "cpu"
    assert all(row["curvopt"]["wall"] > 0 for row in written["rows"].values())


def test_the_table_of_losses_in_the_docs_is_what_the_losses_give():
    assert losses.table() in losses.PAGE.read_text()


# ------------------------------------------------------------------------------------------------------------- ranks


def test_bytes_of_a_step_by_formula(tmp_path):
    for model in ranks.MODELS:
        for name in ranks.NAMES:
            assert ranks.sent_by_formula(model, name, 1, 1e6, 2e6, 20) == 0
        both = [[ranks.sent_by_formula(model, name, r, 1e6, 2e6, 20) for name in ("SGD", "KFACSGD")] for r in (2, 64)]
        few, many = (ours - sgd for sgd, ours in both)
        assert (0 < many < few) if model == "fully_shard" else (0 < few < many)
        for name in ("KFACSGD", "EKFACSGD"):
            sent = [ranks.sent_by_formula(model, name + low, 4, 1e6, 2e6, 20) for low in ranks.LOW]
            assert sent[0] > sent[1] > sent[2] > ranks.sent_by_formula(model, "SGD", 4, 1e6, 2e6, 20)
    found = {model: {name: {"mean": 1e6} for name in ranks.NAMES} for model in ranks.MODELS}
    large = {link: {r: [1.0, 2.0] for r in ranks.COUNTS[1:]} for link in ranks.LINKS}
    ranks.draw(ranks.Settings(), {2: found}, large, tmp_path / "ranks.png")
    assert (tmp_path / "ranks.png").stat().st_size > 1000


def test_the_time_of_a_step_by_its_parts():
    step = partial(ranks.seconds_of_step, small=1.0, products=8.0, sent=6.0, bandwidth=2.0)
    assert step(share=0.25, cores=4) == 1 + 8 / 4 + 3
    assert step(share=0.25, cores=2) == 1 + 8 / 2 + 3  # two ranks take turns on a core
    python = dict.fromkeys(ranks.MODELS, 0.0)
    few, many = (ranks.milliseconds_of_transformer(1e9, r, python, 20) for r in (2, 64))
    assert few[0] < many[0]
    assert few[1] > many[1]


def test_bytes_over_the_loopback_device_are_counted():
    sent, before = bytes(300_000), ranks.loopback()
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        receiver, _ = server.accept()
        with receiver, ThreadPoolExecutor(1) as pool:
            sending = pool.submit(client.sendall, sent)
            missing = len(sent)
            while missing:
                missing -= len(receiver.recv(missing))
            sending.result()
    assert ranks.loopback() - before >= len(sent)
