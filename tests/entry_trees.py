"""Small trees of model modules, as engines keep them, and the parity check over one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from backstamp.parity import Gate, Parity, Violation, check_parity, from_folder

#: The hook of the shipped defect.
GATE = "shared_experts_fusion_disable_reason"

#: A target with the gate, as a model module of SGLang has it.
TARGET = f"""
import torch.nn as nn

class AcmeForCausalLM(nn.Module):
    @classmethod
    def {GATE}(cls, hf_config, quant_config):
        return None

EntryClass = AcmeForCausalLM
"""


def write_tree(folder: Path, files: Mapping[str, str | bytes]) -> Path:
    """Write files by relative path; the folder they lie in."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder


def parity_of(
    folder: Path,
    files: Mapping[str, str | bytes],
    *,
    hooks: Sequence[str] = (),
    pairs: Mapping[str, tuple[str, ...]] | None = None,
    gates: Sequence[Gate] = (),
) -> Parity:
    """The parity check over a tree."""
    return check_parity(from_folder(write_tree(folder, files)), hooks=hooks, pairs=pairs, gates=gates)


def told(violations: Sequence[Violation]) -> list[tuple[str, str, str, str]]:
    """Draft, target, hook and the side that lacks it, of each."""
    return [(item.draft, item.target, item.hook, item.missing_on) for item in violations]
