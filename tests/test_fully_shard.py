"""Optimizers of models that ``fully_shard`` divides take the steps of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed
from sharded_worker import CHECKS
from test_distributed import assert_passed, torchrun

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="PyTorch was built without gloo")
#: On four ranks slices are uneven, some are empty, and a mesh has two dimensions.
OF_FOUR = [
    "parts_of_a_batch_are_the_batch",
    "unequal_and_empty_batches",
    "communication_dtypes",
    "from_all_ranks_but_one_to_all",
    "replicas_of_shards",
    "replicated unequal_and_empty_batches",
    "replicated parameters_that_some_ranks_do_not_use",
    "replicated communication_dtypes",
    "replicated each_matrix_is_factored_on_one_rank",
    "replicated groups",
]
OF_TWO = [name for name in CHECKS if name != "from_all_ranks_but_one_to_all"]


@pytest.mark.parametrize(("ranks", "checks"), [(2, OF_TWO), (4, OF_FOUR)], ids=["two", "four"])
def test_ranks_together(ranks: int, checks: list[str], tmp_path: Path) -> None:
    """All in one run, as processes take longer to start than to train."""
    assert_passed(torchrun(ranks, tmp_path, checks, "sharded_worker.py"), checks)
