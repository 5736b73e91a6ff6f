"""Draft entry classes answer the loader exactly when their targets do: entry classes read from source, by pair."""

from __future__ import annotations

import codecs
import sys
from pathlib import Path

import pytest

from backstamp.errors import BadInput
from backstamp.parity import check_parity, from_folder
from tests.entry_trees import GATE, TARGET, parity_of, told, write_tree

#: The violation of a draft without its target's gate.
LACKS = ("AcmeForCausalLMNextN", "AcmeForCausalLM", GATE, "draft")


def draft(
    body: str = "    pass", bases: str = "nn.Module", before: str = "import torch.nn as nn", after: str = ""
) -> str:
    """A module with the draft of Acme."""
    return f"{before}\n\nclass AcmeForCausalLMNextN({bases}):\n{body}\n\n{after}\nEntryClass = [AcmeForCausalLMNextN]\n"


def test_a_draft_without_its_targets_gate_is_named_with_its_place(tmp_path: Path) -> None:
    """SGLang #33312: the pair, the hook, the side that lacks it, and the file and line of that class."""
    parity = parity_of(tmp_path, {"acme.py": TARGET, "acme_nextn.py": draft()})
    (violation,) = parity.violations
    assert told(parity.violations) == [LACKS]
    assert (violation.file, violation.line, violation.platforms) == ("acme_nextn.py", 3, ())
    assert "the draft lacks" in violation.message


def test_one_removed_gate_names_exactly_one_pair(tmp_path: Path) -> None:
    """The shipped defect in small: three drafts of two targets in parity, then one of them loses its gate."""
    gate = f"    def {GATE}(self): ...\n"
    names = ["AForCausalLM", "AForCausalLMNextN", "AForCausalLMDSpark", "BForCausalLM", "BForCausalLMEagle3"]
    files = {f"{name}.py": f"class {name}:\n{gate}EntryClass = {name}\n" for name in names}
    assert parity_of(tmp_path / "whole", files).violations == ()
    files["AForCausalLMDSpark.py"] = files["AForCausalLMDSpark.py"].replace(gate, "    pass\n")
    broken = parity_of(tmp_path / "broken", files)
    assert told(broken.violations) == [("AForCausalLMDSpark", "AForCausalLM", GATE, "draft")]
    assert len(broken.pairs) == 3


def test_a_gate_only_the_draft_has_is_named_too(tmp_path: Path) -> None:
    """The loader decides twice either way."""
    own = f"    def {GATE}(self): ..."
    bare = "class AcmeForCausalLM: ...\nEntryClass = AcmeForCausalLM\n"
    (violation,) = parity_of(tmp_path, {"acme.py": bare, "acme_nextn.py": draft(own)}).violations
    assert (violation.missing_on, violation.file, violation.line) == ("target", "acme.py", 1)


