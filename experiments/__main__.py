"""``python -m experiments`` lists the scripts, the problems and the optimizers."""

import importlib

from experiments.optimizers import OPTIMIZERS
from experiments.problems import describe_problems


def main() -> None:
    """Print the lists."""
    print("Scripts; each has --help:\n")
    for name in ("train", "compare", "sweep", "inspect"):
        doc = importlib.import_module(f"experiments.{name}").__doc__ or ""
        print(f"    python -m experiments.{name:<9}{doc.splitlines()[0]}")
    print(f"\nProblems, for --problem:\n\n{describe_problems()}")
    print("\nOptimizers:\n")
    for name, kind in OPTIMIZERS.items():
        print(f"    {name:<21}{kind.__doc__}")


if __name__ == "__main__":
    main()
