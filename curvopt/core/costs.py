"""Which of several equal algorithms is used: every such choice of the engine is made here, from sizes.

Costs are counted in multiply-adds of a large matrix product, with constants that were measured on single CPU cores;
the page "Internals" of the documentation explains them. Which library multiplies is measured where the code runs.
Letters as in `curvopt.core.jacobians`.
"""

# ruff: noqa: E741 - the reserved letters
from __future__ import annotations

import ctypes
import mmap
import os
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from math import prod
from time import perf_counter

import torch
from torch import Tensor

from curvopt.core import onednn

#: Multiply-adds that take as long as one entry of a temporary that is written and read once.
ENTRY = 40
#: Entries a temporary may hold before a reduction works through the samples in pieces: what fits into a core's cache.
CHUNK_ENTRIES = {"cpu": 1 << 18, "accelerator": 1 << 26}
#: Entries of a product that are read again from a cache, whichever.
CACHED_ENTRIES = 1 << 20
#: Activation entries that columns swept together may hold: together wins on small nets, one by one on large ones.
SWEEP_ENTRIES = {"cpu": 1 << 20, "accelerator": 1 << 26}
#: Rows of a symmetric product that are computed at once.
SYMMETRIC_BLOCK = 192
#: Rows that are put together at once for a second moment, and their entries, at least.
MOMENT_ROWS, MOMENT_ENTRIES = 1 << 10, {"cpu": 1 << 20, "accelerator": 1 << 26}
#: Multiply-adds of the least product that oneDNN is called for, alone or for every sample, and how much faster it is.
ONEDNN_SIZE, ONEDNN_REPEATED, ONEDNN_GAIN = 1 << 19, 3 << 20, 1.4
#: Multiply-adds of oneDNN that take as long as the calls from Python for one product of a sample.
CALL = 2 << 20
#: Multiply-adds that a large accelerator does in the time of one more call.
LAUNCH = 1 << 27
#: Activation entries that columns kept for later may hold.
KEPT_ENTRIES = 20 << 20
#: Columns beyond which one less makes no difference, and that go together where one costs less than to turn the root.
MOST_TURNED, TURNED_TOGETHER = 32, 2
#: Columns below which it is better at the transposed product.
NARROW = 64
#: Bytes of a block that glibc does not keep when it is freed (it allows no more), and of all that it keeps.
KEPT_BLOCK, KEPT_BYTES = 32 << 20, 128 << 20


@cache
def onednn_is_faster() -> bool:
    """Whether oneDNN multiplies much faster than the BLAS library, which may leave vector units alone (MKL on AMD's).

    Measured, once.
    """
    if not onednn.available():
        return False
    a = torch.ones(384, 384, dtype=torch.float32, device="cpu")
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        blas, other = (min(_seconds(multiply, a) for _ in range(5)) for multiply in (torch.mm, onednn.multiply))
    return blas > ONEDNN_GAIN * other


def _seconds(multiply: Callable[[Tensor, Tensor], Tensor], a: Tensor) -> float:
    start = perf_counter()
    multiply(a, a.T)
    return perf_counter() - start


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