FROM_ACME = "from models.acme import AcmeForCausalLM"
HAS_IT = {
    "own": draft(f"    def {GATE}(self): ..."),
    "delegates": draft(f"    {GATE} = AcmeForCausalLM.{GATE}", before=f"{FROM_ACME}\nfrom torch import nn"),
    "inherited": draft(bases="AcmeForCausalLM", before=FROM_ACME),
    "relative-import": draft(bases="AcmeForCausalLM", before="from .acme import AcmeForCausalLM"),
    "import-as": draft(bases="Target", before="from models.acme import AcmeForCausalLM as Target"),
    "module-attribute": draft(bases="acme.AcmeForCausalLM", before="import models.acme as acme"),
    "dotted-module": draft(bases="models.acme.AcmeForCausalLM", before="import models.acme"),
    "from-package": draft(bases="acme.AcmeForCausalLM", before="from models import acme"),
    "re-export": draft(bases="AcmeForCausalLM", before="from models.shared import AcmeForCausalLM"),
    "star": draft(bases="AcmeForCausalLM", before="from models.acme import *"),
    "same-as": draft(bases="Base", before=f"{FROM_ACME}\nBase = AcmeForCausalLM"),
    "lazy-package": draft(bases="AcmeForCausalLM", before="from models.lazy import AcmeForCausalLM"),
    "two-levels": draft(bases="Middle", before=f"{FROM_ACME}\nclass Middle(AcmeForCausalLM): ..."),
    "mixin": draft(bases="Gated, nn.Module", before=f"import torch.nn as nn\nclass Gated:\n    def {GATE}(self): ..."),
    "generic": draft(bases="Gated[int]", before=f"class Gated:\n    def {GATE}(self): ..."),
    "nested": draft(
        bases="Ns.Inner[int], nn.Module",
        before="import torch.nn as nn\nclass Ns:\n"
        f"    class Base:\n        def {GATE}(self): ...\n    class Inner(Base): ...",
    ),
    "chosen": draft(
        bases="Base", before=f"{FROM_ACME}\nimport torch.nn as nn\nBase = AcmeForCausalLM if True else nn.Module"
    ),
    "deleted-and-inherited": draft(
        f"    {GATE} = None", bases="AcmeForCausalLM", before=FROM_ACME, after=f"del AcmeForCausalLMNextN.{GATE}"
    ),
    "in-a-branch": draft(f"    if True:\n        def {GATE}(self): ..."),
    "imported-into-the-body": draft(f"    from models.acme import gate as {GATE}"),
    "assigned-after": draft(after=f"AcmeForCausalLMNextN.{GATE} = print"),
    "setattr": draft(after=f'setattr(AcmeForCausalLMNextN, "{GATE}", print)'),
    "loop": draft(after=f"for one in (AcmeForCausalLMNextN, object):\n    one.{GATE} = staticmethod(print)"),
    "loop-setattr": draft(after=f'for one in [AcmeForCausalLMNextN]:\n    setattr(one, "{GATE}", print)'),
    "loop-over-a-name": draft(after=f"_all = (AcmeForCausalLMNextN,)\nfor one in _all:\n    one.{GATE} = print"),
    "loop-over-hooks": draft(after=f'for name in ("{GATE}",):\n    setattr(AcmeForCausalLMNextN, name, print)'),
    "loop-over-pairs": draft(after=f"for one, hook in ((AcmeForCausalLMNextN, print),):\n    one.{GATE} = hook"),
    "loop-over-items": draft(
        after=f'for name, hook in {{"{GATE}": print}}.items():\n    setattr(AcmeForCausalLMNextN, name, hook)'
    ),
    "loop-over-a-dict": draft(after=f"_all = {{AcmeForCausalLMNextN: 1}}\nfor one in _all:\n    one.{GATE} = print"),
    "loop-over-zip": draft(after=f"for one, hook in zip([AcmeForCausalLMNextN], [print]):\n    one.{GATE} = hook"),
    "its-own-name": draft(
        bases="AcmeForCausalLMNextN", before="from .acme import AcmeForCausalLM as AcmeForCausalLMNextN"
    ),
    "loop-in-try": draft(after=f"try:\n    AcmeForCausalLMNextN.{GATE} = print\nexcept ImportError:\n    pass"),
}


@pytest.mark.parametrize("source", HAS_IT.values(), ids=HAS_IT)
def test_presence_is_seen_however_the_class_came_by_it(source: str, tmp_path: Path) -> None:
    """Own, inherited over modules, re-exported, or assigned after the class (SGLang's Qwen3.5 does it in a loop)."""
    files = {
        "models/__init__.py": "",
        "models/acme.py": TARGET,
        "models/shared.py": "from .acme import AcmeForCausalLM",
        "models/lazy.py": "def __getattr__(name):\n    from .acme import AcmeForCausalLM\n    return AcmeForCausalLM",
        "models/acme_nextn.py": source,
    }
    parity = parity_of(tmp_path, files)
    assert [pair.draft.name for pair in parity.pairs] == ["AcmeForCausalLMNextN"]
    assert (parity.violations, parity.troubles, parity.notes) == ((), (), ())


