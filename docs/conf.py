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

#: The examples in the order in which they are shown; others follow. Beside them the axes of the
#: first figure that are in the picture of the gallery.
STORIES = {
    "plot_individual_gradients": (0, 1, 2),
    "plot_all_quantities": (0, 4),
    "plot_kfac_training": (0,),
    "plot_finetuning": (0,),
    "plot_diagonal_ggn_by_hand": (0,),
    "plot_cg_newton": (0,),
    "plot_gradient_noise_scale": (1,),
    "plot_laplace": (0,),
    "plot_mislabelled": (0,),
    "plot_influence": (0, 1, 5),
    "plot_pruning": (0,),
    "plot_continual_learning": (0,),
    "plot_private_training": (1,),
    "plot_reinforcement_learning": (0,),
    "plot_pinn": (0,),
    "plot_vae": (0,),
    "plot_gradient_of_variance": (0,),
    "plot_trace_estimation": (0,),
    "plot_jacobians": (0, 1),
    "plot_resnet": (0,),
    "plot_rnn": (1,),
    "plot_transformer": (0,),
    "plot_custom_module": (0,),
    "plot_extension_hook": (0,),
    "plot_subsampling": (0,),
}


class StoryOrder:
    """Sorts the examples."""

    def __init__(self, folder: str):
        pass

    def __call__(self, file: str) -> tuple[int, str]:
        name = file.removesuffix(".py")
        return [*STORIES, name].index(name), name


def reset(gallery_conf: dict[str, Any], name: str) -> None:
    """Start every example from one seed, in single precision, with pictures of one size.

    Its warnings show no paths of this machine.
    """
    import matplotlib.pyplot as plt
    import torch

    warnings.formatwarning = lambda message, kind, *_, **__: f"{kind.__name__}: {message}\n"
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    plt.rcParams.update(
        {"figure.figsize": (5.0, 3.4), "figure.dpi": 110, "figure.constrained_layout.use": True}
    )


def draw_thumbnail(figure: Any, kept: tuple[int, ...], path: str) -> None:
    """Draw some axes of a figure side by side, without text, at the size of the gallery."""
    from matplotlib.text import Text

    axes = [figure.axes[i] for i in kept]
    for other in set(figure.axes) - set(axes):
        figure.delaxes(other)
    for text in figure.findobj(Text):
        text.set_visible(False)
    figure.set_layout_engine("none")
    figure.set_size_inches(2, 1.4)
    for i, panel in enumerate(axes):
        panel.set_position((i / len(axes) + 0.03, 0.05, 1 / len(axes) - 0.06, 0.9))
        panel.set_anchor("C")
        panel.tick_params(which="both", length=0)
    for legend in [*figure.legends, *(panel.get_legend() for panel in axes)]:
        if legend is not None:
            legend.remove()
    figure.savefig(path, dpi=200)


def scrape(block: Any, block_vars: dict[str, Any], gallery_conf: dict[str, Any]) -> str:
    """Take the figures of a block; number 1 of an example is its picture in the gallery."""
    import matplotlib.pyplot as plt
    from sphinx_gallery.scrapers import matplotlib_scraper

    figures, paths = (
        [plt.figure(number) for number in plt.get_fignums()],
        block_vars["image_path_iterator"],
    )
    thumbnail = next(paths) if figures and not len(paths) else None
    shown = matplotlib_scraper(block, block_vars, gallery_conf)
    if thumbnail:
        draw_thumbnail(
            figures[0], STORIES.get(Path(block_vars["src_file"]).stem, (0,)), thumbnail
        )
    return shown


sphinx_gallery_conf = {
    "examples_dirs": "../examples",
    "gallery_dirs": "gallery",
    "filename_pattern": r"/plot_",
    "ignore_pattern": r"^train_",  # programs for torchrun
    "image_scrapers": (scrape,),
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


def link_downloads(app: Sphinx, page: str, source: list[str]) -> None:
    """Offer Markdown beside the documentation as a download, as other files are."""
    source[0] = re.sub(r"\]\((\.\./\S+\.md)\)", r"](path:\1)", source[0])


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
    app.connect("source-read", link_downloads)
