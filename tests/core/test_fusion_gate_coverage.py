"""Every entry class that builds gated layers touches the decision at all, whether or not it is anybody's draft."""

from __future__ import annotations

from pathlib import Path

import pytest

from backstamp.parity import Gate
from tests.entry_trees import GATE, parity_of, write_tree

LAYERS = """
import torch.nn as nn
from engine.moe import get_num_fused_shared_experts

class SparseBlock(nn.Module):
    def __init__(self):
        self.num_fused_shared_experts = get_num_fused_shared_experts()

class DecoderLayer(nn.Module):
    def __init__(self):
        self.mlp = SparseBlock()

def make_layers(build):
    return [build()]
"""


def entry(body: str, *, gate: bool = False, bases: str = "nn.Module") -> dict[str, str]:
    """A tree whose one entry class has a body."""
    own = f"    def {GATE}(self): ...\n" if gate else ""
    text = f"""
import torch.nn as nn
from models.layers import DecoderLayer, make_layers
from models import layers

class Model(nn.Module):
    def __init__(self):
        self.layers = make_layers(lambda: DecoderLayer())

class AcmeForCausalLM({bases}):
{own}{body}

EntryClass = AcmeForCausalLM
"""
    return {"models/__init__.py": "", "models/layers.py": LAYERS, "models/acme.py": text}


BUILDS = {
    "a-model": "    def __init__(self):\n        self.model = Model()",
    "a-layer-handed-on": "    def __init__(self):\n        self.layers = make_layers(DecoderLayer)",
    "a-class-attribute": "    layer_cls = DecoderLayer",
    "a-keyword": "    def __init__(self):\n        super().__init__(layer=DecoderLayer)",
    "the-question-itself": "    def __init__(self):\n        self.n = layers.get_num_fused_shared_experts()",
}


@pytest.mark.parametrize("body", BUILDS.values(), ids=BUILDS)
def test_a_class_with_gated_layers_and_no_gate_is_found(body: str, tmp_path: Path) -> None:
    """However deep the layer is built that asks whether shared experts are fused."""
    parity = parity_of(tmp_path, entry(body))
    (found,) = parity.uncovered
    assert (found.name, found.hook, found.file) == ("AcmeForCausalLM", GATE, "models/acme.py")
    assert found.markers == ("get_num_fused_shared_experts",)
    assert parity.covered == ()


@pytest.mark.parametrize("body", BUILDS.values(), ids=BUILDS)
def test_a_class_that_touches_the_gate_is_covered(body: str, tmp_path: Path) -> None:
    """Presence is enough."""
    parity = parity_of(tmp_path, entry(body, gate=True))
    assert (parity.uncovered, parity.covered) == ((), ("AcmeForCausalLM",))


def test_inherited_construction_counts(tmp_path: Path) -> None:
    """A class builds what its base builds."""
    (found,) = parity_of(tmp_path, entry("    pass", bases="Model")).uncovered
    assert found.name == "AcmeForCausalLM"


ONLY_NAMED = {
    "isinstance": "    def load(self, x):\n        return isinstance(x, DecoderLayer)",
    "annotation": "    layer: DecoderLayer\n    def load(self, x: DecoderLayer) -> DecoderLayer: ...",
    "asked-of": "    def load(self):\n        return DecoderLayer.question()",
    "nothing": "    pass",
}


@pytest.mark.parametrize("body", ONLY_NAMED.values(), ids=ONLY_NAMED)
def test_a_class_that_only_names_a_layer_builds_none(body: str, tmp_path: Path) -> None:
    """To test a type, to annotate, or to ask a class something is not to build it."""
    parity = parity_of(tmp_path, entry(body))
    assert (parity.uncovered, parity.covered) == ((), ())


def test_another_gate_may_be_named(tmp_path: Path) -> None:
    """A project's own decision: a hook, and the functions whose call makes a layer a gated one."""
    files = entry("    def __init__(self):\n        self.model = own_layer()")
    gate = Gate("own_gate", frozenset({"own_layer"}))
    (found,) = parity_of(tmp_path, files, gates=[gate]).uncovered
    assert (found.hook, found.markers) == ("own_gate", ("own_layer",))


def test_a_marker_outside_the_folder_is_not_looked_for(tmp_path: Path) -> None:
    """Model code asks the gate; the engine's own layers, which every model shares, are not walked."""
    files = entry("    def __init__(self):\n        self.model = shared()")
    files["models/acme.py"] = "from engine.shared import shared\n" + files["models/acme.py"]
    write_tree(tmp_path, {"engine/shared.py": "def shared():\n    return get_num_fused_shared_experts()\n"})
    folder = tmp_path / "models"
    inner = {name.removeprefix("models/"): text for name, text in files.items()}
    assert parity_of(folder, inner).uncovered == ()