HAS_IT_NOT = {
    "none-in-its-place": draft(f"    {GATE} = None", bases="AcmeForCausalLM", before=FROM_ACME),
    "set-to-none-after": draft(bases="AcmeForCausalLM", before=FROM_ACME, after=f"AcmeForCausalLMNextN.{GATE} = None"),
    "annotated-only": draft(f"    {GATE}: object"),
    "on-the-instance": draft(f"    def __init__(self):\n        self.{GATE} = print"),
    "in-a-method": draft(f"    def setup(self):\n        def {GATE}(): ..."),
    "asked-of-another": draft(
        f"    def other(self):\n        return AcmeForCausalLM.{GATE}", before=f"{FROM_ACME}\nfrom torch import nn"
    ),
    "given-to-another": draft(after=f"class Other: ...\nfor one in (Other,):\n    one.{GATE} = print"),
    "type-checking": draft(
        after=f"from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    AcmeForCausalLMNextN.{GATE} = print"
    ),
    "type-checking-in-the-body": draft(f"    if TYPE_CHECKING:\n        def {GATE}(self): ..."),
    "never-in-the-body": draft(f"    if False:\n        def {GATE}(self): ..."),
    "deleted": draft(f"    def {GATE}(self): ...", after=f"del AcmeForCausalLMNextN.{GATE}"),
    "deleted-in-the-body": draft(f"    def {GATE}(self): ...\n    del {GATE}"),
    "a-cycle-of-bases": draft(bases="Loop", before="from models.loop import Loop"),
}


@pytest.mark.parametrize("source", HAS_IT_NOT.values(), ids=HAS_IT_NOT)
def test_what_getattr_would_not_find_is_absent(source: str, tmp_path: Path) -> None:
    """None in a hook's place, an annotation, and what only an instance would have do not answer the loader."""
    files = {
        "models/__init__.py": "",
        "models/acme.py": TARGET,
        "models/loop.py": "from .loop import Loop as Loop\nclass Loop(Loop2): ...\nclass Loop2(Loop): ...",
        "models/acme_nextn.py": source,
    }
    assert told(parity_of(tmp_path, files).violations) == [LACKS]


def test_a_hook_asked_of_the_built_model_may_be_set_when_it_is_built(tmp_path: Path) -> None:
    """What the loader asks an instance for counts where `__init__` sets it; what it asks the class for does not."""
    target = TARGET.replace("    @classmethod", "    fall_back_to_pt_during_load = False\n    @classmethod")
    built = "    def __init__(self):\n        self.fall_back_to_pt_during_load = False"
    parity = parity_of(tmp_path, {"acme.py": target, "acme_nextn.py": draft(built)})
    assert told(parity.violations) == [LACKS]


def test_an_annotation_answers_no_question_of_the_built_model(tmp_path: Path) -> None:
    """A class that only says what type a hook would have, has none."""
    target = "class AcmeForCausalLM:\n    def post_load_weights(self): ...\nEntryClass = AcmeForCausalLM\n"
    parity = parity_of(tmp_path, {"acme.py": target, "acme_nextn.py": draft("    post_load_weights: object")})
    assert [(item.hook, item.missing_on) for item in parity.violations] == [("post_load_weights", "draft")]


def test_a_cycle_of_imports_ends(tmp_path: Path) -> None:
    """Two modules that import one name from each other bind it to nothing: the base could not be read."""
    files = {
        "acme.py": TARGET,
        "one.py": "from .two import Base\n",
        "two.py": "from .one import Base\n",
        "acme_nextn.py": draft(bases="Base", before="from .one import Base"),
    }
    assert [item.rule for item in parity_of(tmp_path, files).troubles] == ["unread-base"]


def test_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    """A file some editors wrote is a file like any other."""
    files = {"acme.py": codecs.BOM_UTF8 + TARGET.encode(), "acme_nextn.py": codecs.BOM_UTF8 + draft().encode()}
    assert told(parity_of(tmp_path, files).violations) == [LACKS]


