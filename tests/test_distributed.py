"""Several processes take the step of one: ``torchrun`` runs every check of ``distributed_worker.py``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed
from distributed_worker import CHECKS

from curvopt.distributed import divide

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="PyTorch was built without gloo")


def torchrun(
    ranks: int, folder: Path, checks: list[str], script: str = "distributed_worker.py"
) -> list[dict[str, str]]:
    """By rank: for each check that was run, the traceback of its failure or an empty string."""
    worker = Path(__file__).with_name(script)
    path = os.pathsep.join([str(worker.parents[1]), os.environ.get("PYTHONPATH", "")])
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", str(worker)]
    done = subprocess.run(
        [sys.executable, *command, str(folder / "result"), *checks],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    files = [folder / f"result.{rank}" for rank in range(ranks)]
    assert all(file.exists() for file in files), done.stderr
    return [json.loads(file.read_text()) for file in files]


def test_ranks_together(tmp_path: Path) -> None:
    """All in one run, as processes take longer to start than to train; `test_fully_shard.py` has four ranks."""
    assert_passed(torchrun(2, tmp_path, list(CHECKS)), list(CHECKS))


def assert_passed(by_rank: list[dict[str, str]], checks: list[str]) -> None:
    for rank, results in enumerate(by_rank):
        failed = "\n".join(f"rank {rank}, {name}: {failure}" for name, failure in results.items() if failure)
        assert not failed, failed
        assert list(results) == checks


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_work_is_divided_by_cost(ranks: int) -> None:
    costs = [64, 0, 1000, 8, 64, 27, 343, 512, 0, 125]
    shares = divide(costs, ranks)
    assert sorted(i for share in shares for i in share) == [i for i, cost in enumerate(costs) if cost > 0]
    loads = [sum(costs[i] for i in share) for share in shares]
    assert max(loads) <= max(1000, sum(costs) / ranks * 4 / 3)
