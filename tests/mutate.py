"""Changes single operators, constants, conditions and arguments of the package, and prints what no test notices.

python tests/mutate.py                          100 mutations of curvopt/
python tests/mutate.py --seed 7 --count 30      the 30 that this seed draws
python tests/mutate.py --under core/samples     of one folder, or file
python tests/mutate.py --with tests/core        by tests of some folders or files alone

Which test runs which line, and how long it takes, is measured first, by one run of each file of tests under coverage,
and kept in ``.mutate`` until the file of tests, or a file of the package that it runs, changes. Of the tests that run
the line of a mutation the quickest come first, one of each function. A survivor is printed with their number: it does
the same as the original, or a test is missing. Slow tests are left out.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import hashlib
import importlib
import itertools
import json
import multiprocessing
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "curvopt"
KEPT = ROOT / ".mutate"
SECONDS = 120  # after which no more tests of a mutation begin
TOO_LONG = f"{SECONDS} seconds, in which a few tests did not end"
FIRST = 12  # tests that are tried first; then twice as many each time

OPERATORS = {
    **{ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*"), ast.Pow: ("**", "*")},
    **{ast.FloorDiv: ("//", "*"), ast.Mod: ("%", "//"), ast.And: ("and", "or"), ast.Or: ("or", "and")},
    **{ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">")},
    **{ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.In: ("in", "not in"), ast.Is: ("is", "is not")},
    **{ast.IsNot: ("is not", "is"), ast.NotIn: ("not in", "in")},
}


@dataclass(frozen=True)
class Mutation:
    """A piece of a file, by its first and last character, and what replaces it."""

    file: str  # below the package
    first: int  # line of its statement
    line: int
    start: int
    end: int
    new: str

    def text(self) -> str:
        """The whole file, mutated."""
        old = (PACKAGE / self.file).read_text()
        return old[: self.start] + self.new + old[self.end :]

    def __str__(self) -> str:
        text = (PACKAGE / self.file).read_text()
        old = " ".join(text[self.start : self.end].split())
        line = text.splitlines()[self.line - 1].strip()
        return f"curvopt/{self.file}:{self.line}: {old}  ->  {' '.join(self.new.split())}    in  {line}"


def mutations(file: str) -> list[Mutation]:
    """All mutations of a file; annotations and messages stay as they are."""
    text = (PACKAGE / file).read_text()
    lines = text.splitlines(keepends=True)
    starts = list(itertools.accumulate(map(len, lines), initial=0))

    def at(line: int, column: int) -> int:
        return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())  # columns count bytes

    def span(node: ast.AST) -> tuple[int, int]:
        place: Any = node
        return at(place.lineno, place.col_offset), at(place.end_lineno, place.end_col_offset)

    found: list[Mutation] = []
    statement = 1

    def add(node: ast.AST, start: int, end: int, new: str) -> None:
        found.append(Mutation(file, statement, text.count("\n", 0, start) + 1, start, end, new))

    def between(left: ast.AST, right: ast.AST, operator: ast.AST) -> None:
        if type(operator) not in OPERATORS:
            return
        old, new = OPERATORS[type(operator)]
        start, end = span(left)[1], span(right)[0]
        pattern = r"\s+".join(map(re.escape, old.split()))
        if match := re.search(rf"(?<!\w){pattern}(?!\w)" if old[0].isalpha() else pattern, text[start:end]):
            add(left, start + match.start(), start + match.end(), new)

    def visit(node: ast.AST) -> None:
        nonlocal statement
        statement = node.lineno if isinstance(node, ast.stmt) else statement
        match node:
            case ast.BinOp():
                between(node.left, node.right, node.op)
            case ast.BoolOp():
                between(node.values[0], node.values[1], node.op)
            case ast.Compare():
                for left, operator, right in zip(
                    [node.left, *node.comparators], node.ops, node.comparators, strict=False
                ):
                    between(left, right, operator)
            case ast.UnaryOp(op=ast.Not() | ast.USub()):
                add(node, *span(node), text[slice(*span(node.operand))])
            case ast.If() | ast.While() | ast.IfExp():
                start, end = span(node.test)
                add(node.test, start, end, f"(not ({text[start:end]}))")
            case ast.Constant(value=bool()):
                add(node, *span(node), str(not node.value))
            case ast.Constant(value=int() | float()):
                add(node, *span(node), repr(node.value + 1 if isinstance(node.value, int) else 2 * node.value))
            case ast.Call(func=function, args=[ast.expr() as first, ast.expr() as second, *_]) if not (
                isinstance(first, ast.Starred)
                or isinstance(second, ast.Starred)
                or ast.unparse(function) in ("isinstance", "issubclass", "hasattr", "getattr", "setattr", "zip")
            ):
                (start, middle), (again, end) = span(first), span(second)
                new = text[again:end] + text[middle:again] + text[start:middle]
                if new != text[start:end]:
                    add(node, start, end, new)
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list") or isinstance(node, ast.Raise | ast.JoinedStr):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    visit(child)

    visit(ast.parse(text))
    return found


def compiles(mutation: Mutation) -> bool:
    """Whether it is a program at all."""
    try:
        compile(mutation.text(), mutation.file, "exec")
    except SyntaxError:
        return False
    return True


# -------------------------------------------------------------------------------------- which test runs which line


def pytest_configure(config: Any) -> None:
    """This file is a plugin, too, where ``MUTATE_KEEP`` says into which file the lines of each test go."""
    import coverage
    import pytest

    measured = coverage.Coverage(data_file=os.environ["MUTATE_KEEP"], source_pkgs=["curvopt"], messages=False)
    measured.set_option("run:disable_warnings", ["module-not-measured"])  # what conftest.py imports is
    measured.start()
    times: dict[str, float] = {}

    class Contexts:
        @pytest.hookimpl(wrapper=True)
        def pytest_runtest_protocol(self, item: Any) -> Iterator[None]:
            measured.switch_context(item.nodeid)
            result = yield
            measured.switch_context("")
            return result

        def pytest_runtest_logreport(self, report: Any) -> None:
            times[report.nodeid] = times.get(report.nodeid, 0.0) + report.duration

        def pytest_unconfigure(self) -> None:
            measured.stop()
            measured.save()
            Path(os.environ["MUTATE_KEEP"]).with_suffix(".times").write_text(json.dumps(times))

    config.pluginmanager.register(Contexts())


def environment(*path: Path, **variables: str) -> dict[str, str]:
    """Of a process that imports from these folders first."""
    joined = os.pathsep.join([*map(str, path), os.environ.get("PYTHONPATH", "")])
    return {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": joined, "PYTHONDONTWRITEBYTECODE": "1", **variables}


PYTEST = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider"]


def digest(files: list[Path]) -> str:
    """Of their contents."""
    return hashlib.sha256(b"".join(file.read_bytes() for file in files if file.exists())).hexdigest()


def lines_of_tests(tests: Path, times: dict[str, float]) -> dict[tuple[str, int], set[str]]:
    """The tests of a file that run each line, measured anew if need be; adds how long each takes to ``times``."""
    import coverage

    name = tests.relative_to(ROOT).as_posix().replace("/", "+")
    data_file, key_file = KEPT / f"{name}.coverage", KEPT / f"{name}.json"
    if key_file.exists():
        kept = json.loads(key_file.read_text())
        fresh = kept["key"] == digest([tests, *(PACKAGE / file for file in kept["files"])])
    else:
        fresh = False
    if not fresh:
        KEPT.mkdir(exist_ok=True)
        data_file.unlink(missing_ok=True)
        print(f"measuring {tests.relative_to(ROOT)}", flush=True)
        variables = environment(ROOT, ROOT / "tests", MUTATE_KEEP=str(data_file))
        subprocess.run(
            [*PYTEST, "-p", "mutate", "-m", "not slow", str(tests)], cwd=ROOT, env=variables, stdout=subprocess.DEVNULL
        )
    found: dict[tuple[str, int], set[str]] = {}
    if not data_file.exists():
        return found
    times |= json.loads(data_file.with_suffix(".times").read_text())
    data = coverage.CoverageData(str(data_file))
    data.read()
    files = [file for file in data.measured_files() if "/curvopt/" in file]
    for file in files:
        for line, contexts in data.contexts_by_lineno(file).items():
            found.setdefault((below(file), line), set()).update(filter(None, contexts))
    if not fresh:
        known = [below(file) for file in files]
        key = digest([tests, *(PACKAGE / file for file in known)])
        key_file.write_text(json.dumps({"key": key, "files": known}))
    return found


def below(file: str) -> str:
    """The part of a path that stands behind the package's."""
    return file.rpartition("/curvopt/")[2]


