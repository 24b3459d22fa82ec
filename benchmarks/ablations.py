"""What each mechanism of the engine is worth to the everyday loops: each is switched off, and the loops are run.

python -m benchmarks.ablations                        all mechanisms; five minutes on one core
python -m benchmarks.ablations slopes "tied weights"  some of them
python -m benchmarks.ablations --page                 write the table of benchmarks/results/ablations.md, too

A mechanism is a row of `MECHANISMS`: its name, and what stands in its place. Without it a loop stops; or its mean over
the last steps changes by more than a fiftieth of what it had gained; or it warns more often, as an optimizer takes
another quantity; or it differs a little. One whose first numbers are equal bit for bit does not have the mechanism, and
is not run to the end. A mechanism that serves fewer than two loops, and no public network of the tests, may go. Choices
between equal algorithms change no loop: `benchmarks.quantities` has their times.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from benchmarks.everyday_loops import WORKFLOWS
from curvopt import CurvoptError, CurvoptWarning
from curvopt.core.losses.roots import NotCurved
from curvopt.core.products.base import Dense
from curvopt.core.samples.layout import UNKNOWN
from curvopt.optim import KFACSGD

STEPS, FIRST, LAST = 20, 4, 5
PAGE = Path(__file__).parent / "results" / "ablations.md"
#: Part of the gain of a loop by which it may differ.
SAME = 0.02

Change = Callable[[Any], Any]
CORE = "curvopt.core"


def returns(value: Any) -> Change:
    """In place of a function: one that returns a value."""
    return lambda _: lambda *args, **kwargs: value


def refuses(text: str) -> Change:
    """In place of a function or property: an error of curvopt."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NotCurved(text)

    return lambda was: property(refuse) if isinstance(was, property) or hasattr(was, "attrname") else refuse


def without(*kinds: str) -> Change:
    """In place of a table: the same without some rows."""
    return lambda table: {kind: row for kind, row in table.items() if kind not in kinds}


def _all_in_one(find_terms: Any) -> Any:
    def find(*args: Any) -> Any:
        terms = find_terms(*args)
        terms.join(list(terms.known))
        return terms

    return find


def _whole_samples(cells: Any) -> Any:
    def whole(probe: Any) -> Any:
        if cells(probe) is None:
            return None
        of = import_module(f"{CORE}.losses.any").Cells
        batches = dict.fromkeys(head.samples for head in probe.heads.values())
        alike = [{i: head for i, head in probe.heads.items() if head.samples == batch} for batch in batches]
        return [of(heads, [head.axes for head in heads.values()]) for heads in alike]

    return whole


def _dense(lookup: Any) -> Any:
    return lambda *args: {name: Dense(jacobian.dense()) for name, jacobian in lookup(*args).items()}


def _rule_of_others(rule: Any) -> Any:
    return lambda kind: None if "BATCH_NORM" in kind or "BATCHNORM" in kind.replace("_", "") else rule(kind)


def _without_empirical(refused: Any) -> Any:
    def refuse(listener: Any, error: CurvoptError, request: Any) -> Any:
        instead = refused(listener, error, request)
        is_empirical = instead is not None and instead.extensions and instead.extensions == listener.extensions
        return refused(listener, error, instead) if is_empirical else instead

    return refuse


#: Name, and by ``module:attribute`` what is made of the attribute. What is there no longer is said, and left out.
MECHANISMS: dict[str, dict[str, Change]] = {
    "heads with fewer rows (pooled)": {f"{CORE}.samples.samples:_Batch._pooled_rows": returns(None)},
    "tensors computed past the outputs": {f"{CORE}.samples.samples:_computed_with_parameters": returns({})},
    "heads that are proven by a layer": {f"{CORE}.samples.samples:_Batch._is_proven": returns(False)},
    "probe of unknown operations": {
        f"{CORE}.samples.probe:probe_operands": lambda _: lambda node, *rest: [UNKNOWN] * len(node.next_functions)
    },
    "batch norm": {
        f"{CORE}.samples.axes:_rule": _rule_of_others,
        f"{CORE}.samples.axes:_is_recorded_batch_norm": returns(False),
    },
    "cross-entropy": {f"{CORE}.losses.known:_KINDS": without("LOGSOFTMAX")},
    "squared error": {f"{CORE}.losses.known:_KINDS": without("MSELOSS")},
    "squares by hand": {f"{CORE}.losses.known:_KINDS": without("MUL", "POW")},
    "binary cross-entropy": {f"{CORE}.losses.known:_KINDS": without("BINARYCROSSENTROPYWITHLOGITS")},
    "known terms apart from the rest": {f"{CORE}.losses.known:find_terms": _all_in_one},
    "known terms that make the rest convex": {
        f"{CORE}.losses.any:GenericLoss.is_definite": lambda _: property(lambda loss: True)
    },
    "losses by hand (double backward)": {f"{CORE}.losses.any:GenericLoss.blocks": refuses("switched off")},
    "blocks of losses by hand": {f"{CORE}.losses.any:Probe.cells": _whole_samples},
    "zeros where a loss is linear": {f"{CORE}.backward.second_order:SecondOrder._fill_with_zeros": returns(None)},
    "slopes": {f"{CORE}.products.sums:Slopes.are": lambda _: staticmethod(lambda outers: False)},
    "tied weights": {
        f"{CORE}.products.sums:tied": lambda _: lambda *parts: import_module(f"{CORE}.products.sums").Summed(parts)
    },
    "looked up rows": {f"{CORE}.layers.embedding:_lookup": _dense},
    "the batch as one sample": {"curvopt.core.backward.checks:may_be_one_sample": returns(False)},
    "the empirical quantity": {"curvopt.optim.curvature:Listening.refused": _without_empirical},
}


