"""Layouts tell the sample of each entry: whatever is done with them, by lists of these samples."""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import prod

import pytest

from curvopt.core.samples.layout import (
    UNKNOWN,
    UNUSED,
    Layout,
    along,
    axis_of,
    completed,
    labelled,
    labels_along,
    merged,
    rows_together,
)

SHAPES = [(2, 3, 4), (4, 3, 2), (6, 4), (4, 6), (24,), (3, 2, 2, 2), (2, 12), (1, 24), (2, 1, 3, 4)]


def entries(layout: Layout, N: int) -> list[int]:
    labels = range(N) if layout.labels is None else layout.labels
    return [label for _ in range(layout.before) for label in labels for _ in range(layout.after)]


def repeated(shape: Sequence[int], axis: int, labels: Sequence[int]) -> list[int]:
    """The labels of an axis for all entries of a shape."""
    before, after = prod(shape[:axis]), prod(shape[axis + 1 :])
    return [label for _ in range(before) for label in labels for _ in range(after)]


def drawn(chance: random.Random, N: int) -> Layout:
    """Of 24 entries, with the samples in their order or with labels, of which a few may not be used."""
    rows = N if chance.random() < 0.5 else chance.choice([rows for rows in (2, 3, 4, 6, 8, 12, 24) if rows != N])
    before = chance.choice([before for before in (1, 2, 3, 4) if 24 // rows % before == 0])
    kept = None if rows == N else tuple(chance.choice([UNUSED, *range(N)]) for _ in range(rows))
    return Layout(before, rows, 24 // rows // before, kept, chance.random() < 0.3)


def test_uses_of_a_large_tensor_that_differ_in_each_entry_are_not_listed():
    """A million pairs of them would take seconds."""
    pictures, turned = Layout(1, 64, 3 * 224**2, tuple(range(64))[::-1]), Layout(3 * 224**2, 64, 1)
    assert rows_together(pictures, turned)[1] is None
    assert merged(pictures, turned, 64) == UNKNOWN


@pytest.mark.parametrize("N", [2, 3, 4])
def test_two_uses_of_a_tensor_tell_its_samples_together(N: int):
    chance, together = random.Random(N), 0
    for _ in range(3000):
        one = drawn(chance, N)
        same = chance.random() < 0.5
        other = with_others_unused(chance, one, N) if same else drawn(chance, N)
        if chance.random() < 0.5:
            one, other = other, one
        found, pairs = merged(one, other, N), list(zip(entries(one, N), entries(other, N), strict=True))
        if isinstance(found, Layout):
            assert all(UNUSED in pair or pair[0] == pair[1] for pair in pairs), (one, other)
            assert entries(found, N) == [max(pair) for pair in pairs], (one, other)
            assert found.mixed == (one.mixed or other.mixed)
            together += 1
        else:
            assert found is UNKNOWN and not same and entries(one, N) != entries(other, N), (one, other)
    assert together > 1000
    assert merged(one, None, N) is UNKNOWN and merged(None, None, N) is None
    assert merged(one, UNKNOWN, 1) is one and merged(None, one, 1) is one


def with_others_unused(chance: random.Random, layout: Layout, N: int) -> Layout:
    """The same rows, or their halves, of which others are not used."""
    labels, parts = range(N) if layout.labels is None else layout.labels, 2 - layout.after % 2
    kept = tuple(UNUSED if chance.random() < 0.3 else label for label in labels for _ in range(parts))
    return Layout(layout.before, len(kept), layout.after // parts, kept, chance.random() < 0.3)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_axis_of_a_layout_has_its_samples(shape: tuple[int, ...]):
    chance, found = random.Random(0), 0
    for _ in range(300):
        layout = drawn(chance, 3)
        axis = axis_of(shape, layout)
        if axis is not None:
            assert repeated(shape, axis.index, labels_along(layout, axis)) == entries(layout, 3), layout
            assert along(shape, axis, layout) == layout
            found += 1
        elif layout.labels is None:  # then no axis has the samples, whatever is beside it
            for index, length in enumerate(shape):
                after, of_all = prod(shape[index + 1 :]), entries(layout, 3)
                assert repeated(shape, index, [of_all[i * after] for i in range(length)]) != of_all, layout
    assert found > 20
    assert axis_of((3, 0), Layout(1, 0, 1)) == (1, 1, 1)
    for index, length in enumerate(shape):  # a layout whose rows are an axis has it
        if length > 1:
            layout = Layout(prod(shape[:index]), length, prod(shape[index + 1 :]))
            assert axis_of(shape, layout) == (index, 1, 1)


def test_rows_in_order_need_no_labels():
    chance = random.Random(0)
    for _ in range(300):
        shape, N, mixed = chance.choice(SHAPES), chance.choice([2, 3, 4]), chance.random() < 0.5
        axis = chance.randrange(len(shape))
        labels = [chance.choice([UNUSED, *range(N)]) for _ in range(shape[axis])]
        if chance.random() < 0.5 and shape[axis] % N == 0:
            labels = chance.choice([[*range(N)] * (shape[axis] // N), sorted([*range(N)] * (shape[axis] // N))])
            assert labelled(shape, axis, labels, N, mixed).labels is None
        layout = labelled(shape, axis, labels, N, mixed)
        assert entries(layout, N) == repeated(shape, axis, labels) and layout.mixed == mixed
        whole = completed(layout, N)
        assert UNUSED not in entries(whole, N) and whole.mixed == mixed
        assert all(a in (UNUSED, b) for a, b in zip(entries(layout, N), entries(whole, N), strict=True))
    assert completed(Layout(2, 4, 3, (0, UNUSED, 2, 3)), 4) == Layout(2, 4, 3)
    assert completed(Layout(1, 6, 4, (0, UNUSED, 1, UNUSED, UNUSED, 2)), 3) == Layout(1, 3, 8)
    assert completed(Layout(1, 6, 4, (0, 1, UNUSED, UNUSED, 1, 2)), 3) == Layout(2, 3, 4)
