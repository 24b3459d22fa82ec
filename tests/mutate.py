"""Changes single operators, constants, conditions and arguments of the package, and prints what no test notices.

python tests/mutate.py                          100 mutations of curvopt/
python tests/mutate.py --seed 7 --count 30      the 30 that this seed draws
python tests/mutate.py --under core/samples     of one folder, or file
python tests/mutate.py --with tests/core        by tests of some folders or files alone

Which test reaches which mutation, and how long it takes, is found first, by a run of some cases of each test with the
package in which each statement that will be mutated says that it is reached. Of the tests that reach a mutation the
quickest come first, one of each function, of few files. What they do not notice is tried with all cases. A survivor
does the same as the original, or a test is missing. Slow tests are left out. The same command goes on where it was
stopped: what it found is kept in ``.mutate`` until a file of the package or of the tests changes.
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
import resource
import shutil
import signal
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
SECONDS = 60  # of a core, after which no more tests of a mutation begin
TOO_LONG = f"{SECONDS} seconds of a core, in which a few tests did not end"
CASES = 4, 1 << 20  # of a function, by which it is found what it reaches; then, for what is not noticed yet, all
#: Functions of which two arguments in the other order are no program, or the same.
NOT_SWAPPED = "isinstance issubclass hasattr getattr setattr zip transpose maximum minimum equal".split()
FIRST, FILES = 12, 3  # tests that are tried first, and of how many files; then twice as many tests each time

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
                or ast.unparse(function).rpartition(".")[2] in NOT_SWAPPED
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


# --------------------------------------------------------------------------------------- which test reaches which one

REACHED = "__import__('builtins').__dict__.get('reached', set()).add({})"  # in processes that tests begin, of no avail


def with_probes(file: str, drawn: dict[int, Mutation]) -> str:
    """A file of the package in which the statement of each mutation adds the number of this to a set of reached ones.

    What an import runs, as a constant of a module, is reached by whatever calls a function of the file.
    """
    tree = ast.parse((PACKAGE / file).read_text())
    functions: list[list[ast.stmt]] = []

    def probe(number: int) -> ast.stmt:
        return ast.parse(REACHED.format(number)).body[0]

    def visit(node: ast.AST, called: bool) -> None:
        called = called or isinstance(node, ast.FunctionDef)
        for _, body in ast.iter_fields(node):
            if isinstance(body, list) and body and isinstance(body[0], ast.stmt):
                if isinstance(node, ast.FunctionDef):
                    functions.append(body)
                for statement in list(body):
                    at = [number for number, each in drawn.items() if each.first == statement.lineno]
                    found[called] += at
                    body[body.index(statement) : body.index(statement)] = map(probe, at if called else ())
            for child in body if isinstance(body, list) else [body]:
                if isinstance(child, ast.AST):
                    visit(child, called)

    found: dict[bool, list[int]] = {True: [], False: []}
    visit(tree, called=False)
    for body in functions:
        body[0:0] = map(probe, found[False])
    return ast.unparse(ast.fix_missing_locations(tree))


def pytest_configure(config: Any) -> None:
    """This file is a plugin, too, where ``MUTATE_KEEP`` says into which file goes what each test reaches."""
    import builtins

    import pytest

    found: dict[str, tuple[float, list[int]]] = {}
    cases: dict[str, list[Any]] = {}
    most, reached = int(os.environ["MUTATE_CASES"]), set[int]()
    vars(builtins)["reached"] = reached

    class Reaching:
        @pytest.hookimpl(trylast=True)
        def pytest_collection_modifyitems(self, items: list[Any]) -> None:
            for item in items:
                cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
            items[:] = [item for each in cases.values() for item in each[:: -(-len(each) // most)]]

        @pytest.hookimpl(wrapper=True)
        def pytest_runtest_protocol(self, item: Any) -> Iterator[None]:
            reached.clear()
            begin = time.monotonic()
            result = yield
            found[item.nodeid] = time.monotonic() - begin, sorted(reached)
            return result

        def pytest_unconfigure(self) -> None:
            for each in cases.values():  # what was not run reaches what other cases of the function do
                ran = [found[item.nodeid] for item in each if item.nodeid in found]
                for item in each if ran else ():
                    found.setdefault(item.nodeid, (max(ran)[0], sorted({n for _, numbers in ran for n in numbers})))
            Path(os.environ["MUTATE_KEEP"]).write_text(json.dumps(found))

    config.pluginmanager.register(Reaching())


def environment(*path: Path, **variables: str) -> dict[str, str]:
    """Of a process that imports from these folders first."""
    joined = os.pathsep.join([*map(str, path), os.environ.get("PYTHONPATH", "")])
    return {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": joined, "PYTHONDONTWRITEBYTECODE": "1", **variables}


PYTEST = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider"]


def reaching(drawn: dict[int, Mutation], files: list[Path], kept: Path, cases: int) -> dict[int, list[str]]:
    """The tests that reach each mutation in their order, found by so many cases of each function."""
    tests: dict[int, set[str]] = {number: set() for number in drawn}
    times: dict[str, float] = {}
    kept.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(Path(folder))
        for file in {mutation.file for mutation in drawn.values()}:
            there = {number: mutation for number, mutation in drawn.items() if mutation.file == file}
            (copy.folder / "curvopt" / file).write_text(with_probes(file, there))
        for file in files:
            name = file.relative_to(ROOT).as_posix()
            keep = kept / f"{name.replace('/', '+')}.json"
            if not keep.exists():
                print(f"running {name}", flush=True)
                settings = {"MUTATE_KEEP": str(keep), "MUTATE_CASES": str(cases)}
                variables = environment(copy.folder, ROOT / "tests", ROOT, **settings)
                command = [*PYTEST, "-p", "mutate", "-m", "not slow", name]
                subprocess.run(command, cwd=ROOT, env=variables, stdout=subprocess.DEVNULL)
            for test, (seconds, numbers) in json.loads(keep.read_text()).items() if keep.exists() else ():
                times[test] = seconds
                for number in numbers:
                    tests[number].add(test)
    return {number: ordered(found, times) for number, found in tests.items()}


# ------------------------------------------------------------------------------------------------------- mutations


def failing(tests: list[str], folder: Path) -> str | None:
    """The first test that fails with the package of a folder, in a fork of this process, which has PyTorch already."""
    names, said = folder / "tests.txt", folder / "said.txt"
    names.write_text("\n".join(tests))
    process = multiprocessing.get_context("fork").Process(target=run_tests, args=(names, said, folder))
    process.start()
    process.join(10 * SECONDS)  # one that only waits takes no time of a core
    if process.exitcode is None:
        process.kill()
        process.join()
    if process.exitcode in (-signal.SIGKILL, -signal.SIGXCPU):
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
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    sys.dont_write_bytecode = True
    sys.path[:0] = [str(folder), str(ROOT)]
    os.chdir(ROOT)
    with said.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        status = pytest.main([*PYTEST[4:], "-x", f"@{names}"])
    sys.stdout.flush()
    os._exit(int(status))


def time_of_children() -> float:
    """Seconds of a core, which do not hang on what else a machine does."""
    return sum(os.times()[2:4])


class Copy:
    """The package in a folder of its own, one file of which is mutated, and what fails there without that, too."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.passes: dict[str, bool] = {}
        shutil.copytree(PACKAGE, folder / "curvopt", ignore=shutil.ignore_patterns("__pycache__"))

    def noticed_by(self, mutation: Mutation, tests: list[str]) -> str | int:
        """A test that fails by the mutation; how many were run if none does."""
        target = self.folder / "curvopt" / mutation.file
        start, size, begin = 0, FIRST, time_of_children()
        while start < len(tests) and time_of_children() - begin < SECONDS:
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
    """The quickest case of each function, the quickest of these first; then the next case of each, and so on.

    Those that are tried first are of a few files, as it takes a second or two to collect a file.
    """
    functions: dict[str, list[str]] = {}
    for test in sorted(tests, key=lambda test: (times.get(test, inf), test)):
        functions.setdefault(test.partition("[")[0], []).append(test)
    rows = [test for row in itertools.zip_longest(*functions.values()) for test in row if test is not None]
    files = list(dict.fromkeys(test.partition("::")[0] for test in rows))[:FILES]
    first = [test for test in rows if test.partition("::")[0] in files][:FIRST]
    return [*first, *(test for test in rows if test not in first)]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100, help="mutations to draw (100)")
    parser.add_argument("--seed", type=int, default=0, help="chooses the mutations (0)")
    parser.add_argument("--under", default="", help="a folder or file below curvopt/")
    parser.add_argument("--with", dest="tests", nargs="+", default=["tests"], help="folders or files of tests (tests)")
    options = parser.parse_args()
    every = sorted([*PACKAGE.rglob("*.py"), *(ROOT / "tests").rglob("*.py")])
    files = [file.relative_to(PACKAGE).as_posix() for file in every if PACKAGE in file.parents]
    sites = [mutation for file in files if file.startswith(options.under) for mutation in mutations(file)]
    random.Random(options.seed).shuffle(sites)
    drawn = list(itertools.islice(filter(compiles, sites), options.count))
    state = hashlib.sha256(b"".join([repr(options).encode(), *(file.read_bytes() for file in every)])).hexdigest()
    given = [ROOT / tests for tests in options.tests]
    of_tests = [file for where in given for file in ([where] if where.is_file() else sorted(where.rglob("test_*.py")))]
    left, tried = dict(enumerate(drawn)), dict[int, list[str]]()
    import_what_the_package_imports()
    for cases in CASES:
        kept = ROOT / ".mutate" / state[:16] / str(cases)
        reached = reaching(left, of_tests if left else [], kept, cases)
        found: dict[str, str | int] = json.loads(file.read_text()) if (file := kept / "judged").exists() else {}
        with tempfile.TemporaryDirectory() as folder:
            copy = Copy(Path(folder))
            for number, mutation in list(left.items()):
                tests = [test for test in reached[number] if test not in tried.get(number, ())]
                if str(number) not in found:
                    found[str(number)] = copy.noticed_by(mutation, tests)
                    file.write_text(json.dumps(found))
                by = found[str(number)]
                if isinstance(by, str):
                    del left[number]
                    print(f"{number + 1:3} dead  {mutation}\n    by {by}", flush=True)
                else:
                    tried[number] = tests[:by]
                    print(f"{number + 1:3} not noticed by {by} of {len(tests)} tests  {mutation}", flush=True)
    for mutation in left.values():
        print(f"SURVIVES {mutation}")
    print(f"{len(drawn) - len(left)} of {len(drawn)} were noticed, --seed {options.seed}")


if __name__ == "__main__":
    main()
