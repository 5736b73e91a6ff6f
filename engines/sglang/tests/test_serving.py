"""SGLang serves with Backstamp's kernels: its own backend's tokens, stamps from its scheduler, red when broken."""

from __future__ import annotations

from pathlib import Path

import pytest

from engines.sglang.tests.models import write_models
from engines.sglang.tests.serve_once import CHUNK, NUM_PROMPTS, prompts
from engines.sglang.tests.serving import Served, serve
from tests.documents import install_documented_plugin
from tests.third_party.installing import install_third_parties

KEY = "backstamp_torch_native"
HOOKED = [
    "sglang.srt.model_executor.model_runner.ModelRunner.load_model",
    "sglang.srt.speculative.draft_utils.DraftBackendFactory._create_backend",
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The checkpoints, written once."""
    return write_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def own(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Served]:
    """What SGLang's own torch_native answers, with this adapter installed and not asked for."""
    return {
        name: serve(tmp_path_factory.mktemp("own"), model, attention_backend="torch_native", page_size=1)
        for name, model in models.items()
    }


def third_party(folder: Path, change: tuple[str, str] = ("", "")) -> Path:
    """The plugin of docs/write-a-plugin.md, as its author would install it, or broken."""

    def broken(text: str) -> str:
        return text.replace(*change) if change[0] else text

    return install_documented_plugin(folder / "site-packages", broken)


def test_the_prompts_are_chunked_and_share_prefixes(own: dict[str, Served]) -> None:
    """What the other tests compare is not the easy case: chunks, cached prefixes, and tokens that differ."""
    long = [prompt for prompt in prompts(256) if len(prompt) > CHUNK]
    assert len(long) >= NUM_PROMPTS // 2
    for served in own.values():
        assert len(served.tokens) == NUM_PROMPTS, served.log[-4000:]
        assert sum(cached > CHUNK for cached in served.cached) >= NUM_PROMPTS // 4
        assert len(set(served.tokens)) > NUM_PROMPTS // 2
        assert any(len(set(row)) > 3 for row in served.tokens)


def test_another_backend_is_left_alone(own: dict[str, Served]) -> None:
    """Installed and not asked for, the adapter is a list of names: no hook of SGLang's is applied, no kernel loaded."""
    for served in own.values():
        assert served.touched == {
            "backends": ["sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"],
            "hooked": [],
            "page_size": 1,
            "pool": "MHATokenToKVPool",
            "modules": ["backstamp_sglang.names"],
        }
        assert served.stamps == {}
        assert "Backstamp plan" not in served.log


@pytest.mark.parametrize("model", ["full", "window"])
def test_a_key_serves_what_sglang_serves(
    model: str, models: dict[str, Path], own: dict[str, Served], tmp_path: Path
) -> None:
    """A key: equal greedy tokens, the stamp in the scheduler process, plan and stamp in the log."""
    served = serve(tmp_path, models[model], attention_backend=KEY, page_size=1)
    assert served.tokens == own[model].tokens, served.log[-4000:]
    assert served.cached == own[model].cached
    layers = len(served.kernels("prefill"))
    assert served.kernels("prefill") == served.kernels("decode") == ["torch_native"] * layers
    stamp = (served.stamps or {})["0"]["decode"]
    assert stamp["plugin"] == {"name": "cpu", "distribution": "backstamp-cpu", "version": "0.1.0"}
    assert stamp["source"] == "operator"
    assert (served.touched or {})["hooked"] == HOOKED
    plan = "prefill torch_native (backstamp-cpu 0.1.0, operator)"
    assert served.log.index(plan) < served.log.index("Load weight begin")
    assert "Backstamp built torch_native for prefill, decode" in served.log


def test_pages_are_the_plans_where_nobody_asked(
    models: dict[str, Path], own: dict[str, Served], tmp_path: Path
) -> None:
    """SGLang's pages are one token each; a key gets its kernel's preferred size, and serves equal tokens from it."""
    served = serve(tmp_path, models["full"], attention_backend=KEY)
    assert served.tokens == own["full"].tokens, served.log[-4000:]
    assert (served.touched or {})["page_size"] == 16


@pytest.mark.parametrize("model", ["full", "window"])
def test_a_pair_serves_each_half_by_its_own_kernel(
    model: str, models: dict[str, Path], own: dict[str, Served], tmp_path: Path
) -> None:
    """SGLang's two flags, and decode rows mixed into chunks: prefill's kernel serves those, and tokens stay equal."""
    served = serve(
        tmp_path,
        models[model],
        prefill_attention_backend="backstamp_flex_attention",
        decode_attention_backend=KEY,
        enable_mixed_chunk=True,
        page_size=1,
    )
    assert served.tokens == own[model].tokens, served.log[-4000:]
    assert set(served.kernels("prefill")) == {"flex_attention"}
    assert set(served.kernels("decode")) == {"torch_native"}
    assert (served.touched or {})["backends"] == ["backstamp_sglang.backend.BackstampAttnBackend"] * 2


def test_the_best_by_rank_serves(models: dict[str, Path], own: dict[str, Served], tmp_path: Path) -> None:
    """`backstamp` names no kernel: the plan's choice serves, beside SGLang's overlapped schedule."""
    served = serve(tmp_path, models["full"], attention_backend="backstamp", page_size=1, disable_overlap_schedule=False)
    assert served.tokens == own["full"].tokens, served.log[-4000:]
    assert (served.stamps or {})["0"]["prefill"]["source"] == "auto"


def test_the_documented_plugin_serves(models: dict[str, Path], own: dict[str, Served], tmp_path: Path) -> None:
    """What docs/write-a-plugin.md has its reader write, without a line for SGLang: the scheduler runs its kernel."""
    served = serve(tmp_path, models["full"], site=third_party(tmp_path), attention_backend="acme_attention")
    assert served.tokens == own["full"].tokens, served.log[-4000:]
    assert set(served.kernels("prefill")) == {"acme_attention_naive"}


def test_an_installed_third_party_plugin_serves(
    models: dict[str, Path], own: dict[str, Served], tmp_path: Path
) -> None:
    """The distribution that the other engines' suites install too: its key is a name, and its windows are SGLang's."""
    site = install_third_parties(tmp_path, "acme-attention")
    served = serve(tmp_path / "served", models["window"], site=site, attention_backend="acme")
    assert served.tokens == own["window"].tokens, served.log[-4000:]
    stamps = [half for halves in (served.stamps or {}).values() for half in halves.values()]
    assert {stamp["plugin"]["distribution"] for stamp in stamps} == {"acme-attention"}


BROKEN = {
    "zeros": ("out[start:stop] = answer", "out[start:stop] = 0 * answer"),
    "no-causal-mask": ('.masked_fill(_future(logits), float("-inf"))', ""),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_kernel_is_seen(fault: str, models: dict[str, Path], own: dict[str, Served], tmp_path: Path) -> None:
    """The same plugin with attention that answers zeros, or without its causal mask: other tokens."""
    site = third_party(tmp_path, BROKEN[fault])
    served = serve(tmp_path, models["full"], site=site, attention_backend="acme_attention")
    assert set(served.kernels("prefill")) == {"acme_attention_naive"}
    assert len(served.tokens) == NUM_PROMPTS
    assert served.tokens != own["full"].tokens
