"""What SGLang is told without serving: names, refusals of a launch, and a step's tensors."""

from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest
import sglang
import torch
from sglang.srt.arg_groups import choices
from sglang.srt.arg_groups.overrides import model_config_of, resolved_view
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs, prepare_server_args

from backstamp.errors import NotInstalled, Refused
from backstamp_sglang.door import check_sglang
from backstamp_sglang.facts import question_of
from backstamp_sglang.layers import CacheViews, check_pool, spec_of
from backstamp_sglang.names import catalogue_here
from backstamp_sglang.step import Chains, Slots, batch_of, draft_batch
from engines.sglang.tests.models import write_hybrid, write_models

KEY = "backstamp_torch_native"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint; SGLang has loaded its plugins."""
    load_plugins()
    return write_models(tmp_path_factory.mktemp("models"))["full"]


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with gated delta nets."""
    return write_hybrid(tmp_path_factory.mktemp("hybrid"))


def arguments(model: Path, **asked: object) -> ServerArgs:
    """Server arguments of a launch on the CPU, not resolved yet."""
    said = {"model_path": str(model), "dtype": "float32", "device": "cpu", "skip_tokenizer_init": True}
    return ServerArgs(**{**said, "attention_backend": KEY, **asked})


def test_every_key_is_a_name_and_sglangs_own_names_stay_its_own(model: Path) -> None:
    """A key whose name SGLang has gets a prefix; the backend behind SGLang's name is SGLang's."""
    for key in catalogue_here().keys("attention"):
        own = key in ATTENTION_BACKENDS and ATTENTION_BACKENDS[key].__module__.startswith("sglang.")
        name = f"backstamp_{key}" if own else key
        assert ATTENTION_BACKENDS[name].__module__ == "backstamp_sglang.names"
        assert name in choices.ATTENTION_BACKEND_CHOICES
        # SGLang replaces a draft backend it does not find here by its own, with a line in the log
        assert name in choices.DRAFT_ATTENTION_BACKEND_CHOICES
    assert ATTENTION_BACKENDS["torch_native"].__module__.startswith("sglang.")
    assert "backstamp" in ATTENTION_BACKENDS


def test_the_command_line_takes_our_names(model: Path) -> None:
    """SGLang's flags have lists of choices; a name nobody has is its own error."""
    pair = ["--prefill-attention-backend", "backstamp_flex_attention", "--decode-attention-backend", KEY]
    others = ["--speculative-draft-attention-backend", KEY, "--linear-attn-backend", KEY]
    asked = prepare_server_args(["--model-path", str(model), "--device", "cpu", *pair, *others])
    assert asked.prefill_attention_backend == "backstamp_flex_attention"
    with pytest.raises(SystemExit):
        prepare_server_args(["--model-path", str(model), "--attention-backend", "no_such_kernel"])


def test_a_key_of_a_plugin_that_is_not_installed_is_a_name_too(model: Path) -> None:
    """Whoever asks for it is told what to install, instead of that there is no such name."""
    assert "backstamp_fa3" in ATTENTION_BACKENDS


@pytest.mark.parametrize("version", ["0.5.22", "0.5.24", "0.6.0"])
def test_an_sglang_outside_the_tested_range_is_refused(version: str) -> None:
    """SGLang's attention contract changes between patch releases."""
    with pytest.raises(NotInstalled, match=rf"backstamp-sglang: needs sglang ==0.5.23, got {version}"):
        check_sglang(version)


