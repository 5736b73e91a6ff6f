"""The distributions of this folder, installed by pip as their users would, for every suite that runs one.

In: names. Out: a site folder that holds them and nothing else. It asks no index and builds with what is installed.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

__all__ = ["install_third_parties"]

HERE = Path(__file__).parent


def install_third_parties(folder: Path, *names: str) -> Path:
    """Install each of them; answers the site folder."""
    for name in names:
        # a copy: building leaves its traces beside the sources
        source = folder / name
        shutil.copytree(HERE / name, source)
        options = ("--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check")
        program = [sys.executable, "-m", "pip", "install", *options, "--target", folder / "site", source]
        done = subprocess.run(program, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder / "site"
