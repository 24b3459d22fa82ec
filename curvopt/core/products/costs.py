"""Choices between equal algorithms: every such choice of the engine is made here, from sizes.

Costs are counted in multiply-adds of a large matrix product, with constants that were measured on single CPU cores;
the page "Internals" of the documentation explains them. Letters as in `curvopt.core.products.base`.

>>> by_pairs(V=10, S=1, O=64, I=64), by_pairs(V=10, S=100, O=64, I=64)
(True, False)
>>> columns_at_once(entries=100_000, device="cpu"), columns_at_once(entries=100_000, device="cuda")
(10, 2684)
"""

# ruff: noqa: E741 - the reserved letters
from __future__ import annotations

#: Multiply-adds that take as long as one entry of a temporary that is written and read once.
ENTRY = 40

#: Entries a temporary may hold before a reduction works through the samples in pieces: what fits into a core's cache.
CHUNK_ENTRIES = {"cpu": 1 << 18, "accelerator": 1 << 26}

#: Entries of a product that are read again from a cache, whichever.
CACHED_ENTRIES = 1 << 20

#: Activation entries that columns swept together may hold: together wins on small nets, one by one on large ones.
SWEEP_ENTRIES = {"cpu": 1 << 20, "accelerator": 1 << 28}

#: Rows that are put together at once for a second moment, and their entries, at least.
MOMENT_ROWS, MOMENT_ENTRIES = 1 << 10, {"cpu": 1 << 20, "accelerator": 1 << 26}

#: Multiply-adds that take as long as three calls from Python.
CALLS = 3 << 17


def _limit(limits: dict[str, int], device: str) -> int:
    return limits["cpu" if device == "cpu" else "accelerator"]


def columns_at_once(entries: int, device: str) -> int:
    """How many columns to pull back together if one fills so many entries of activations."""
    return max(1, _limit(SWEEP_ENTRIES, device) // max(entries, 1))


def samples_at_once(entries: int, N: int, device: str) -> int:
    """How many of N samples to work on together if one has so many entries; one if they are only a few."""
    if N * entries <= CACHED_ENTRIES:
        return N
    samples = max(1, _limit(CHUNK_ENTRIES, device) // max(entries, 1))
    # on a CPU a few calls cost less than the temporary of a few large samples
    return samples if samples >= 8 or device != "cpu" else 1


def one_by_one(rows: int, patches: int, device: str) -> bool:
    """Whether to multiply patches sample by sample, which are read where the input is then, not put together.

    Args:
        rows: how many of their entries are in a product.
        patches: entries of one sample's.
        device: type of the device.
    """
    return device == "cpu" and rows >= 24 and patches >= 1 << 16  # else calls and narrow products cost more


def samples_in_cache(entries: int, device: str) -> int:
    """How many samples to work on together if one has so many entries: for few calls, but in a core's cache."""
    return max(1, _limit(CHUNK_ENTRIES, device) // max(entries, 1))


def rows_at_once(S: int, I: int, device: str) -> int:
    """How many samples' rows of I entries at S positions to put together if they are needed just once.

    A product over many positions hides that a second moment is read and written each time.
    """
    entries = _limit(MOMENT_ENTRIES, device)
    return -(-max(MOMENT_ROWS, entries // max(I, 1)) // max(S, 1))


def even_share(total: int, most: int) -> int:
    """The size of the fewest parts of about the same size, at most ``most``."""
    return -(-total // -(-total // most))


def by_pairs(V: int, S: int, O: int, I: int, chunks: int = 1) -> bool:
    """Whether squares are cheaper by pairs of positions: ``(sum_s l_s r_s)^2 = sum_st (l_s l_t) (r_s r_t)``.

    The vectors, which come in chunks, enter one side only, so their number V does not count in the product over pairs.
    """
    pairs = S * (S + 1) // 2
    of_pair = ENTRY * (1.5 * (V * O + I) + 2 * chunks * O) + O * I
    return S == 1 or pairs * of_pair < V * O * I * (S + ENTRY)


def by_gram(S: int, O: int, I: int) -> bool:
    """Whether norms are cheaper by Gram matrices: ``|sum_s l_s r_s|^2 = sum_st (l_s l_t) (r_s r_t)``.

    Args:
        S: positions.
        O: features on the left.
        I: features on the right.
    """
    return S * (O + I) <= O * I


#: Rows of a block of a symmetric product.
SYMMETRIC_BLOCK = 192


def by_blocks(F: int, R: int, device: str) -> bool:
    """Whether a symmetric product of ``[F, R]`` is computed by blocks on and above the diagonal, and copied below."""
    return device == "cpu" and F * F * (R - 4 * ENTRY) >= 1 << 24  # blocks leave most of an accelerator idle


def in_basis_later(S: int, F: int) -> bool:
    """Whether it costs less to change the basis of products of matrices than that of the matrices.

    Args:
        S: rows of the side whose basis changes.
        F: rows of the products, which are the features on the other side (of all vectors that share this side).
    """
    return F < S


def by_rows(F: int, K: int, R: int, row: int, device: str) -> bool:
    """Whether a second moment of patches costs less by products of rows than by one of patches.

    Args:
        F: features of a row's positions.
        K: entries of the kernel along its first axis.
        R: positions that each entry sees, of all samples.
        row: positions of a row, of all samples.
        device: type of the device.
    """
    by_rows = K * R + K * (K - 1) // 2 * row + 3 * ENTRY * K * K  # sums are put together in the end
    return device == "cpu" and F * F * by_rows + K * K * CALLS < 0.55 * K * K * F * F * R
