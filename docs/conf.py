"""Configuration of the documentation, which `make docs` builds without a network."""

from __future__ import annotations

import contextlib
import io
import os
import re
import tomllib
import warnings
import zlib
from pathlib import Path
from typing import Any

import curvopt
from sphinx.application import Sphinx

ROOT = Path(__file__).parents[1]

# the pictures of the gallery are those of small runs on one core
os.environ.setdefault("OMP_NUM_THREADS", "1")

project = "curvopt"
author = "The curvopt authors"
project_copyright = f"2026, {author}"
version = release = curvopt.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.intersphinx",
    "sphinx.ext.mathjax",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_gallery.gen_gallery",
]
exclude_patterns = ["_build"]
myst_heading_anchors = 3
myst_enable_extensions = ["attrs_inline", "dollarmath", "substitution"]
myst_substitutions = {"version": version}
default_role = "py:obj"  # single backticks in docstrings are links where there is such a name
suppress_warnings = ["config.cache"]  # functions in the settings of the gallery

# Links to PyTorch's documentation, by an inventory of the names that are used here: the build
# needs no network.
intersphinx_mapping = {"torch": ("https://docs.pytorch.org/docs/stable", "_build/torch.inv")}


def write_inventory(names: Path, out: Path) -> None:
    """Make an inventory for intersphinx of lines ``kind name address``."""
    lines = [line.split() for line in names.read_text().splitlines() if line]
    content = "".join(f"{name} py:{kind} 1 {address} -\n" for kind, name, address in lines)
    header = (
        "# Sphinx inventory version 2\n# Project: torch\n# Version:\n# Compressed by zlib.\n"
    )
    out.parent.mkdir(exist_ok=True)
    out.write_bytes(header.encode() + zlib.compress(content.encode()))


write_inventory(ROOT / "docs" / "torch.txt", ROOT / "docs" / "_build" / "torch.inv")

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_inherit_docstrings = False
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # attributes of named tuples are described once

html_theme = "furo"
html_title = "curvopt"
html_static_path = ["_static"]
html_css_files = ["custom.css"]

# the project's address, which a release fills in; until then, this folder
address = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]
is_published = "/OWNER/" not in address
if is_published:
    html_theme_options = {
        "source_repository": address,
        "source_branch": f"v{version}",
        "source_directory": "docs/",
    }
#: Installs curvopt where a notebook does not find it.
SOURCE = f"git+{address}" if is_published else ROOT.as_uri()
FIRST_CELL = f"""try:
    import curvopt
except ImportError:
    %pip install -q 'curvopt-for-pytorch[experiments] @ {SOURCE}'"""

#: The examples in the order in which they are shown; others follow.
STORIES = [
    "plot_individual_gradients",
    "plot_all_quantities",
    "plot_kfac_training",
    "plot_finetuning",
    "plot_diagonal_ggn_by_hand",
    "plot_cg_newton",
    "plot_gradient_noise_scale",
    "plot_laplace",
    "plot_mislabelled",
    "plot_influence",
    "plot_pruning",
    "plot_continual_learning",
    "plot_private_training",
    "plot_reinforcement_learning",
    "plot_pinn",
    "plot_vae",
    "plot_gradient_of_variance",
    "plot_trace_estimation",
    "plot_jacobians",
    "plot_resnet",
    "plot_rnn",
    "plot_transformer",
    "plot_custom_module",
    "plot_extension_hook",
    "plot_subsampling",
]


class StoryOrder:
    """Sorts the examples."""

    def __init__(self, folder: str):
        pass

    def __call__(self, file: str) -> tuple[int, str]:
        name = file.removesuffix(".py")
        return STORIES.index(name) if name in STORIES else len(STORIES), name


def reset(gallery_conf: dict[str, Any], name: str) -> None:
    """Start every example from one seed, in single precision, with pictures of one size."""
    import matplotlib.pyplot as plt
    import torch

    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    plt.rcParams.update(
        {"figure.figsize": (5.0, 3.4), "figure.dpi": 110, "figure.constrained_layout.use": True}
    )


sphinx_gallery_conf = {
    "examples_dirs": "../examples",
    "gallery_dirs": "gallery",
    "filename_pattern": r"/plot_",
    "within_subsection_order": StoryOrder,
    "reset_modules": ("matplotlib", reset),
    "abort_on_example_error": True,
    "download_all_examples": False,
    "remove_config_comments": True,
    "first_notebook_cell": FIRST_CELL,
    "show_signature": False,
    "nested_sections": False,
}


def run_blocks(app: Sphinx, page: str, source: list[str]) -> None:
    """Run the blocks of the tutorial in one namespace, each before what it prints and draws."""
    if page != "tutorial":
        return
    import matplotlib.pyplot as plt
    from matplotlib import rcParams

    plt.switch_backend("agg")
    reset({}, page)
    pictures = Path(app.srcdir) / "_build" / "tutorial"
    pictures.mkdir(parents=True, exist_ok=True)
    namespace: dict[str, Any] = {"__name__": "__main__"}

    def shown(block: re.Match) -> str:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message=".*non-interactive"
            )  # plt.show() has nowhere to show
            exec(compile(block["code"], page, "exec"), namespace)
        parts = [block[0]]
        if printed.getvalue():
            parts.append(f"```text\n{printed.getvalue().rstrip()}\n```\n")
        for number in plt.get_fignums():
            name = f"{block.start()}-{number}.png"
            plt.figure(number).savefig(pictures / name, dpi=2 * rcParams["figure.dpi"])
            parts.append(f"![what the block above draws](_build/tutorial/{name}){{.drawn}}\n")
        plt.close("all")
        return "\n".join(parts)

    source[0] = re.sub(
        r"^```python\n(?P<code>.*?)^```$", shown, source[0], flags=re.MULTILINE | re.DOTALL
    )


def attribute(name: str, look_up: Any = curvopt.__getattr__) -> Any:
    """A name of curvopt; where there is none, the gallery wants an AttributeError."""
    try:
        return look_up(name)
    except ImportError as error:
        raise AttributeError(str(error)) from error


curvopt.__getattr__ = attribute


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", run_blocks)
