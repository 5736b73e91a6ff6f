"""Packed latent caches for tests: rows to the bytes a library reads, and back to the numbers those bytes mean.

In: a cache of rows `[P, page_size, 1, D]`. Out: a uint8 cache of layout "fp8_ds_mla" or "fp8_dsv4", and what it holds
as float32. NaN rows stay NaN. Tiles of numbers share a power-of-two scale, as the caches' own writers have it.

.. versionadded:: 0.2
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

__all__ = ["FORMATS", "Format", "pack", "unpack"]

#: The greatest e4m3 number.
_E4M3_MAX: Final = 448.0


class Format(NamedTuple):
    """`latent` e4m3 numbers in tiles, then `rope` bf16 numbers; scales of `scale_bytes` a token.

    `apart`: a page's scales lie behind the numbers of all its tokens, not behind each token's own.
    """

    latent: int
    rope: int
    tile: int
    scale_bytes: int
    apart: bool

    @property
    def token_bytes(self) -> int:
        """Bytes of a token."""
        return self.latent + 2 * self.rope + self.scale_bytes


#: Source: FlashMLA (sgl-flash-mla 1.0.0), csrc/kernels/kv_cache_format.h: formats V32 (f32 scales between the latent
#: and the rotary part) and V4 (a byte of exponent a tile, padded to 8).
FORMATS: Final = {
    "fp8_ds_mla": Format(latent=512, rope=64, tile=128, scale_bytes=16, apart=False),
    "fp8_dsv4": Format(latent=448, rope=64, tile=64, scale_bytes=8, apart=True),
}


def pack(rows: Tensor, layout: str) -> Tensor:
    """`[P, page_size, 1, latent + rope]` as `[P, page_size, 1, token_bytes]` uint8."""
    form = FORMATS[layout]
    pages, page_size = rows.shape[:2]
    latent = rows[:, :, 0, : form.latent].float().reshape(pages, page_size, form.latent // form.tile, form.tile)
    wanted = latent.abs().amax(-1).clamp_min(1e-4) / _E4M3_MAX
    exponents = wanted.log2().ceil().nan_to_num(0.0)
    numbers = (latent / exponents.exp2()[..., None]).to(torch.float8_e4m3fn).flatten(2).view(torch.uint8)
    rope = rows[:, :, 0, form.latent :].to(torch.bfloat16).contiguous().view(torch.uint8)
    if not form.apart:
        scales = exponents.exp2().contiguous().view(torch.uint8)
        return torch.cat([numbers, scales, rope], dim=-1)[:, :, None]
    scales = torch.zeros(pages, page_size, form.scale_bytes, dtype=torch.uint8, device=rows.device)
    # e8m0: an exponent with a bias of 127
    scales[:, :, : exponents.shape[-1]] = (exponents + 127).to(torch.uint8)
    page = torch.cat([torch.cat([numbers, rope], dim=-1).flatten(1), scales.flatten(1)], dim=-1)
    # pages begin at multiples of a token's numbers, as engines lay them out and SM100's tensor map needs it
    begin = form.latent + 2 * form.rope
    padded = torch.nn.functional.pad(page, (0, -page.shape[1] % begin))
    return padded[:, : page.shape[1]].view(pages, page_size, 1, form.token_bytes)


def unpack(packed: Tensor, layout: str) -> Tensor:
    """What a packed cache holds: `[P, page_size, 1, latent + rope]` float32."""
    form = FORMATS[layout]
    pages, page_size = packed.shape[:2]
    if form.apart:
        page = packed.reshape(pages, page_size * form.token_bytes)
        border = page_size * (form.latent + 2 * form.rope)
        body = page[:, :border].reshape(pages, page_size, form.latent + 2 * form.rope)
        exponents = page[:, border:].reshape(pages, page_size, form.scale_bytes)
        scales = (exponents[..., : form.latent // form.tile].float() - 127).exp2()
    else:
        body = packed[:, :, 0]
        scales = body[..., form.latent : form.latent + form.scale_bytes].contiguous().view(torch.float32)
    numbers = body[..., : form.latent].contiguous().view(torch.float8_e4m3fn).float()
    numbers = numbers.reshape(pages, page_size, form.latent // form.tile, form.tile)
    rope = body[..., -2 * form.rope :].contiguous().view(torch.bfloat16).float()
    return torch.cat([(numbers * scales[..., None]).flatten(-2), rope], dim=-1)[:, :, None]
