"""The static check: a container of draft steps exposes them as `attn_backends`, or they are never stamped."""

from __future__ import annotations

import pytest

from backstamp.source_lint.container_children import RULE, classes_of, container_children
from tests.linted import parsed

#: As SGLang 0.5.23 writes its containers, with the list under the name it is given.
BY_LOOP = """
class TritonMultiStepDraftBackend:
    def __init__(self, model_runner, topk, speculative_num_steps):
        self.{0}: List[TritonAttnBackend] = []
        for i in range(self.speculative_num_steps - 1):
            self.{0}.append(TritonAttnBackend(model_runner, skip_prefill=True))
"""
BY_COMPREHENSION = """
class AcmeDraft:
    def __init__(self, model_runner, num_steps):
        self.{0} = [AcmeBackend(model_runner, step) for step in range(num_steps - 1)]
    def init_forward_metadata(self, batch):
        pass
"""
BY_LIST = """
class StepsBackend:
    def __init__(self, steps):
        self.{0} = list(make_backend(step) for step in steps)
"""
BY_MODULES = """
class Loop(torch.nn.Module):
    def __init__(self, config):
        self.{0} = nn.ModuleList([StepBackend() for _ in range(config.num_steps)])
    def forward(self, x):
        return x
"""
BY_LOCAL = """
class LocalBackend:
    def __init__(self, runner, num_steps):
        steps = []
        for step in range(num_steps - 1):
            steps.append(AcmeAttnBackend(runner, step))
        self.{0} = steps
"""
BY_LOCAL_COMPREHENSION = """
class LocalBackend:
    def __init__(self, runner, num_steps):
        steps = [AcmeAttnBackend(runner, step) for step in range(num_steps - 1)]
        self.{0} = steps
"""
BY_COUNT = """
class CountBackend:
    def __init__(self, runner, n):
        self.{0} = [AcmeAttnBackend(runner, at) for at in range(n - 1)]
"""
BY_INDEX = """
class IndexBackend:
    def init_steps(self, runner, num_steps):
        self.{0} = [None] * num_steps
        for step in range(num_steps):
            self.{0}[step] = AcmeAttnBackend(runner, step)
"""
READS = """
class Mixed:
    def plan(self, batches):
        return [step.plan(batch) for step, batch in zip(self.attn_backends, batches)]
"""


def found(*texts: str) -> list[tuple[str, str]]:
    """Level and class of each finding, over modules that are read together."""
    modules = [parsed(text, f"m{at}.py") for at, text in enumerate(texts)]
    facts = [facts for module in modules for facts in classes_of(module)]
    return [(finding.level, finding.subject) for finding in container_children(facts)]


@pytest.mark.parametrize(
    "text", [BY_LOOP, BY_COMPREHENSION, BY_LIST, BY_MODULES, BY_LOCAL, BY_LOCAL_COMPREHENSION, BY_COUNT, BY_INDEX]
)
def test_steps_under_another_name_are_a_fault(text: str) -> None:
    """However the list is made; under the name of the contract it is none."""
    assert [level for level, _ in found(text.format("step_backends"))] == ["fault"]
    assert found(text.format("attn_backends")) == []


@pytest.mark.parametrize(
    "text",
    [
        "class AcmeMultiStepDraftBackend:\n  pass",
        "class AcmeDraftSteps:\n  def __init__(self, given): self.steps = given",
        "class Acme_Multi_Step_Backend(object):\n  pass",
        "class AcmeMultiStepDraftBackend:\n  attn_backends = None",
        "class A:\n  class FaMultiStepBackend(ABC): pass",
        "from torch import nn\nclass FaMultistepBackend(nn.Module, Generic[T]): pass",
        READS,
    ],
)
def test_a_container_by_its_name_or_by_what_it_reads_is_held(text: str) -> None:
    """One that makes no list at all leaves its children unstamped too."""
    assert [level for level, _ in found(text)] == ["fault"]


@pytest.mark.parametrize(
    "body",
    [
        "def __init__(self, given):\n    self.attn_backends = given",
        "def __init__(self):\n    self.attn_backends: list = []",
        "def __init__(self):\n    (self.attn_backends, self.n) = make()",
        "def __init__(self):\n    setattr(self, 'attn_backends', [])",
        "def __init__(self):\n    object.__setattr__(self, 'attn_backends', ())",
        "attn_backends: list[AttentionBackend]",
        "attn_backends = ()",
        "attn_backends = None\n  def __init__(self, given): self.attn_backends = given",
        "@property\n  def attn_backends(self): return self._steps",
    ],
)
def test_the_list_may_be_set_in_any_way(body: str) -> None:
    """An attribute, a field of a dataclass, a property, `setattr`."""
    assert found(f"class AcmeMultiStepDraftBackend:\n  {body}\n") == []