# ------------------------------------------------------------------------------------------------------- mutations


def failing(tests: list[str], folder: Path) -> str | None:
    """The first test that fails with the package of a folder, in a fork of this process, which has PyTorch already."""
    names, said = folder / "tests.txt", folder / "said.txt"
    names.write_text("\n".join(tests))
    process = multiprocessing.get_context("fork").Process(target=run_tests, args=(names, said, folder))
    process.start()
    process.join(SECONDS)
    if process.exitcode is None:
        process.kill()
        process.join()
        return TOO_LONG
    if not process.exitcode:
        return None
    found = re.search(r"^(?:FAILED|ERROR) (tests/.*?)(?: - .*)?$", said.read_text(), re.MULTILINE)
    return found[1] if found else "pytest could not begin"


def import_what_the_package_imports() -> None:
    """Once, for all processes that run tests; the package itself is imported by each of these."""
    code = "import sys, pytest, curvopt.optim, curvopt.testing, curvopt.hessianfree; print(*sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment(ROOT), capture_output=True, text=True
    )
    for name in found.stdout.split():
        if name.partition(".")[0] not in ("curvopt", "__main__"):
            with contextlib.suppress(ImportError):
                importlib.import_module(name)


def run_tests(names: Path, said: Path, folder: Path) -> None:
    """Ends this process with what pytest says of tests with the package of a folder."""
    import pytest

    os.environ.update(environment(folder, ROOT))
    sys.dont_write_bytecode = True
    sys.path[:0] = [str(folder), str(ROOT)]
    os.chdir(ROOT)
    with said.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        status = pytest.main([*PYTEST[4:], "-x", f"@{names}"])
    sys.stdout.flush()
    os._exit(int(status))


