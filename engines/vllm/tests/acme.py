"""The third party of `acme_recurrent` as its user would have it, for suites of what it serves.

In: a folder. Out: a site folder for the module path of vLLM's processes.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from backstamp.testing.dists import write_distribution

__all__ = ["install_acme"]

_PACKAGE = Path(__file__).with_name("acme_recurrent")


def install_acme(folder: Path) -> Path:
    """Its kernels, right and wrong, as an installed distribution; answers the site folder."""
    site = folder / "site"
    shutil.copytree(_PACKAGE, site / _PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
    points = f"[backstamp.plugins]\nacme_recurrent = {_PACKAGE.name}.plugin\n"
    write_distribution(site, "acme-recurrent", requires=("backstamp>=0.2,<0.3",), entry_points=points)
    return site
