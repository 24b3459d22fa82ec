"""The files of the project agree with each other."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

import curvopt

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def test_the_citation_is_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (curvopt.__version__, PROJECT["license"])
    assert f"version = {{{curvopt.__version__}}}" in (ROOT / "README.md").read_text()


def test_one_address_stands_everywhere():
    address = PROJECT["urls"]["Repository"]
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["repository-code"] == address
    assert set(re.findall(r"https://github.com/\w+/curvopt", (ROOT / "README.md").read_text())) == {address}


def test_a_release_has_the_version_of_its_tag_and_an_address(tmp_path: Path):
    """What the release workflow writes before it builds."""
    [release] = [yaml.safe_load(file.read_text()) for file in WORKFLOWS if file.stem == "release"]
    [fill] = [step["run"] for step in release["jobs"]["build"]["steps"] if "sed" in step.get("run", "")]
    for name in ("pyproject.toml", "CITATION.cff", "README.md", "curvopt/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    tag = {"GITHUB_REF_NAME": "v7.8.9", "GITHUB_SERVER_URL": "https://host", "GITHUB_REPOSITORY": "who/curvopt"}
    subprocess.run(["bash", "-e", "-c", fill], cwd=tmp_path, env={**os.environ, **tag}, check=True)
    citation = yaml.safe_load((tmp_path / "CITATION.cff").read_text())
    assert (citation["version"], citation["repository-code"]) == ("7.8.9", "https://host/who/curvopt")
    assert '__version__ = "7.8.9"' in (tmp_path / "curvopt" / "__init__.py").read_text()
    assert not [file for file in tmp_path.rglob("*.*") if "OWNER" in file.read_text()]
    readme = (tmp_path / "README.md").read_text()
    assert "https://host/who/curvopt/raw/v7.8.9/docs/_static/" in readme
    assert not re.findall(r"\]\((?!https?:|#)", readme)


def test_the_changelog_begins_with_this_version():
    assert re.findall(r"^## ([\d.]+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0] == curvopt.__version__


def test_workflows_test_the_oldest_versions_that_are_promised_and_one_more():
    [tests] = [yaml.safe_load(file.read_text()) for file in WORKFLOWS if file.stem == "tests"]
    rows = tests["jobs"]["tests"]["strategy"]["matrix"]["include"]
    promised = [c.split(" :: ")[2] for c in PROJECT["classifiers"] if re.fullmatch(r".* :: 3\.\d+", c)]
    assert {row["python"] for row in rows} == {promised[0], promised[-1]}
    assert PROJECT["requires-python"] == f">={promised[0]}"
    [torch] = [name for name in PROJECT["dependencies"] if name.startswith("torch")]
    oldest = next(row["torch"] for row in rows if row["python"] == promised[0])
    assert f"{oldest.removeprefix('==').removesuffix('.*')}" == torch.removeprefix("torch>=")


def test_workflows_name_actions_by_their_commits():
    used = [name for file in WORKFLOWS for name in re.findall(r"uses: ([^.\s]\S+)", file.read_text())]
    assert used and all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", name) for name in used), used


@pytest.mark.parametrize(
    "file", ["README.md", "CONTRIBUTING.md", "docs/tutorial.md", "docs/conf.py", "examples/GALLERY_HEADER.rst"]
)
def test_installations_name_the_distribution(file: str):
    named = re.findall(r"pip install (?:-q )?'?([\w.-]+)", " ".join((ROOT / file).read_text().split()))
    assert named and set(named) <= {PROJECT["name"], ".", "-e"}


def test_links_of_the_pages_beside_the_readme():
    for page in ("CONTRIBUTING.md", "SECURITY.md"):
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", (ROOT / page).read_text()):
            assert (ROOT / target).exists(), f"{page}: {target} does not exist"


def test_the_tests_of_a_file_are_found_by_its_path():
    """They stand in its folder under its name, or the first lines of others name it, or its folder."""
    named: set[str] = set()
    for test in sorted((ROOT / "tests").rglob("test_*.py")):
        text = ast.get_docstring(ast.parse(test.read_text())) or ""
        names = re.findall(r"`([\w/]+\.py)`|folder `([\w/]+)`", text)
        for name in (file or folder for file, folder in names):
            assert any((ROOT / parent / name).exists() for parent in ("curvopt", "tests")), f"{test.name}: {name}"
            named.add(name)
    for file in sorted((ROOT / "curvopt").rglob("[!_]*.py")):
        path = file.relative_to(ROOT / "curvopt")
        by_path = (ROOT / "tests" / path.parent / f"test_{path.name}").exists()
        assert by_path or {path.as_posix(), path.parent.as_posix()} & named, f"no test names {path}"