class Copy:
    """The package in a folder of its own, one file of which is mutated, and what fails there without that, too."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.passes: dict[str, bool] = {}
        shutil.copytree(PACKAGE, folder / "curvopt", ignore=shutil.ignore_patterns("__pycache__"))

    def noticed_by(self, mutation: Mutation, tests: list[str]) -> str | int:
        """A test that fails by the mutation; how many were run if none does."""
        target = self.folder / "curvopt" / mutation.file
        start, size, begin = 0, FIRST, time.monotonic()
        while start < len(tests) and time.monotonic() - begin < SECONDS:
            left = [test for test in tests[start : start + size] if self.passes.get(test, True)]
            start, size = start + size, 2 * size
            while left:
                target.write_text(mutation.text())
                try:
                    found = failing(left, self.folder)
                finally:
                    target.write_text((PACKAGE / mutation.file).read_text())
                if found is None or (found is TOO_LONG and start > FIRST):
                    break
                # a test of a file that cannot be read stands for the file
                test = next((test for test in left if test.startswith(found)), None)
                if test is not None and test not in self.passes:
                    self.passes[test] = failing([test], self.folder) is None
                if test is None or self.passes[test]:
                    return found
                left.remove(test)
        return min(start, len(tests))


def ordered(tests: Iterable[str], times: dict[str, float]) -> list[str]:
    """The quickest case of each function, the quickest of these first; then the next case of each, and so on."""
    functions: dict[str, list[str]] = {}
    for test in sorted(tests, key=lambda test: (times.get(test, inf), test)):
        functions.setdefault(test.partition("[")[0], []).append(test)
    return [test for row in itertools.zip_longest(*functions.values()) for test in row if test is not None]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100, help="mutations to draw (100)")
    parser.add_argument("--seed", type=int, default=0, help="chooses the mutations (0)")
    parser.add_argument("--under", default="", help="a folder or file below curvopt/")
    parser.add_argument("--with", dest="tests", nargs="+", default=["tests"], help="folders or files of tests (tests)")
    options = parser.parse_args()
    by_line: dict[tuple[str, int], set[str]] = {}
    times: dict[str, float] = {}
    for where in (ROOT / tests for tests in options.tests):
        for file in [where] if where.is_file() else sorted(where.rglob("test_*.py")):
            for line, tests in lines_of_tests(file, times).items():
                by_line.setdefault(line, set()).update(tests)
    collect = [*PYTEST, "--collect-only", *options.tests]
    there = subprocess.run(collect, cwd=ROOT, env=environment(ROOT), capture_output=True, text=True)
    names = set(there.stdout.splitlines())
    by_line = {line: tests & names for line, tests in by_line.items()}
    by_file: dict[str, set[str]] = {}
    for (file, _), tests in by_line.items():
        by_file.setdefault(file, set()).update(tests)
    files = [file.relative_to(PACKAGE).as_posix() for file in sorted(PACKAGE.rglob("*.py"))]
    chance = random.Random(options.seed)
    sites = [mutation for file in files if file.startswith(options.under) for mutation in mutations(file)]
    chance.shuffle(sites)
    drawn = list(itertools.islice(filter(compiles, sites), options.count))
    survivors = 0
    import_what_the_package_imports()
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(Path(folder))
        for number, mutation in enumerate(drawn, 1):
            at = [(mutation.file, line) for line in range(mutation.first, mutation.line + 1)]
            running = set().union(*(by_line.get(line, ()) for line in at))
            if not running and any(
                line in by_line for line in at
            ):  # what an import runs is run for all tests of a file
                running = by_file[mutation.file]
            tests = ordered(running, times)
            found = copy.noticed_by(mutation, tests)
            survivors += isinstance(found, int)
            lives = f"SURVIVES {found} of {len(tests)} tests" if isinstance(found, int) else "dead"
            print(f"{number:3} {lives}  {mutation}", flush=True)
            if isinstance(found, str):
                print(f"    by {found}", flush=True)
    print(f"{len(drawn) - survivors} of {len(drawn)} were noticed, --seed {options.seed}")


if __name__ == "__main__":
    main()
