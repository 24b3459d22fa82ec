"""Every Python block of the documentation runs, those of one file after each other in one namespace.

A block that cannot run by itself has ``<!-- fragment -->`` on the line before it.
"""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
import pydoc
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest
import torch
from checks import defined_in, modules_of

import curvopt

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(p for p in (ROOT / "docs").glob("**/*.md") if "_build" not in p.parts)]
BLOCK = re.compile(r"^(?P<fragment><!-- fragment -->\n+)?```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(text: str) -> Iterator[tuple[int, str]]:
    """Number of the line before a block, and the block."""
    for match in BLOCK.finditer(text):
        if not match["fragment"]:
            yield text.count("\n", 0, match.start("code")), match["code"]


RUNNABLE = [page for page in PAGES if any(blocks(page.read_text()))]


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    dtype = torch.get_default_dtype()
    yield
    torch.set_default_dtype(dtype)
    if "accelerate.state" in sys.modules:  # the page on training loops leaves an accelerator for all others
        sys.modules["accelerate.state"].AcceleratorState._reset_state(True)


@pytest.mark.parametrize("page", RUNNABLE, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_page(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__main__"}
    for line, code in blocks(page.read_text()):
        # empty lines in front, so that a traceback points at the line of the page
        exec(compile("\n" * line + code, str(page), "exec"), namespace)


def test_every_python_block_is_found():
    assert not [page for page in PAGES if page.read_text().count("```python") != len(BLOCK.findall(page.read_text()))]


def test_links_to_files():
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
            if target.startswith("gallery/"):  # made of the examples when the documentation is built
                name = target.removeprefix("gallery/")
                there = name == "index" or (ROOT / "examples" / f"{name}.py").exists()
            else:
                there = (page.parent / target).exists()
            assert there, f"{page.relative_to(ROOT)}: there is no {target}"


def test_prose_fits():
    """100 columns, but for tables and links to pictures."""
    for page in [*PAGES, ROOT / "CHANGELOG.md"]:
        text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        wide = [line for line in text.splitlines() if len(line) > 100 and not line.lstrip().startswith(("|", "!["))]
        assert not wide, page.relative_to(ROOT)


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda page: page.relative_to(ROOT).as_posix())
def test_no_line_is_lost(page: Path):
    """MyST takes a line that begins with % for a comment: it is in no built page."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert not re.findall(r"^ {0,3}%.*", text, re.MULTILINE)


def test_internals_name_what_is_there():
    """Files of the engine, and the functions in the table of stages."""
    page, core = (ROOT / "docs" / "internals.md").read_text(), ROOT / "curvopt" / "core"
    files = set(re.findall(r"`([a-z_]+(?:/[a-z_]+)*\.py)`", page))
    assert files and not [f for f in files if not any((folder / f).exists() for folder in (core, core.parents[1]))]
    stages = re.findall(r"^\| [a-z ]+ \| `([\w/]+\.py)` \| `(\w+)` \|", page, re.MULTILINE)
    assert len(stages) == 8 and not [
        name for file, name in stages if not re.search(rf"\b{name}\(", (core / file).read_text())
    ]


MODULES = [module.name for module in pkgutil.walk_packages(curvopt.core.__path__, "curvopt.core.")]


def test_modules_of_the_engine_begin_with_an_example():
    """A picture in an indented block, or code that runs."""
    for name in ["curvopt.core", *MODULES]:
        module = importlib.import_module(name)
        text = module.__doc__ or ""
        example = doctest.DocTestParser().get_doctest(text, dict(vars(module)), name, module.__file__, 0)
        assert example.examples or "::\n\n    " in text, name
        assert doctest.DocTestRunner().run(example).failed == 0, name


@pytest.mark.parametrize("name", sorted({*curvopt.optim.__all__} - {"state_to_load"}))
def test_optimizers_begin_with_an_example(name: str):
    """An indented block that runs as it stands."""
    code = re.search(r"::\n\n((?: {8}.*\n|\n)+)", getattr(curvopt.optim, name).__doc__ or "")
    assert code
    exec(compile(dedent(code[1]), name, "exec"), {"__name__": "__main__"})


# ------------------------------------------------------------------------------------------- tables of all public names


def named(module: str, name: str, page: str) -> bool:
    """Whether a table names an object, or all of a module that it is in (``package.module.*``)."""
    parts = module.split(".")
    wholes = {f"`{'.'.join(parts[:depth])}.*`" for depth in range(2, len(parts) + 1)}
    return f"`{module}.{name}`" in page or any(whole in page for whole in wholes)


def test_the_reference_has_every_public_name():
    """Each name has a directive, or its module has: with the members that are named, of ``__all__``, or its own."""
    page = "\n".join(file.read_text() for file in (ROOT / "docs" / "api").glob("*.md"))
    shown = set()
    for module_name, name in re.findall(r"auto(?:class|function|exception):: ([\w.]+)\.(\w+)", page):
        shown.add(id(getattr(importlib.import_module(module_name), name)))
    for module_name, members in re.findall(r"automodule:: (\S+)\n +:members:(.*)\n", page):
        module = importlib.import_module(module_name)
        listed = [name.strip() for name in members.split(",") if name.strip()]
        names = listed or getattr(module, "__all__", None) or [name for name, _ in defined_in(module)]
        shown |= {id(getattr(module, name)) for name in names}
    missing, undocumented = [], []
    for module in modules_of(curvopt):
        if module.__name__.startswith("curvopt.core"):
            continue
        exported = getattr(module, "__all__", None)
        if exported is None and module.__name__.count(".") > 1:
            continue  # modules of a package are public by its __all__
        for name in exported if exported is not None else [name for name, _ in defined_in(module)]:
            value = getattr(module, name)
            if not inspect.ismodule(value):
                where = f"{module.__name__}.{name}"
                missing += [where] * (id(value) not in shown)
                undocumented += [where] * (not value.__doc__)
    assert not missing and not undocumented  # autodoc leaves out what has no docstring


def test_every_name_of_backpack_is_in_the_table():
    backpack = pytest.importorskip("backpack")
    page = (ROOT / "docs" / "migrating_from_backpack.md").read_text()
    names = [f"backpack.extensions.{name}" for name in backpack.extensions.__all__]
    names += [f"backpack.{name}" for name in ("backpack", "extend", "disable")]
    missing = [name for name in names if f"`{name}`" not in page]
    for module in modules_of(backpack):
        skipped = (
            "backpack.extensions.firstorder",
            "backpack.extensions.secondorder",
            "backpack.extensions.curvmatprod",
        )
        if module is not backpack and not module.__name__.startswith(skipped):
            names = (name for name, _ in defined_in(module))
            missing += [f"{module.__name__}.{n}" for n in names if not named(module.__name__, n, page)]
    assert not missing


def test_every_name_of_kfac_pytorch_is_in_the_table():
    kfac = pytest.importorskip("kfac")
    page = (ROOT / "docs" / "migrating_from_kfac_pytorch.md").read_text()
    missing = [
        f"{module.__name__}.{name}"
        for module in modules_of(kfac)
        for name, _ in defined_in(module)
        if not named(module.__name__, name, page)
    ]
    preconditioner = importlib.import_module("kfac.preconditioner").KFACPreconditioner
    arguments = list(inspect.signature(preconditioner).parameters)
    assert not missing and not [name for name in arguments if f"`{name}`" not in page]


def test_names_of_this_package_exist():
    named = {name for page in PAGES for name in re.findall(r"`(curvopt(?:\.\w+)+)", page.read_text())}
    assert len(named) > 30 and not [name for name in named if pydoc.locate(name) is None]
