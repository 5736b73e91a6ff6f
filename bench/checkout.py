"""Which state of this repository a run measured, by git.

In: the folder of the bench. Out: the commit, and whether its code was changed since; nothing where there is no git.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

__all__ = ["checkout"]

#: What a kernel and its figure come of; records are written as they are measured.
_CODE = ("core", "plugins", "bench", ":(exclude)bench/results")


def checkout(root: Path = Path(__file__).parent.parent) -> dict[str, object]:
    """`commit`, empty where the folder is no checkout of its own, and `dirty`."""
    top = _git(root, "rev-parse", "--show-toplevel")
    # a copy without git may lie in a checkout of something else
    if not top or Path(top).resolve() != root.resolve():
        return {"commit": "", "dirty": False}
    commit, changes = _git(root, "rev-parse", "HEAD"), _git(root, "status", "--porcelain", "--", *_CODE)
    return {"commit": commit, "dirty": bool(changes)}


def _git(root: Path, *arguments: str) -> str:
    try:
        told = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True)
    except OSError:
        return ""
    return told.stdout.strip() if told.returncode == 0 else ""
