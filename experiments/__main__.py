"""``python -m experiments`` lists the scripts, the problems and the optimizers."""

import ast
from pathlib import Path

from experiments.problems import describe_problems
from experiments.settings import describe_optimizers


def main() -> None:
    """Print the lists."""
    print("Scripts; each has --help:\n")
    for name in ("train", "compare", "sweep", "inspect"):
        doc = ast.get_docstring(ast.parse(Path(__file__).with_name(f"{name}.py").read_text())) or ""
        print(f"    python -m experiments.{name:<9}{doc.splitlines()[0]}")
    print(f"\nProblems, for --problem:\n\n{describe_problems()}")
    print(f"\nOptimizers:\n\n{describe_optimizers()}")


if __name__ == "__main__":
    main()
