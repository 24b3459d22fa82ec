"""A mechanism is switched off where every module has it, and on again."""

from benchmarks.ablations import MECHANISMS, differing, run, switched_off


def test_a_loop_that_has_a_mechanism_differs_without_it_and_only_there() -> None:
    name = "Focal loss"
    before = run(name)
    found = differing("losses by hand (double backward)", {name: before})
    assert found is not None and list(found) == [name]
    assert run(name, before) is before


def test_what_is_there_no_longer_is_said() -> None:
    changes = {"curvopt.core.nowhere:function": MECHANISMS["tied weights"]["curvopt.core.products.sums:tied"]}
    with switched_off(changes) as missing:
        assert missing == list(changes)
