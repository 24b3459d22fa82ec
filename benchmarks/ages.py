"""How old are the measured numbers? A row for each file of results: when, at which commits, and how many came since.

Counts the commits that changed ``curvopt/`` after a measurement. Fails if the numbers of README's table of times are of
several commits, or older than ``--most`` such commits: then measure again, by the script that the file's name begins
with.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

RESULTS = Path(__file__).with_name("results")
OTHERS = {"backpack", "asdl", "nngeometry", "opacus", "curvlinops", "torch.func"}
README = "quantities-3c3d.json"  # whose numbers are in the README


@dataclass(frozen=True)
class Ages:
    """Where the results are, and how old they may be."""

    results: Path = RESULTS
    """Folder of JSON files."""
    most: int = 50
    """Commits that may have changed the package since the numbers of the README were measured."""


def measured(content: Any) -> Iterator[tuple[str, str]]:
    """Commit and date of each measurement of curvopt in a file of results."""
    if isinstance(content, dict):
        if isinstance(content.get("commit"), str) and "date" in content:
            yield content["commit"].split()[0].removesuffix("-dirty"), content["date"][:10]
        for name, entry in content.items():
            # rows of packages have dates of their own, and those of others say nothing about curvopt
            if not (name == "machine" and "rows" in content) and name not in OTHERS:
                yield from measured(entry)
    elif isinstance(content, list):
        for entry in content:
            yield from measured(entry)


def commits_since(commit: str, repository: Path) -> int | None:
    """Commits that changed the package after ``commit``; ``None`` if this repository does not know it."""
    command = ["git", "rev-list", "--count", f"{commit}..HEAD", "--", ":/curvopt"]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True)
    return int(done.stdout) if done.returncode == 0 else None


def main() -> None:
    """The command line."""
    settings = tyro.cli(Ages, prog="python -m benchmarks.ages", description=__doc__)
    print("| results | measured | commits | commits to curvopt/ since |\n|---|---|---|---|")
    faults = []
    for file in sorted(settings.results.glob("*.json")):
        found = sorted(set(measured(json.loads(file.read_text()))), key=lambda row: row[1])
        if not found:
            continue  # losses, which do not age as times do
        commits = list(dict.fromkeys(commit for commit, _ in found))
        since = [commits_since(commit, settings.results) for commit in commits]
        dates = list(dict.fromkeys([found[0][1], found[-1][1]]))
        shown = ", ".join("unknown" if number is None else str(number) for number in since)
        print(f"| {file.name} | {' to '.join(dates)} | {', '.join(commits)} | {shown} |")
        if file.name == README:
            faults += [f"{file.name} is of {len(commits)} commits"] * (len(commits) != 1)
            old = [n for n in since if n is None or n > settings.most]
            faults += [f"{file.name} is older than {settings.most} commits to curvopt/"] * bool(old)
    sys.exit("; ".join(faults) + ": measure again by python -m benchmarks.quantities" if faults else 0)


if __name__ == "__main__":
    main()