def test_a_coding_line_is_read(tmp_path: Path) -> None:
    """So is one in another encoding that says so."""
    text = "# -*- coding: latin-1 -*-\n# caf\xe9\n" + TARGET
    parity = parity_of(tmp_path, {"acme.py": text.encode("latin-1"), "acme_nextn.py": draft()})
    assert told(parity.violations) == [LACKS]


@pytest.mark.parametrize(
    "broken", [b"class Broken(:\n", b"x = '\xff'\n", b"x = 1\0\n"], ids=["syntax", "undecodable", "null"]
)
def test_a_file_that_does_not_parse_is_a_fault(broken: bytes, tmp_path: Path) -> None:
    """It may hold the very draft that lacks a hook; the others are compared all the same."""
    parity = parity_of(tmp_path, {"acme.py": TARGET, "acme_nextn.py": draft(), "broken.py": broken})
    (trouble,) = parity.troubles
    assert (trouble.rule, trouble.file) == ("unread-source", "broken.py")
    assert "needs source that parses, got" in trouble.text
    assert told(parity.violations) == [LACKS]


def test_a_base_that_cannot_be_read_leaves_it_open(tmp_path: Path) -> None:
    """The base may have the gate: no violation is claimed, and the pair is not passed either."""
    parity = parity_of(
        tmp_path,
        {"acme.py": TARGET, "acme_nextn.py": draft(bases="Elsewhere", before="from elsewhere import Elsewhere")},
    )
    assert parity.violations == ()
    (trouble,) = parity.troubles
    assert (trouble.rule, trouble.subject) == ("unread-base", "AcmeForCausalLMNextN")
    for word in (GATE, "AcmeForCausalLM", "elsewhere.Elsewhere"):
        assert word in trouble.text


@pytest.mark.parametrize("base", ["Base", "make(int)"], ids=["chosen-at-run-time", "made"])
def test_a_base_that_only_one_of_a_pair_has_leaves_it_open(base: str, tmp_path: Path) -> None:
    """Neither is seen to have the gate, and the target's base may: no pass, one fault with every open hook."""
    target = f"Base = A if flag else object\nclass AcmeForCausalLM({base}): ...\nEntryClass = AcmeForCausalLM\n"
    parity = parity_of(tmp_path, {"acme.py": target, "acme_nextn.py": draft()})
    (trouble,) = parity.troubles
    assert (trouble.rule, trouble.subject, trouble.file) == ("unread-base", "AcmeForCausalLM", "acme.py")
    assert GATE in trouble.text
    assert parity.violations == ()


def test_a_base_that_decides_nothing_is_told_once(tmp_path: Path) -> None:
    """Two classes that answer everything themselves: one note, and no fault."""
    base = "from elsewhere import Base\n"
    files = {
        "acme.py": base + TARGET.replace("nn.Module", "Base"),
        "acme_nextn.py": draft(f"    def {GATE}(self): ...", bases="Base", before=base),
    }
    parity = parity_of(tmp_path, files, hooks=())
    assert (parity.violations, parity.troubles) == ((), ())
    (note,) = parity.notes
    assert (note.rule, note.subject) == ("unread-base", "elsewhere.Base")
    assert "and 1 more" in note.text


def test_a_made_base_is_told(tmp_path: Path) -> None:
    """A base that a call makes cannot be read from source."""
    parity = parity_of(
        tmp_path, {"acme.py": TARGET, "acme_nextn.py": draft(bases="make(int)", before="from x import make")}
    )
    assert [item.rule for item in parity.troubles] == ["unread-base"]


def test_a_listed_class_that_is_not_there_is_a_fault(tmp_path: Path) -> None:
    """An `EntryClass` that names nothing is not passed over."""
    files = {"acme.py": TARGET, "acme_nextn.py": "from .gone import Gone\nEntryClass = [Gone]\n"}
    parity = parity_of(tmp_path, files)
    (trouble,) = parity.troubles
    assert (trouble.rule, trouble.subject, trouble.file) == ("unread-class", "Gone", "acme_nextn.py")


