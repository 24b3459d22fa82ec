"""The language model on which optimizers are compared, and the command that does so."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from benchmarks import language_model as bench

SIZE = bench.SIZES["tiny"]


def test_only_earlier_tokens_are_seen_and_the_loss_is_a_sum() -> None:
    torch.manual_seed(0)
    model = bench.GPT(SIZE)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    x, y = torch.randint(256, (2, 3, SIZE.length))
    changed = x.clone()
    changed[:, -1] = (x[:, -1] + 1) % 256
    short = [
        bench.GPT.forward(model, tokens, torch.full_like(y, -100).index_copy(1, torch.arange(15), y[:, :15]))
        for tokens in (x, changed)
    ]
    assert torch.equal(*short)
    assert not torch.equal(model(x, y), model(changed, y))
    torch.testing.assert_close(model(x, y), sum(model(x[n : n + 1], y[n : n + 1]) for n in range(3)))


def test_held_out_text_is_not_trained_on_and_batches_are_the_same_for_all() -> None:
    text = bench.Text.load()
    assert len(text.train) > 5 * len(text.held_out) > 10**6
    one, other = (next(text.batches(SIZE, 3, "cpu")) for _ in range(2))
    assert torch.equal(one[0], other[0]) and torch.equal(one[0][:, 1:], one[1][:, :-1])


def test_the_command_compares_all_and_keeps_finished_runs(tmp_path: Path) -> None:
    command = ["--size", "tiny", "--seeds", "1", "--cache", str(tmp_path / "cache"), "--out", str(tmp_path)]
    bench.main(command)
    found = json.loads((tmp_path / "language-model-tiny.json").read_text())
    assert set(found["methods"]) == {*bench.TUNED, *bench.NOT_TUNED}
    assert all(
        run[-1]["loss"] < 5.6 for method in found["methods"].values() for run in method["runs"]
    )  # log 256 is 5.5
    assert (tmp_path / "language-model-tiny.png").stat().st_size > 10_000
    files = {f: f.stat().st_mtime_ns for f in (tmp_path / "cache").iterdir()}
    bench.main(command)
    assert files == {f: f.stat().st_mtime_ns for f in (tmp_path / "cache").iterdir()}
