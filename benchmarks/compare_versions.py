"""What another version of the package computes otherwise: fields, and the everyday loops of `benchmarks.workflows`.

python -m benchmarks.compare_versions --old CHECKOUT                 compare a checkout with this one
python -m benchmarks.compare_versions --old CHECKOUT --only fields   some three minutes on one core; loops take seven
python -m benchmarks.compare_versions --old CHECKOUT --filter conv   programs with "conv" in their names

Both versions run the programs of this checkout, each in a process of its own that uses the public names of the package
alone: every quantity in float64 of the networks of ``tests/cases.py``, of the losses of `benchmarks.everyday_losses`
(outside and inside of a model), and of the first backward of every loop; and the loops themselves with each optimizer.

A difference is a field that differs by more than rounding, a program that only one of the versions refuses, a loop that
only one of them runs, or one that ends worse by a tenth of what it had gained. Intended ones stand, with their reason,
in ``intended_differences.toml``; any other makes the exit status 1. Sampled quantities count where both versions draw
alike. Results are kept for the sources that they were computed from, so an interrupted run goes on where it was.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.one_version import ROOT, Computed, Failed, Results, matches, read

BENCHMARKS = ROOT / "benchmarks"
INTENDED = BENCHMARKS / "intended_differences.toml"

#: Admitted difference of fields, in units of the largest entry; and the least such unit, in that of all parameters.
ROUNDING, LEAST = 1e-7, 1e-4
#: The part of what a loop had gained that it may lose; over how many last steps is averaged.
LOST, LAST = 0.1, 5


@dataclass(frozen=True)
class Difference:
    """What differs in a quantity, or in a loop with an optimizer."""

    program: str
    quantity: str
    what: str
    detail: str

    def __str__(self) -> str:
        return f"{self.program} | {self.quantity} | {self.what}"


def largest_difference(old: dict[str, list[Tensor]], new: dict[str, list[Tensor]]) -> str | None:
    """Where two sets of fields differ the most, in words; ``None`` if by no more than rounding."""
    if old.keys() != new.keys():
        return f"fields of other parameters: only then {sorted(old.keys() - new)}, only now {sorted(new.keys() - old)}"
    worst, where = 0.0, ""
    entries = [float(t.abs().max()) for tensors in old.values() for t in tensors if t.numel()]
    least = max(LEAST * max(entries, default=0), 1e-9)  # of parameters without curvature there is rounding alone
    for name, before in old.items():
        after = new[name]
        if [t.shape for t in before] != [t.shape for t in after]:
            return f"{name} had the shapes {[list(t.shape) for t in before]}, has {[list(t.shape) for t in after]}"
        for a, b in zip(before, after, strict=True):
            scale = max(float(a.abs().max()), least) if a.numel() else 1.0
            error = float((a - b).abs().max()) / scale if a.numel() else 0.0
            if not error <= worst:
                worst, where = error, name
    return f"by {worst:.2g} of the largest entry, at {where}" if not worst <= ROUNDING else None


def difference(old: Any, new: Any) -> tuple[str, str] | None:
    """What differs in two results, and the details."""
    if isinstance(old, Failed) and isinstance(new, Failed):
        return None if old.refused == new.refused else ("fails otherwise", f"before {old.text}, now {new.text}")
    if isinstance(old, Failed) or isinstance(new, Failed):
        failed, when = (new, "now") if isinstance(new, Failed) else (old, "before")
        return f"{'refused' if failed.refused else 'fails'} {when}", failed.text
    if isinstance(old, Computed):
        found = largest_difference(old.fields, new.fields)
        is_other_draw = old.sampled and found is not None and found.startswith("by ")
        return ("drawn otherwise" if is_other_draw else "differs", found) if found else None
    before, after = (sum(loop.numbers[-LAST:]) / LAST for loop in (old, new))
    gain = abs(old.numbers[0] - before)
    if not after <= before + LOST * gain:
        return "ends worse", f"from {old.numbers[0]:.4g} to {before:.4g} before, to {after:.4g} now"
    if {text[:60] for text in old.warned} != {text[:60] for text in new.warned}:
        return "warns otherwise", f"before {[t[:90] for t in old.warned]}, now {[t[:90] for t in new.warned]}"
    return None


#: What is counted, but needs no reason.
HARMLESS = ("drawn otherwise", "warns otherwise")


def differences(old: Results, new: Results) -> Iterator[Difference]:
    """All differences between results of the same programs."""
    for key in old | new:
        if key not in old or key not in new:
            when = "now" if key in old else "before"
            yield Difference(*key, f"not there {when}", "")
        elif found := difference(old[key], new[key]):
            yield Difference(*key, *found)


def report(only: str, old: Results, new: Results, notes: bool) -> int:
    """Print the differences; the number of those that nobody has intended."""
    reasons = {row["pattern"]: row["reason"] for row in tomllib.loads(INTENDED.read_text()).get(only, [])}
    count, counted = Counter[str](), Counter[str]()
    of_program = defaultdict[tuple[str, str], list[Difference]](list)
    for found in differences(old, new):
        pattern = next((pattern for pattern in reasons if fnmatchcase(str(found), pattern)), None)
        count[pattern or ""] += found.what not in HARMLESS
        counted[found.what] += 1
        if pattern is None and (notes or found.what not in HARMLESS):
            of_program[found.program, found.what].append(found)
    alike = defaultdict[tuple[str, str], list[Difference]](list)
    for (_, what), found in of_program.items():
        alike[what, ", ".join(each.quantity for each in found)].append(found[0])
    for (what, names), found in alike.items():
        print(f"{what} | {names} | {', '.join(each.program for each in found)}\n    {found[0].detail}")
    for pattern, reason in reasons.items():
        print(f"intended, {count[pattern]} times: {pattern}\n    {reason}")
    programs = len({program for program, _ in new})
    kinds = ", ".join(f"{number} {what}" for what, number in counted.items()) or "no difference"
    print(f"{only}: {programs} programs, {len(new)} results; {kinds}. Not intended: {count['']}.", flush=True)
    return count[""]


def key_of(*paths: Path | str | int) -> str:
    """A name for all that results depend on: texts, and the Python files of folders."""
    digest = hashlib.sha256(torch.__version__.encode())
    for path in paths:
        files = sorted(path.rglob("*.py")) if isinstance(path, Path) and path.is_dir() else [path]
        for file in files:
            digest.update(file.read_bytes() if isinstance(file, Path) else str(file).encode())
    return digest.hexdigest()[:16]


def main() -> None:
    """Run both versions, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", type=Path, required=True, help="checkout of the version to compare with")
    parser.add_argument("--new", type=Path, default=ROOT, help="checkout of the other version, by default this one")
    parser.add_argument("--only", choices=["fields", "loops"], help="one of the two parts")
    parser.add_argument("--filter", default="", help="part or pattern of the programs' names")
    parser.add_argument("--steps", type=int, default=20, help="steps of each loop")
    parser.add_argument("--notes", action="store_true", help="print other draws and warnings of loops, too")
    parser.add_argument("--results", type=Path, default=Path(tempfile.gettempdir()) / "curvopt-versions")
    options = parser.parse_args()
    parts = [options.only] if options.only else ["fields", "loops"]
    options.results.mkdir(exist_ok=True)
    unintended = 0
    for only in parts:
        found = []
        for checkout in (options.old, options.new):
            programs = [BENCHMARKS / f"{name}.py" for name in ("one_version", "everyday_losses", "everyday_loops")]
            tables = [*programs, next(ROOT.glob("tests/**/cases.py"))]
            file = options.results / f"{only}-{key_of(checkout / 'curvopt', *tables, options.steps)}.pickle"
            arguments = str(checkout.resolve()), only, options.filter, options.steps, str(file.resolve())
            command = [sys.executable, "-c", f"from benchmarks.one_version import work; work(*{arguments})"]
            environment = {**os.environ, "PYTHONPATH": "", "OMP_NUM_THREADS": "1"}
            start = time.monotonic()
            subprocess.run(command, check=True, env=environment, cwd=ROOT)
            print(f"{only} of {checkout}: {time.monotonic() - start:.0f} s", flush=True)
            found.append({key: result for key, result in read(file).items() if matches(key[0], options.filter)})
        unintended += report(only, *found, notes=options.notes)
    sys.exit(unintended > 0)


if __name__ == "__main__":
    main()