def test_reading_imports_nothing(tmp_path: Path) -> None:
    """A module that must not be imported, is not."""
    before = set(sys.modules)
    parity = parity_of(tmp_path, {"acme.py": f"raise SystemExit('imported')\n{TARGET}", "acme_nextn.py": draft()})
    assert told(parity.violations) == [LACKS]
    assert not {name for name in set(sys.modules) - before if "acme" in name}


def test_hooks_may_be_added_and_name_maps_are_none(tmp_path: Path) -> None:
    """A map of weight names differs by right, until it is asked for by name."""
    target = TARGET.replace("    @classmethod", "    packed_modules_mapping = {}\n    @classmethod")
    files = {"acme.py": target, "acme_nextn.py": draft(f"    def {GATE}(self): ...")}
    assert parity_of(tmp_path, files).violations == ()
    (violation,) = parity_of(tmp_path, files, hooks=["packed_modules_mapping"]).violations
    assert (violation.hook, violation.missing_on) == ("packed_modules_mapping", "draft")


NAMES = {
    "nextn": ("LlamaForCausalLMNextN", "LlamaForCausalLM"),
    "eagle": ("EagleLlamaForCausalLM", "LlamaForCausalLM"),
    "eagle3": ("LlamaForCausalLMEagle3", "LlamaForCausalLM"),
    "peagle": ("PeagleLlamaForCausalLM", "LlamaForCausalLM"),
    "mtp": ("MiMoMTP", "MiMoForCausalLM"),
    "mtp-model": ("Glm4MoeMTPModel", "Glm4MoeForCausalLM"),
    "underscore": ("Exaone4_5_MTP", "Exaone4_5_ForConditionalGeneration"),
    "dspark": ("DeepseekV4ForCausalLMDSpark", "DeepseekV4ForCausalLM"),
    "dspark-model": ("Qwen3DSparkModel", "Qwen3ForCausalLM"),
    "dflash": ("DFlashLagunaForCausalLM", "LagunaForCausalLM"),
    "medusa": ("LlamaForCausalLMMedusa", "LlamaForCausalLM"),
    "assistant": ("Gemma4AssistantForCausalLM", "Gemma4ForCausalLM"),
    "next-is-no-nextn": ("Glm5NextForConditionalGenerationNextN", "Glm5NextForConditionalGeneration"),
}


@pytest.mark.parametrize(("name", "target"), NAMES.values(), ids=NAMES)
def test_a_draft_is_paired_by_its_name(name: str, target: str, tmp_path: Path) -> None:
    """With the model its name leaves, and never with one that only begins like it or generates nothing."""
    others = [
        "LlamaForSequenceClassification",
        "Qwen3Model",
        "MiMoVLForCausalLM",
        "Glm4ForCausalLM",
        "DeepseekForCausalLM",
    ]
    every = [name, target, *others]
    text = "".join(f"class {one}: ...\n" for one in every) + f"EntryClass = [{', '.join(every)}]\n"
    parity = parity_of(tmp_path, {"models.py": text})
    assert [(pair.draft.name, pair.target.name, pair.why) for pair in parity.pairs] == [(name, target, "name")]
    assert parity.unpaired == ()


def test_a_draft_of_two_targets_is_held_against_both(tmp_path: Path) -> None:
    """A model with a text and a multimodal target has one draft for either."""
    text = (
        f"class Gemma4ForCausalLM:\n    def {GATE}(self): ...\n"
        "class Gemma4ForConditionalGeneration: ...\nclass Gemma4AssistantForCausalLM: ...\n"
        "EntryClass = [Gemma4ForCausalLM, Gemma4ForConditionalGeneration, Gemma4AssistantForCausalLM]\n"
    )
    parity = parity_of(tmp_path, {"gemma.py": text})
    assert [pair.target.name for pair in parity.pairs] == ["Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"]
    assert told(parity.violations) == [("Gemma4AssistantForCausalLM", "Gemma4ForCausalLM", GATE, "draft")]


