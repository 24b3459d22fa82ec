"""Runs random tests, each in a process of its own, so that none passes thanks to leftovers of another.

python tests/alone.py                   60 tests, or as many as start within four minutes
python tests/alone.py --seed 7          the 60 tests that a run with this seed took
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYTEST = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
ENVIRONMENT = {"OMP_NUM_THREADS": "1", **os.environ}
SECONDS_OF_A_TEST = 300


def collect() -> list[str]:
    """The names of all tests but slow ones."""
    done = subprocess.run(
        [*PYTEST, "--collect-only", "-m", "not slow", "tests"],
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        sys.exit(f"the tests cannot be collected:\n{done.stdout[-5000:]}{done.stderr[-5000:]}")
    return [line for line in done.stdout.splitlines() if line.startswith("tests/") and "::" in line]


def failure(test: str, deadline: float) -> str | None:
    """Runs a test, unless it is too late; why it failed, empty if it passed, ``None`` if it did not run."""
    if time.monotonic() > deadline:
        return None
    try:
        done = subprocess.run(
            [*PYTEST, test], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=SECONDS_OF_A_TEST
        )
    except subprocess.TimeoutExpired:
        return f"took more than {SECONDS_OF_A_TEST} seconds"
    return done.stdout[-5000:] + done.stderr[-2000:] if done.returncode else ""


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=60, help="tests to run (60)")
    parser.add_argument("--seconds", type=int, default=240, help="no test starts later (240)")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6), help="chooses the tests")
    options = parser.parse_args()
    tests = collect()
    chosen = random.Random(options.seed).sample(tests, min(options.count, len(tests)))
    print(f"{len(chosen)} of {len(tests)} tests, each in a process of its own, --seed {options.seed}", flush=True)
    deadline = time.monotonic() + options.seconds
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda test: failure(test, deadline), chosen))
    failed = [(test, result) for test, result in zip(chosen, results, strict=True) if result]
    for test, result in failed:
        print(f"\n{result}\nfails alone: python -m pytest '{test}'")
    late = results.count(None)
    if late:
        print(f"{late} tests were left out: {options.seconds} seconds were over")
    print(f"{results.count('')} passed, {len(failed)} failed, {late} skipped")
    sys.exit(1 if failed or not results.count("") else 0)


if __name__ == "__main__":
    main()