@contextmanager
def switched_off(changes: dict[str, Change]) -> Iterator[list[str]]:
    """Replace attributes, also where a module has imported them by name; what is not there."""
    restore: list[tuple[Any, str, Any]] = []
    missing = []
    for path, change in changes.items():
        module, _, attribute = path.partition(":")
        *owners, name = attribute.split(".")
        try:
            owner: Any = import_module(module)
            for each in owners:
                owner = getattr(owner, each)
            was = vars(owner)[name]
        except (ImportError, AttributeError, KeyError):
            missing.append(path)
            continue
        now = change(was.__func__ if isinstance(was, staticmethod) else was)
        places = [owner] if owners else [m for n, m in sys.modules.items() if n.startswith("curvopt")]
        for place in places:
            if vars(place).get(name) is was:
                restore.append((place, name, was))
                setattr(place, name, now)
    try:
        yield missing
    finally:
        for place, name, was in restore:
            setattr(place, name, was)


@dataclass
class Loop:
    """What a loop did: its numbers, how many warnings there were, and why it stopped, if it did."""

    numbers: list[float]
    warned: int = 0
    error: str = ""

    @property
    def end(self) -> float:
        """The mean of the last numbers."""
        return sum(self.numbers[-LAST:]) / LAST


def run(name: str, expected: Loop | None = None) -> Loop:
    """Run a loop; what is expected if the first numbers are equal."""
    torch.manual_seed(0)
    found = Loop([])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            for number, _ in zip(WORKFLOWS[name](KFACSGD), range(STEPS), strict=False):
                found.numbers.append(float(number))
                if expected is not None and len(found.numbers) == FIRST and found.numbers == expected.numbers[:FIRST]:
                    return expected
        except Exception as error:
            found.error = f"{type(error).__name__}: {error}"[:160]
    found.warned = sum(issubclass(warning.category, CurvoptWarning) for warning in said)
    return found


def differing(mechanism: str, expected: dict[str, Loop]) -> dict[str, tuple[str, str]] | None:
    """The loops that differ without a mechanism, whether they stop, change or warn, and how; ``None`` if it is gone."""
    found = {}
    with switched_off(MECHANISMS[mechanism]) as missing:
        if len(missing) == len(MECHANISMS[mechanism]):
            print(f"{mechanism}: {', '.join(missing)} is there no longer", flush=True)
            return None
        for name, before in expected.items():
            after = run(name, before)
            if after is before:
                continue
            how = f"from {before.numbers[0]:.4g} to {before.end:.4g}, without it to {after.end:.4g}"
            if after.error:
                found[name] = "stops", after.error
            elif not abs(after.end - before.end) <= SAME * abs(before.end - before.numbers[0]):
                found[name] = "changes", how
            else:
                found[name] = "warns" if after.warned > before.warned else "differs a little", how
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mechanisms", nargs="*", help="names of some, by default all")
    parser.add_argument("--page", action="store_true", help="write the table into the page of the internals")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    expected = {name: run(name) for name in WORKFLOWS}
    kinds = ("stops", "changes", "warns", "differs a little")
    rows = [f"| without | {' | '.join(kinds)} | for example |", "| --- " * (len(kinds) + 2) + "|"]
    for mechanism in options.mechanisms or MECHANISMS:
        found = differing(mechanism, expected)
        if found is None:
            continue
        print(f"{mechanism}: {len(found)} of {len(expected)} loops", flush=True)
        for name, (kind, how) in found.items():
            print(f"    {kind}: {name}: {how}", flush=True)
        count = Counter(kind for kind, _ in found.values())
        example = next((name for kind in kinds for name, (of, _) in found.items() if of == kind), "")
        rows.append(f"| {mechanism} | {' | '.join(str(count[kind]) for kind in kinds)} | {example.split(',')[0]} |")
    if options.page:
        head, _, rest = PAGE.read_text().partition("<!-- ablations -->\n")
        tail = rest.partition("<!-- end of ablations -->\n")[2]
        table = "\n".join(rows)
        PAGE.write_text(f"{head}<!-- ablations -->\n{table}\n<!-- end of ablations -->\n{tail}")


if __name__ == "__main__":
    main()
