"""A repository of a test."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def git(tmp_path: Path) -> Callable[..., str]:
    """Runs git in the folder of the test, which is a repository, and returns what it prints."""

    def run(*command: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        command = ["git", *identity, *command]
        return subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    run("init", "-q")
    return run
