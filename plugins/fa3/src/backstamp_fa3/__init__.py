"""FlashAttention-3 and FlashAttention-4, over whichever build of them is installed."""
