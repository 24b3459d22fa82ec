"""Optimizers of models that ``fully_shard`` divides take the steps of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed
from sharded_worker import CHECKS
from test_distributed import assert_passed, torchrun

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="PyTorch was built without gloo")
#: On three ranks, slices are uneven and some are empty.
OF_THREE = [
    "parts_of_a_batch_are_the_batch",
    "unequal_and_empty_batches",
    "communication_dtypes",
    "from_all_ranks_but_one_to_all",
]
OF_TWO = [name for name in CHECKS if name != "from_all_ranks_but_one_to_all"]


@pytest.mark.parametrize(
    ("ranks", "checks"), [(2, OF_TWO), (3, OF_THREE), (4, ["replicas_of_shards"])], ids=["two", "three", "four"]
)
def test_ranks_together(ranks: int, checks: list[str], tmp_path: Path) -> None:
    """All in one run, as processes take longer to start than to train."""
    assert_passed(torchrun(ranks, tmp_path, checks, "sharded_worker.py"), checks)