def vectors_at_once(entries: int, V: int) -> int:
    """How many of V vectors to multiply with one sample together if the product with one has so many entries."""
    return even_share(V, max(1, (CACHED_ENTRIES >> 1) // entries))


def gradient_for_column(V: int, at_once: int) -> bool:
    """Whether to have the gradient bring one of V columns, so that one less of those pulled back is left to pull.

    Where several are, or could be, pulled back together, one more costs less than to turn the root.
    """
    return V <= MOST_TURNED and at_once <= TURNED_TOGETHER and -(-V // at_once) > -(-(V - 1) // at_once)


def columns_to_keep(entries: int, device: str) -> int:
    """How many columns to have in memory that were pulled back one by one, if one fills so many entries."""
    return max(1, KEPT_ENTRIES // max(entries, 1)) if device == "cpu" else 1


def vectors_worth_keeping(S: int, O: int, I: int) -> int:
    """How many vectors to keep, memory allowing, so as to multiply them with each sample's patches together.

    So many that the calls and putting patches together take less than a tenth of the products' time.
    """
    return -(-10 * (CALL + ENTRY * S * I) // max(S * O * I, 1))


def adds_one_by_one(entries: int, device: str) -> bool:
    """Whether products of so many entries are added up in less time by a call for each than by two for all."""
    return device == "cpu" and entries >= 1 << 14


def samples_in_vmap(entries: int, device: str) -> int:
    """How many samples to differentiate together by ``torch.func``, whose calls are expensive."""
    return max(1, 4 * _limit(CHUNK_ENTRIES, device) // max(entries, 1))


def by_pairs(V: int, S: int, O: int, I: int, chunks: int = 1) -> bool:
    """Whether squares are cheaper by pairs of positions: ``(sum_s l_s r_s)^2 = sum_st (l_s l_t) (r_s r_t)``.

    The vectors, which come in chunks, enter one side only, so their number V does not count in the product over pairs.
    """
    pairs = S * (S + 1) // 2
    of_pair = ENTRY * (1.5 * (V * O + I) + 2 * chunks * O) + O * I
    return S == 1 or pairs * of_pair < V * O * I * (S + ENTRY)


def by_gram(S: int, O: int, I: int, sums: bool = False) -> bool:
    """Whether norms are cheaper by Gram matrices: ``|sum_s l_s r_s|^2 = sum_st (l_s l_t) (r_s r_t)``.

    Args:
        S: positions.
        O: features on the left.
        I: features on the right.
        sums: whether products that are multiplied out are the gradient, too.
    """
    return S * (O + I) <= O * I and not (sums and 4 * S * S * (O + I) > ENTRY * O * I)


def spares_gradient(S: int, O: int, I: int, device: str) -> bool:
    """Whether the gradient costs less as the sum of products that are multiplied out anyway than by autograd."""
    # what is in cache is added up in less time than it takes to write and read it
    return device == "cpu" and S > (ENTRY // 2 if O * I <= CACHED_ENTRIES else 2 * ENTRY)


def by_shifts(C: int, kernel: tuple[int, int], positions: tuple[int, int, int], device: str, kept: bool) -> bool:
    """Whether the second moment of patches is cheaper by shifts of the planes that a kernel moves over by one.

    Args:
        C: features of the planes.
        kernel: entries of the kernel along their axes, L and K.
        positions: planes of all samples, and positions of the kernel along their axes: P, H and W.
        device: type of the device.
        kept: whether others need the patches, too.
    """
    (L, K), (P, H, W) = kernel, positions
    I, R = C * L * K, P * H * W
    products = L * K + (L - 1) * (K - 1)
    ends = L * L * (K - 1) * K * P * H + 2 * (L - 1) ** 2 * K * P * W
    shifted, calls = C * C * (products * P * H * (K + W - 1) + ends), products + 2 * K + 10
    if device != "cpu":
        return I * I * R - 2 * shifted >= 2 * calls * LAUNCH  # products of few rows leave part of it idle
    if C < 16 and onednn_is_faster():
        return False  # it is at its worst there
    entries = C * P * (L + H - 1) * (K + W - 1) * (L + 1) + 6 * I * I
    direct = 0.55 * I * I * R * _narrow(I) + (0 if kept else ENTRY * I * R)
    return shifted * _narrow(C) + ENTRY * entries + calls * CALL / 4 < direct


def _narrow(F: int) -> float:
    """How much longer multiply-adds take in products of so few rows and columns."""
    return 1 + 18 / max(F, 1)


def moment_by_samples(S: int, F: int, dtype: torch.dtype, device: str) -> bool:
    """Whether a second moment of F features at S positions takes less time by a product for each sample.

    They lie together in memory for each sample only: to sort them costs more than narrow products over few positions.
    """
    cheaper = F <= 2 * NARROW and S >= max(F, NARROW)
    return cheaper and device == "cpu" and dtype.itemsize >= 4 and not onednn_is_faster()


def by_blocks(F: int, K: int, device: str) -> bool:
    """Whether a symmetric product of ``[F, K]`` is worth computing block by block, above the diagonal only."""
    if device != "cpu":
        return False  # blocks leave most of an accelerator idle
    mirrored = (4 if onednn_is_faster() else 2) * ENTRY
    return F * F * (K - mirrored) >= 1 << 23  # entries below are copied column by column, and calls cost something


def blocks_at_once(device: str) -> bool:
    """Whether to multiply by all blocks of a factor in one call, of which some may be padded."""
    return device != "cpu"  # where each is a product for `core.products`


def apart(rows: Tensor) -> Tensor:
    """Rows to be read across: copied to where they are not powers of two apart, which only few cache lines can hold."""
    if rows.device.type != "cpu" or rows.stride(-2) * rows.element_size() % (1 << 11):
        return rows
    line = 64 // rows.element_size()
    return rows.new_empty(*rows.shape[:-1], rows.shape[-1] + line)[..., :-line].copy_(rows)


@cache
def keep_freed_memory() -> None:
    """Have glibc keep temporaries for the next backward instead of giving them back to the system each time.

    Where the user's settings (``MALLOC_TRIM_THRESHOLD_`` etc.) or another C library decide, nothing changes.
    """
    settings = [name for name in os.environ if name.startswith(("MALLOC_", "GLIBC_TUNABLES"))]
    if sys.platform == "linux" and not settings and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)):
        mallopt(-3, KEPT_BLOCK)  # M_MMAP_THRESHOLD
        mallopt(-1, KEPT_BYTES)  # M_TRIM_THRESHOLD


#: Large blocks of memory by size, whose tensors are gone: in this backward, and in the one before.
_freed: tuple[dict[int, list[mmap.mmap]], dict[int, list[mmap.mmap]]] = ({}, {})


def empty(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Uninitialised memory.

    What is large comes from the system page by page, which takes longer than to compute what is written there. So pages
    are large, where the system has such, and those of a tensor that is gone serve the next one of the same size. In
    between the system may take them back, should it need them.
    """
    size = prod(shape) * like.element_size()
    if size < max(KEPT_BLOCK, 1) or like.device.type != "cpu" or not hasattr(mmap, "MADV_HUGEPAGE"):
        return like.new_empty(shape)
    pages = _freed_of(size) or _mapped(size)
    view = memoryview(pages)  # what PyTorch holds and lets go of
    weakref.finalize(view, _keep, pages).atexit = False
    return torch.frombuffer(view, dtype=like.dtype).view(shape)


def forget_unused() -> None:
    """A backward is over: give back the blocks that it did not need."""
    global _freed
    _freed = ({}, _freed[0])


def _freed_of(size: int) -> mmap.mmap | None:
    for blocks in _freed:
        with suppress(KeyError, IndexError):
            return blocks[size].pop()
    return None


def _mapped(size: int) -> mmap.mmap:
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # of a system that has none
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


def _keep(pages: mmap.mmap) -> None:
    with suppress(OSError, AttributeError):  # of a system that does not know it
        pages.madvise(mmap.MADV_FREE)
    _freed[0].setdefault(len(pages), []).append(pages)
