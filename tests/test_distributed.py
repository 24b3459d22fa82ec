"""Several processes take the step of one, with copies of the model and with models that ``fully_shard`` divides.

Tests of `distributed.py`, `optim/ranks.py` and the folder `optim/sharding`.

``torchrun`` runs the checks of ``distributed_worker.py``.
"""

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


#: On four ranks slices are uneven, some are empty, and a mesh has two dimensions.
OF_FOUR = [
    "shards parts_of_a_batch_are_the_batch",
    "shards unequal_and_empty_batches",
    "shards from_all_ranks_but_one_to_all",
    "shards from_some_ranks_to_all_by_get_and_set_state_dict",
    "shards replicas_of_shards",
    "copies unequal_and_empty_batches",
    "copies parameters_that_some_ranks_do_not_use",
    "copies each_matrix_is_factored_on_one_rank",
    "copies groups",
]
OF_TWO = [name for name in CHECKS if not name.startswith(("shards from_all_ranks", "shards from_some_ranks"))]


@pytest.mark.slow(reason="processes that train wait for each other, dozens of times")
@pytest.mark.parametrize(("ranks", "checks"), [(2, OF_TWO), (4, OF_FOUR)], ids=["two", "four"])
def test_ranks_together(ranks: int, checks: list[str], tmp_path: Path) -> None:
    """All in one run, as processes take longer to start than to train."""
    worker = Path(__file__).with_name("distributed_worker.py")
    path = os.pathsep.join([str(worker.parents[1]), os.environ.get("PYTHONPATH", "")])
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", str(worker)]
    done = subprocess.run(
        [sys.executable, *command, str(tmp_path / "result"), *checks],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    files = [tmp_path / f"result.{rank}" for rank in range(ranks)]
    assert all(file.exists() for file in files), done.stderr
    for rank, file in enumerate(files):
        results = json.loads(file.read_text())
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