def test_a_container_inherits_the_list_from_another_module() -> None:
    """SGLang: `CuteDslMLAMultiStepDraftBackend` takes it from its base's base, by an import with another name too."""
    root = BY_LOOP.format("attn_backends")
    middle = "class TrtMultiStepDraftBackend(triton_backend.TritonMultiStepDraftBackend): pass"
    leaf = "from m1 import TrtMultiStepDraftBackend as Base\nclass CuteMultiStepDraftBackend(Base): pass"
    assert found(leaf, middle, root) == []
    broken = found(leaf, middle, BY_LOOP.format("steps"))
    assert [level for level, _ in broken] == ["fault"] * 3


def test_a_base_nobody_read_makes_it_a_note() -> None:
    """It may set the list; checking the whole tree tells."""
    assert found("class CuteMultiStepDraftBackend(elsewhere.Base): pass") == [("note", "CuteMultiStepDraftBackend")]
    assert found("class CuteMultiStepDraftBackend(make()): pass") == [("note", "CuteMultiStepDraftBackend")]
    circle = "class AMultiStepBackend(BMultiStepBackend): pass\nclass BMultiStepBackend(AMultiStepBackend): pass"
    assert [level for level, _ in found(circle)] == ["fault", "fault"]


def test_a_mixin_may_leave_the_list_to_who_uses_it() -> None:
    """It only reads it, and a class that inherits from it sets it; a container of its own may not."""
    user = "class User(Mixed):\n  def __init__(self): self.attn_backends = []"
    assert found(READS, user) == []
    above = "class Musa(TritonMultiStepDraftBackend):\n  def __init__(self): self.attn_backends = []"
    assert found(BY_LOOP.format("steps"), above) == [("fault", "TritonMultiStepDraftBackend")]


@pytest.mark.parametrize(
    "text",
    [
        # a worker of one draft-extend backend a step, which no forward ever enters
        "class EagleWorker:\n  def __init__(self):\n    self.draft_extend_attn_backend_list = []\n"
        "    for step in range(self.speculative_num_steps):\n"
        "      self.draft_extend_attn_backend_list.append(factory.create_draft_extend_backend())",
        # two halves and two micro-batches are no steps
        "class HybridBackend:\n  def __init__(self, full, linear): self.attn_backend_list = [full, linear]",
        "class TboBackend:\n  def __init__(self): self.children = [make_backend() for _ in range(2)]",
        "class LayerBackend:\n  def __init__(self, n, num_layers):\n"
        "    self.a = [make_backend() for _ in range(num_layers)]\n    self.b = [make_backend(n) for _ in self.n]",
        "class LocalBackend:\n  def f(self, num_steps):\n    a = [make_backend() for _ in range(num_steps)]\n"
        "    self.b = b",
        # a scheduler has steps and no backends
        "class DPMSolverMultistepScheduler:\n  def __init__(self): self.t = [Tensor(s) for s in range(self.num_steps)]",
        "class EagleMultiStepDraftExtendCudaGraphRunner:\n  def __init__(self):\n    self.runners = []\n"
        "    for step in range(self.speculative_num_steps): self.runners.append(self._create_runner(step))",
        "class FlashBackend:\n  def __init__(self): self.buffers = [Buffer(s) for s in range(self.num_steps)]",
        "class MultiStepBackend(Protocol): pass",
        # a test of one
        "class TestMultiStepDraftBackend:\n  def test_runs(self): pass",
        "class Backend:\n  def steps(self, num_steps): return [make_backend() for _ in range(num_steps)]",
        "def f(container):\n  return container.attn_backends",
    ],
)
def test_what_is_no_container_is_left_alone(text: str) -> None:
    """Workers, halves, micro-batches, schedulers, graph runners, protocols."""
    assert found(text) == []


def test_the_finding_says_why_it_takes_a_class_for_a_container() -> None:
    """The place, the reason, and what to do."""
    (finding,) = container_children(classes_of(parsed(BY_COMPREHENSION.format("steps"))))
    assert (finding.rule, finding.file, finding.line) == (RULE, "engine.py", 2)
    assert finding.text == "needs attn_backends, got a container (it makes self.steps, one a step) that sets none"
    assert "in step order" in finding.fix