def test_an_engines_own_rule_stands_before_names(tmp_path: Path) -> None:
    """SGLang loads Step3p5MTP from Step3p7 checkpoints too, which its name does not say."""
    names = ["Step3p5MTP", "Step3p5ForCausalLM", "Step3p7ForConditionalGeneration"]
    text = "".join(f"class {one}: ...\n" for one in names) + f"EntryClass = [{', '.join(names)}]\n"
    parity = parity_of(tmp_path, {"step.py": text})
    assert [(pair.target.name, pair.why) for pair in parity.pairs] == [(name, "engine") for name in names[1:]]


def test_an_unpaired_draft_is_reported_with_why(tmp_path: Path) -> None:
    """A head for any target has none, and a draft whose target is gone has none either: neither is skipped."""
    names = ["DFlashDraftModel", "OtherForCausalLMMTP"]
    text = "".join(f"class {one}: ...\n" for one in names) + f"EntryClass = [{', '.join(names)}]\n"
    parity = parity_of(tmp_path, {"acme.py": TARGET, "drafts.py": text})
    assert [(item.draft.name, item.draft.file, item.draft.line) for item in parity.unpaired] == [
        ("DFlashDraftModel", "drafts.py", 1),
        ("OtherForCausalLMMTP", "drafts.py", 2),
    ]
    assert "any target" in parity.unpaired[0].why
    assert "other" in parity.unpaired[1].why


def test_an_operators_pair_stands_before_every_other(tmp_path: Path) -> None:
    """`--pair` replaces what the name would have said, and makes a draft of a class without a draft word."""
    text = f"class Other:\n    def {GATE}(self): ...\nclass Plain: ...\nEntryClass = [Other, Plain]\n"
    files = {"acme.py": TARGET, "acme_nextn.py": draft(), "other.py": text}
    parity = parity_of(tmp_path, files, pairs={"AcmeForCausalLMNextN": ("Plain",), "Plain": ("Other",)})
    assert [(pair.draft.name, pair.target.name, pair.why) for pair in parity.pairs] == [
        ("AcmeForCausalLMNextN", "Plain", "--pair"),
        ("Plain", "Other", "--pair"),
    ]
    assert told(parity.violations) == [("Plain", "Other", GATE, "draft")]


def test_a_pair_may_name_classes_that_no_list_has(tmp_path: Path) -> None:
    """As module:Class, where a folder keeps no list of its entry classes."""
    files = {"a.py": f"class Target:\n    def {GATE}(self): ...\n", "b.py": "class Draft: ...\n"}
    parity = parity_of(tmp_path, files, hooks=[GATE], pairs={"b:Draft": ("a:Target",)})
    assert told(parity.violations) == [("b:Draft", "a:Target", GATE, "draft")]


def test_a_pair_of_an_unknown_class_is_refused(tmp_path: Path) -> None:
    """With the class that was meant."""
    gathered = from_folder(write_tree(tmp_path, {"acme.py": TARGET}))
    with pytest.raises(BadInput, match="Did you mean AcmeForCausalLM"):
        check_parity(gathered, pairs={"AcmeForCausalLM": ("AcmeForCausalLN",)})


REGISTRY = """
_TEXT_GENERATION_MODELS = {"AcmeForCausalLM": ("acme", "AcmeForCausalLM")}
_SPECULATIVE_DECODING_MODELS = {"AcmeMTPModel": ("engine.models.acme", "AcmeMTP")}
_PREVIOUSLY_SUPPORTED_MODELS = {"OldForCausalLM": "0.1"}
"""
DISPATCH = """
from engine.platforms import current_platform
from typing import TYPE_CHECKING
if TYPE_CHECKING or not current_platform.is_rocm():
    from .nvidia import AcmeMTP
else:
    from .amd import AcmeMTP
"""


