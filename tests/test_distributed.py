"""Several processes take the step of one, with copies of the model and with models that ``fully_shard`` divides.

Tests of `distributed.py`, `optim/ranks.py` and the folder `optim/sharding`.

``torchrun`` runs the checks of ``distributed_worker.py``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch.distributed
from distributed_worker import CHECKS

from curvopt.distributed import divide, divide_rows
from curvopt.optim import EKFACSGD, KFACSGD, DiagonalNewton, KFACAdamW

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="PyTorch was built without gloo")


#: On four ranks slices are uneven, some are empty, and a mesh has two dimensions.
OF_FOUR = [
    "shards parts_of_a_batch_are_the_batch",
    "shards unequal_and_empty_batches",
    "shards from_all_ranks_but_one_to_all",
    "shards from_some_ranks_to_all_by_get_and_set_state_dict",
    "shards replicas_of_shards",
    "shards rows_of_large_matrices_have_several_owners",
    "shards transfers_of_a_step",
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


def gpt(width: int, blocks: int, words: int = 50257) -> list[tuple[int, ...]]:
    """Shapes of a GPT whose head has the weight of its embedding."""
    vectors = [(3 * width,), (width,), (4 * width,), *[(width,)] * 5]
    matrices = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
    return [(words, width), (1024, width), *blocks * [*matrices, *vectors], (width,), (width,)]


@pytest.mark.parametrize("kind", [KFACSGD, EKFACSGD, KFACAdamW, DiagonalNewton])
@pytest.mark.parametrize(("width", "blocks"), [(768, 12), (2048, 24)])
def test_loads_of_large_models_are_even(kind: Any, width: int, blocks: int) -> None:
    optimizer = kind([torch.nn.Parameter(torch.zeros(2, 2))])
    quantity, every = optimizer._quantity, optimizer.inverse_every
    params = [torch.empty(shape, device="meta") for shape in gpt(width, blocks)]
    costs = [quantity.cost(p, every) for p in params]
    for ranks in (2, 3, 4, 8, 16, 32, 64):
        owners = divide_rows(costs, [(len(p), quantity.rows_together(p)) for p in params], ranks, [0] * ranks)
        loads = torch.zeros(2, ranks)
        for p, rows in zip(params, owners, strict=True):
            bounds = sorted(rows.values())
            assert [start for start, _ in bounds] + [len(p)] == [0] + [stop for _, stop in bounds]
            for rank, (start, stop) in rows.items():
                shape = (stop - start, *p.shape[1:])
                factors = 0 if kind is DiagonalNewton else sum(128 * d for d in (stop - start, prod(shape[1:])))
                kept = 2 * (prod(shape) + factors)
                loads[:, rank] += torch.tensor([quantity.cost(torch.empty(shape, device="meta"), every), kept])
        assert (loads.amax(1) <= 1.3 * loads.mean(1)).all(), (ranks, loads.amax(1) / loads.mean(1))