def test_such_an_sglang_is_refused_where_a_launch_asks(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a module of ours reads what may have moved; and only where one of our names is asked for."""
    monkeypatch.setattr(sglang, "__version__", "0.5.40")
    with pytest.raises(NotInstalled, match=r"got 0\.5\.40"):
        arguments(model).resolve_once()
    with pytest.raises(NotInstalled, match=r"got 0\.5\.40"):
        ATTENTION_BACKENDS[KEY](None)
    arguments(model, attention_backend="torch_native").resolve_once()


def test_a_launch_is_resolved_once_and_its_pages_are_sglangs(model: Path) -> None:
    """The plan's page size where nobody asked, the operator's where one did, and a marker for what is spawned."""
    asked = arguments(model)
    asked.resolve_once()
    assert resolved_view(asked).page_size == 16
    assert set(asked._backstamp.names) == {KEY}
    paged = arguments(model, page_size=32)
    paged.resolve_once()
    assert resolved_view(paged).page_size == 32


def test_a_request_travels_with_the_arguments(model: Path) -> None:
    """A spawned process reads it before SGLang loads its plugins there; a launch of SGLang's own carries nothing."""
    asked, own = arguments(model), arguments(model, attention_backend="torch_native")
    for each in (asked, own):
        each.resolve_once()
    assert b"_was_asked" in pickle.dumps(asked)
    assert b"backstamp" not in pickle.dumps(own)


def test_graphs_are_switched_off_with_a_name_of_ours(model: Path) -> None:
    """Nothing of ours is captured: a graph over a step would replay the first one's lengths."""
    asked = arguments(model, device="cuda")
    asked.resolve_once()
    graphs = resolved_view(asked).cuda_graph_config
    assert (graphs.decode.backend, graphs.prefill.backend) == ("disabled", "disabled")


@pytest.mark.parametrize(
    ("asked", "needed"),
    [
        ({"kv_cache_dtype": "fp8_e4m3"}, "a cache in the model's own dtype"),
        ({"enable_two_batch_overlap": True}, "one stream of steps"),
        ({"decode_attention_backend": "torch_native"}, "both halves from Backstamp, got torch_native"),
        ({"speculative_algorithm": "NGRAM"}, "a draft of EAGLE, EAGLE3, STANDALONE, got NGRAM"),
        ({"enable_multi_layer_eagle": True}, "one draft model, run in a loop"),
        ({"speculative_adaptive": True}, "one number of draft steps"),
        ({"speculative_draft_window_size": 64}, "a draft that sees all its tokens"),
        ({"speculative_draft_kv_cache_dtype": "fp8_e4m3"}, "one dtype for both caches"),
        ({"dcp_size": 2}, "one rank a sequence"),
        ({"enable_unified_memory": True}, "a cache of one model"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_not_carried_to_a_kernel_is_refused(asked: dict[str, object], needed: str, model: Path) -> None:
    """A plan may not promise what the adapter drops."""
    server = arguments(model, **asked)
    with pytest.raises(Refused, match=needed):
        question_of(server, model_config_of(server))


@pytest.mark.parametrize(
    ("asked", "needed"),
    [
        ({}, "gated delta nets, got recurrent layers"),
        (
            {"linear_attn_backend": "triton", "linear_attn_decode_backend": KEY},
            "both linear halves, got triton, backst",
        ),
        ({"speculative_algorithm": "EAGLE"}, "a launch without speculation beside linear kernels"),
        ({"linear_attn_backend": "triton", "linear_attn_verify_backend": KEY}, "SGLang's own linear verify"),
        ({"mamba_radix_cache_strategy": "extra_buffer"}, "final states alone"),
        ({"attention_backend": "torch_native"}, "both halves from Backstamp"),
    ],
    ids=["no-recurrence", "half", "speculation", "verify", "tracked", "attention"],
)
def test_linear_kernels_are_refused_where_they_would_not_run(
    asked: dict[str, object], needed: str, model: Path, hybrid: Path
) -> None:
    """Each is a request of ours that SGLang would answer by a kernel of its own, or not at all."""
    server = arguments(model if not asked else hybrid, **{"linear_attn_backend": KEY, **asked})
    with pytest.raises(Refused, match=needed.replace("halves, got", "halves from Backstamp, got")):
        question_of(server, model_config_of(server))


def test_images_seen_both_ways_are_refused(model: Path) -> None:
    """SGLang's Gemma gives that mask to its Triton backend alone."""
    server = arguments(model)
    config = model_config_of(server)
    config.hf_config.architectures = ["Gemma3ForConditionalGeneration"]
    with pytest.raises(Refused, match="a causal prefix, got Gemma3ForConditionalGeneration"):
        question_of(server, config)
    config.hf_config.architectures = ["Gemma3ForCausalLM"]
    question_of(server, config)


def test_linear_names_are_choices_and_their_plan_is_asked_for(hybrid: Path) -> None:
    """A hybrid model's plan has a linear slot where its linear kernels were asked for, and else none."""
    assert {"backstamp", KEY} <= set(choices.LINEAR_ATTN_KERNEL_BACKEND_CHOICES)
    for linear, families in ((KEY, {"gdn", "mha"}), ("triton", {"mha"})):
        server = arguments(hybrid, linear_attn_backend=linear)
        question = question_of(server, model_config_of(server))
        assert {group.facts.family for group in question.model.groups} == families


def test_a_draft_is_refused_with_the_launch(model: Path) -> None:
    """Its own key, on the draft's own config: told before anything is spawned."""
    draft = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": str(model)}
    with pytest.raises(Refused, match="draft decode attention backend 'flex_attention'"):
        arguments(
            model,
            attention_backend="torch_native",
            speculative_draft_attention_backend="backstamp_flex_attention",
            **draft,
        ).resolve_once()


def test_a_pair_is_asked_for_half_by_half(model: Path) -> None:
    """One key twice is a base request; two keys, or none for one half, are split requests."""
    one = question_of(arguments(model), model_config_of(arguments(model))).launch
    assert {name: asked.value for name, asked in one.keys.items()} == {"attention_backend": "torch_native"}
    server = arguments(model, attention_backend="backstamp", decode_attention_backend=KEY)
    two = question_of(server, model_config_of(server)).launch
    assert {name: asked.value for name, asked in two.keys.items()} == {"decode_attention_backend": "torch_native"}


def layer(**changed: object) -> RadixAttention:
    """One layer of SGLang's."""
    return RadixAttention(
        **{"num_heads": 4, "head_dim": 8, "scaling": 0.3, "num_kv_heads": 2, "layer_id": 5, **changed}
    )


def test_a_layer_is_sglangs_own_numbers() -> None:
    """SGLang's window already leaves the token itself out, and it has 0 and -1 for none."""
    spec = spec_of(layer(sliding_window_size=31, logit_cap=20.0, v_head_dim=16))
    assert (spec.window_left, spec.softcap, spec.v_head_dim, spec.layer_id, spec.scale) == (31, 20.0, 16, 5, 0.3)
    assert spec_of(layer(sliding_window_size=0)).window_left == spec_of(layer()).window_left == -1


@pytest.mark.parametrize(
    ("changed", "needed"),
    [
        ({"attn_type": AttentionType.ENCODER_ONLY}, "a decoder layer"),
        ({"is_cross_attention": True}, "a decoder layer"),
        ({"logit_cap": 2.0, "logit_capping_method": "rpe"}, "capped by tanh"),
        ({"pos_encoding_mode": "ALIBI"}, "rotation"),
    ],
    ids=["encoder", "cross", "cap", "alibi"],
)
def test_a_layer_the_contract_has_no_word_for_is_refused(changed: dict[str, object], needed: str) -> None:
    """Better no start than logits of another kind."""
    with pytest.raises(Refused, match=needed):
        spec_of(layer(**changed))


class Pool:
    """One layer's buffers, as a pool of SGLang's hands them out."""

    is_quantized_kv_cache = False
    store_dtype = dtype = torch.float32

    def __init__(self, layout: str, k: torch.Tensor) -> None:
        self.kv_cache_layout, self.k, self.v = layout, k, 2 * k

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values."""
        return self.k, self.v


@pytest.mark.parametrize("layout", ["nhd", "hnd"])
def test_a_cache_is_read_through_views(layout: str) -> None:
    """Both layouts of SGLang's pools are the contract's `[P, page, Hk, D]`: not a byte is copied."""
    rows = torch.arange(5 * 4 * 2 * 8, dtype=torch.float32).view(20, 2, 8)
    hnd = rows.view(5, 4, 2, 8).transpose(1, 2).contiguous()
    pool = Pool(layout, rows if layout == "nhd" else hnd)
    views = CacheViews(pool, 4)
    kv = views.of(0)
    assert kv.k.shape == kv.v.shape == (5, 4, 2, 8)
    assert kv.k.untyped_storage().data_ptr() == pool.k.untyped_storage().data_ptr()
    assert torch.equal(kv.k[3, 1], rows[13])
    assert views.of(0) is kv


def test_a_packed_pool_is_refused() -> None:
    """AITER's vectorised layout has no strided view."""
    with pytest.raises(Refused, match="plain rows"):
        check_pool(Pool("vectorized_5d", torch.zeros(1)))


TABLE = torch.arange(4 * 16, dtype=torch.int32).view(4, 16)


def forward(*, decode: bool = False) -> SimpleNamespace:
    """Three rows: 9 tokens known of which 1 is new, 4 of which 4, 7 of which 5; or one new token each."""
    lens = torch.tensor([9, 4, 7])
    return SimpleNamespace(
        batch_size=3,
        seq_lens=lens,
        seq_lens_cpu=lens,
        extend_seq_lens_cpu=None if decode else [1, 4, 5],
        req_pool_indices=torch.tensor([2, 0, 3]),
        out_cache_loc=torch.arange(3 if decode else 10),
    )


def test_a_step_is_sglangs_own_tensors() -> None:
    """Pages of one token: SGLang's own table is the index, and its lengths count this step's tokens."""
    batch = batch_of(forward(), "prefill", Slots(TABLE, 1), frozenset({"indirect", "page_table"}))
    assert batch.qo_indptr.tolist() == [0, 1, 5, 10]
    assert (batch.num_tokens, batch.max_q_len, batch.max_kv_len) == (10, 5, 9)
    assert batch.index.table is TABLE
    assert batch.kv_lens.tolist() == [9, 4, 7]
    decode = batch_of(forward(decode=True), "decode", Slots(TABLE, 1), frozenset({"indirect"}))
    assert (decode.phase, decode.num_decode_rows, decode.decode_q_len) == ("decode", 3, 1)
    assert decode.qo_indptr.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("form", ["page_table", "csr", "indirect"])
@pytest.mark.parametrize("windowed", [False, True], ids=["full", "window"])
def test_every_index_form_names_the_same_pages(form: str, windowed: bool) -> None:
    """SGLang stores token slots; a page's id is its first token's slot over the page size, in the layer's own slots."""
    to_window = torch.arange(64).flip(0).view(16, 4).flip(1).flatten() if windowed else None
    batch = batch_of(forward(), "prefill", Slots(TABLE, 4, to_window), frozenset({form}))
    for row, (source, length) in enumerate(zip([2, 0, 3], [9, 4, 7], strict=True)):
        firsts = TABLE[source, :length:4].long()
        wanted = (firsts if to_window is None else to_window[firsts]) // 4
        count, index = len(wanted), batch.index
        if form == "page_table":
            found = index.page_table[row, :count]
        elif form == "indirect":
            found = index.table[index.row_ids[row], :count]
        else:
            found = index.kv_indices[index.kv_indptr[row] : index.kv_indptr[row + 1]]
        assert found.tolist() == wanted.tolist()


@pytest.mark.parametrize("topk", [1, 2], ids=["chain", "two-chains"])
def test_a_draft_step_sees_the_prefix_and_its_own_chain(topk: int) -> None:
    """Three slots a chain behind the prefix: a row skips those of the chains before its own."""
    step, forms = 1, frozenset({"page_table"})
    lens = torch.tensor([9, 4, 7])
    asked = SimpleNamespace(batch_size=3, seq_lens=lens, seq_lens_cpu=lens, req_pool_indices=torch.tensor([2, 0, 3]))
    batch = draft_batch(asked, step, Chains(topk, 3), Slots(TABLE, 1), forms)
    rows = [
        (source, length, chain) for source, length in zip([2, 0, 3], [9, 4, 7], strict=True) for chain in range(topk)
    ]
    assert batch.num_rows == batch.num_tokens == len(rows)
    assert batch.kv_lens.tolist() == batch.kv_lens_host.tolist() == [length + 2 for _, length, _ in rows]
    for row, (source, length, chain) in enumerate(rows):
        first = length + 3 * chain
        wanted = [*TABLE[source, :length].tolist(), *TABLE[source, first : first + 2].tolist()]
        assert batch.index.page_table[row, : length + 2].tolist() == wanted


@pytest.mark.parametrize("topk", [1, 2], ids=["chain", "tree"])
def test_a_verify_step_counts_the_drafted_tokens(topk: int) -> None:
    """SGLang's lengths leave them out here; a tree's mask lies row after row, `[drafted, length]` each."""
    asked = forward(decode=True)
    mask = torch.zeros(3 * (12 + 7 + 10), dtype=torch.bool)
    asked.spec_info = SimpleNamespace(draft_token_num=3, topk=topk, custom_mask=mask)
    batch = batch_of(asked, "verify", Slots(TABLE, 1), frozenset({"indirect"}))
    assert batch.kv_lens.tolist() == batch.kv_lens_host.tolist() == [12, 7, 10]
    assert batch.qo_indptr.tolist() == [0, 3, 6, 9]
    if topk == 1:
        assert batch.tree is None
    else:
        assert batch.tree is not None
        assert batch.tree.buffer is mask
        assert batch.tree.indptr.tolist() == [0, 36, 57]