def test_the_branch_of_each_platform_is_read(tmp_path: Path) -> None:
    """vLLM picks an implementation when its module is imported: a hook missing on one platform is told for that one."""
    hook = "process_weights_after_loading"
    files = {
        "engine/__init__.py": "",
        "engine/model_executor/registry.py": REGISTRY,
        "engine/model_executor/acme.py": f"class AcmeForCausalLM:\n    def {hook}(self): ...\n",
        "engine/models/acme/__init__.py": DISPATCH,
        "engine/models/acme/nvidia.py": f"class AcmeMTP:\n    def {hook}(self): ...\n",
        "engine/models/acme/amd.py": "class AcmeMTP: ...\n",
        "engine/model_executor/root.py": "from engine.models.acme import AcmeMTP\n",
    }
    write_tree(tmp_path, files)
    parity = check_parity(from_folder(tmp_path / "engine/model_executor"))
    (violation,) = parity.violations
    assert told(parity.violations) == [("AcmeMTP", "AcmeForCausalLM", hook, "draft")]
    assert (violation.platforms, violation.file) == (("rocm",), "engine/models/acme/amd.py")


def test_two_classes_of_one_name_are_told_apart(tmp_path: Path) -> None:
    """vLLM has two DSparkDeepseekV4ForCausalLM: each is called what a config calls it, and none hides another."""
    hook = "process_weights_after_loading"
    registry = (
        '_TEXT_GENERATION_MODELS = {"AForCausalLM": ("a", "AForCausalLM"), "BForCausalLM": ("b", "BForCausalLM")}\n'
        '_SPECULATIVE_DECODING_MODELS = {"AMTPModel": ("a", "Head"), "BMTPModel": ("b", "Head")}\n'
    )
    body = f"class {{0}}ForCausalLM:\n    def {hook}(self): ...\nclass Head: ...\n"
    files = {"registry.py": registry, "a.py": body.format("A"), "b.py": body.format("B")}
    assert told(parity_of(tmp_path, files).violations) == [
        ("AMTPModel", "AForCausalLM", hook, "draft"),
        ("BMTPModel", "BForCausalLM", hook, "draft"),
    ]


def test_a_line_of_another_engine_does_not_change_whose_hooks_are_asked(tmp_path: Path) -> None:
    """vllm 0.33.0 has one `EntryClass` left over in a model module: its hooks stay vLLM's."""
    registry = (
        '_TEXT_GENERATION_MODELS = {"AForCausalLM": ("a", "AForCausalLM")}\n'
        '_SPECULATIVE_DECODING_MODELS = {"AMTPModel": ("a", "AMTP")}\n'
    )
    text = f"class AForCausalLM:\n    def {GATE}(self): ...\nclass AMTP: ...\nEntryClass = AMTP\n"
    parity = parity_of(tmp_path, {"registry.py": registry, "a.py": text})
    assert parity.hooks == ("process_weights_after_loading", "fall_back_to_pt_during_load")
    assert parity.violations == ()


def test_a_plugins_registration_lists_an_entry_class(tmp_path: Path) -> None:
    """`ModelRegistry.register_model` in a plugin of vLLM is a list of one."""
    text = (
        "def register():\n    from vllm import ModelRegistry\n"
        '    ModelRegistry.register_model("AcmeForCausalLM", "acme:AcmeForCausalLM")\n'
        '    ModelRegistry.register_model("AcmeMTPModel", "acme:AcmeMTP")\n'
    )
    model = "class AcmeForCausalLM:\n    def process_weights_after_loading(self): ...\nclass AcmeMTP: ...\n"
    (violation,) = parity_of(tmp_path, {"plugin.py": text, "acme.py": model}).violations
    assert (violation.draft, violation.hook) == ("AcmeMTP", "process_weights_after_loading")


@pytest.mark.parametrize("made", [False, True], ids=["no-folder", "no-python"])
def test_a_folder_without_source_is_refused(made: bool, tmp_path: Path) -> None:
    """What was pointed at must be a folder of Python files."""
    folder = tmp_path / "models"
    if made:
        write_tree(folder, {"readme.txt": ""})
    with pytest.raises(BadInput, match="needs a folder of Python files"):
        from_folder(folder)
