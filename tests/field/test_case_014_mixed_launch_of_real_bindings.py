"""Case 14, sglang #34917: two bindings of one launch read one stored parameter, each in its library's dtype.

The bindings are the plugins' own over stand-ins of their libraries, which refuse sinks of another dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from backstamp.attention import LayerSpec
from backstamp.catalogue import build_catalogue
from backstamp.construction import RunnerBackends, RunnerShape, build
from backstamp.decisions import SinkChoice, pair, stored_sinks
from backstamp.discovery import discover
from backstamp.engine import EngineFacts
from backstamp.factory_loading import load_factory
from backstamp.launch import Requests, make_launch
from backstamp.resolution import resolve
from backstamp.testing.batches import make_batch
from backstamp.testing.hosts import described_host
from backstamp.testing.reference import reference_attention, relative_error
from tests.libraries.fake import FakeLibrary
from tests.plugins.fa3.kernels import FA4, fa3_forward, fa4_forward
from tests.plugins.fa3.operators import fake_operator
from tests.plugins.trtllm.cases import BOUND, install
from tests.scenes import DENSE, model_with

LAYER = LayerSpec(layer_id=0, num_qo_heads=4, num_kv_heads=2, head_dim=64, v_head_dim=64, scale=0.125)
MODEL = model_with((1, replace(DENSE, num_qo_heads=4, num_kv_heads=2, head_dim=64, v_head_dim=64, sinks="bf16")))
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass
class Launch:
    """A built split pair over stand-ins: its stored sinks, and the sinks a half's library was handed last."""

    backends: RunnerBackends
    stored: torch.nn.Parameter
    choice: SinkChoice
    last_sinks: Callable[[str], Tensor]

    def run(self) -> dict[str, Tensor]:
        """One step of each half, held against float64; the sinks each half's library was handed."""
        layer, handed = replace(LAYER, sinks=self.stored), {}
        for phase, rows in (("prefill", ((3, 5), (3, 9))), ("decode", ((1, 1), (7, 4)))):
            made = make_batch(
                *rows, layer=layer, phase=phase, page_size=self.backends.plan.page_size, dtype=torch.bfloat16
            )
            backend = self.backends.serving_attention_backend(phase)
            out = backend.forward(made.q, made.kv, layer, backend.plan(made.batch))
            handed[phase] = self.last_sinks(phase)
            truth, _ = reference_attention(made.q, made.kv, layer, made.batch)
            assert relative_error(out, truth) <= BOUND, phase
        return handed


@contextmanager
def launch(
    host: str, prefill: str, decode: str, monkeypatch: pytest.MonkeyPatch, stored: str | None = None
) -> Iterator[Launch]:
    """A split pair on a host; the sinks are stored as decided, or in the dtype given."""
    catalogue = build_catalogue(discover())
    asked = Requests(prefill_attention_backend=prefill, decode_attention_backend=decode)
    plan = resolve(make_launch(asked), EngineFacts(), MODEL, described_host(host), catalogue)
    assert pair(plan) == (prefill, decode)
    choice = stored_sinks(plan)
    sinks = torch.nn.Parameter(torch.linspace(-1.0, 2.0, 4).to(DTYPES[stored or choice.stored]), requires_grad=False)
    with ExitStack() as stack:
        flashinfer = install(monkeypatch).flashinfer
        fa4 = FakeLibrary("tokenspeed-fa4", monkeypatch)
        fa4.on(FA4, fa4_forward)
        fa3 = stack.enter_context(fake_operator("tokenspeed-fa3", "flash_attn_interface", monkeypatch, fa3_forward))

        def last_sinks(phase: str) -> Tensor:
            if phase == "decode":
                return flashinfer.calls[-1].arguments["sinks"]
            return fa3[-1]["sinks"] if fa3 else fa4.calls[-1].arguments["learnable_sink"]

        shape = RunnerShape(layers=[replace(LAYER, sinks=sinks)])
        yield Launch(build(plan, shape, catalogue, load=load_factory), sinks, choice, last_sinks)


HOPPER, BLACKWELL = ("h100", "fa3", "xqa"), ("b200", "fa4", "trtllm_mha")


def test_fa3_reads_what_is_stored_and_xqa_a_widened_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Hopper bf16 is stored: it is what the model has, fa3 reads nothing else, and fp32 holds it."""
    with launch(*HOPPER, monkeypatch) as made:
        assert (made.choice.stored, made.choice.reason) == ("bf16", "xqa widens bf16")
        handed = made.run()
        assert handed["prefill"].data_ptr() == made.stored.data_ptr()
        assert handed["decode"].dtype is torch.float32


def test_fa4_reads_what_trtllm_mha_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Blackwell fp32 is stored: this FA4 reads it too, so nobody converts."""
    with launch(*BLACKWELL, monkeypatch) as made:
        assert (made.choice.stored, made.choice.converting) == ("fp32", ())
        assert {sinks.data_ptr() for sinks in made.run().values()} == {made.stored.data_ptr()}


@pytest.mark.parametrize("pair_of", [HOPPER, BLACKWELL], ids=lambda at: f"{at[1]}-{at[2]}")
def test_a_reload_reaches_both_libraries_and_no_address_changes(
    pair_of: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stored bf16: `copy_` is seen, `.data.copy_()` is stale in the buffer until `refresh_parameters()`."""
    with launch(*pair_of, monkeypatch, stored="bf16") as made:
        before = made.run()
        made.stored.copy_(torch.full((4,), 1.5))
        after = made.run()
        made.stored.data.copy_(torch.full((4,), -0.5))
        (widened,) = [sinks for sinks in before.values() if sinks.dtype is torch.float32]
        with pytest.raises(AssertionError, match="decode"):
            made.run()
        assert widened.unique().tolist() == [1.5], "stale: nothing ticked"
        made.backends.refresh_parameters()
        last = made.run()
        assert widened.unique().tolist() == [-0.5]
        addresses = [{half: sinks.data_ptr() for half, sinks in seen.items()} for seen in (before, after, last)]
        assert addresses[0] == addresses[1] == addresses[2]
