"""What each query token of a step is, written in one launch: its row, its place there, and what it sees.

In: a step's offsets and lengths on the device. Out: the values of its `TokenRows` and of `dead`, at their addresses. No
host length is read and nothing waits, so that a graph can record it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
import triton
import triton.language as tl

from backstamp.jit_notice import Announcer
from backstamp.relaunch import Codes, launch

if TYPE_CHECKING:
    from backstamp_trtllm.steps import Step, TokenRows

__all__ = ["TokenFill", "fill_kernel"]

#: Tokens a program looks up at a time.
BLOCK: Final = 128


class TokenFill:
    """Fills the tokens of one object's steps."""

    def __init__(self, kernel: str) -> None:
        self._compiles = Announcer(kernel)
        self._codes: Codes = {}

    def fill(self, step: Step, tokens: TokenRows) -> None:
        """Write what `tokens`, and `dead` of the step where it is there, say of its batch."""
        batch, dead, mask = step.batch, step.dead, tokens.mask
        words = 0 if mask is None else mask.shape[1]
        # all that the kernel is compiled for
        like = ("tokens", "" if dead is None else "that see nothing", f"{words} draft words" if words else "")
        # as torch does, and Triton does not: on the device of the tensors, whichever is current
        with self._compiles.first(*like), torch.cuda.device_of(tokens.rows):
            launch(
                fill_kernel,
                self._codes,
                like,
                (-(-batch.num_tokens // BLOCK), 1, 1),
                (
                    batch.qo_indptr,
                    batch.kv_lens,
                    *(tokens.rows, tokens.offsets, tokens.visible),
                    *(dead, mask),
                    batch.num_rows,
                    batch.num_tokens,
                    batch.num_rows.bit_length(),
                    tokens.drafts,
                ),
                lambda: {"WORDS": words, "BLOCK": BLOCK},
            )


# nothing is specialized on: addresses and sizes change with every step, and one code serves them all
@triton.jit(
    do_not_specialize=[
        "qo_indptr",
        "kv_lens",
        "rows",
        "offsets",
        "visible",
        "dead",
        "mask",
        "num_rows",
        "num_tokens",
        "halvings",
        "drafts",
    ]
)
def fill_kernel(
    qo_indptr,
    kv_lens,
    rows,
    offsets,
    visible,
    dead,
    mask,
    num_rows,
    num_tokens,
    halvings,
    drafts,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A block of tokens; grid (blocks). `halvings`: how often a search may halve `num_rows` rows and one more."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < num_tokens
    # as many rows end at or before a token as come before its own; pads are put into the last one
    row = tl.zeros([BLOCK], tl.int32)
    above = row + num_rows
    for _ in range(halvings):
        middle = (row + above) // 2
        undecided = row < above
        end = tl.load(qo_indptr + middle + 1, mask=undecided, other=0)
        row = tl.where(undecided & (end <= token), middle + 1, row)
        above = tl.where(undecided & (end > token), middle, above)
    row = tl.minimum(row, num_rows - 1)
    place = token - tl.load(qo_indptr + row)
    # token i of a row sees kv_len - q_len + i + 1 keys: one more than all but those behind it
    behind = tl.load(qo_indptr + row + 1) - token
    seen = tl.where(behind > 0, tl.maximum(tl.load(kv_lens + row) - behind + 1, 0), 0)
    tl.store(rows + token, row.to(tl.int64), mask=inside)
    tl.store(offsets + token, place, mask=inside)
    tl.store(visible + token, seen, mask=inside)
    if dead is not None:
        tl.store(dead + token, seen == 0, mask=inside)
    if mask is not None:
        # bit j of a token's words: it sees token j of its row, which is none after itself
        bits = tl.minimum(place, drafts - 1) + 1
        for word in tl.static_range(WORDS):
            count = tl.minimum(tl.maximum(bits - word * 32, 0), 32)
            ones = tl.where(count == 32, -1, (1 << tl.minimum(count, 31)) - 1)
            tl.store(mask + token.to(tl.int64) * WORDS + word, ones, mask=inside)
