"""FlashInfer's attention kernels, bound to Backstamp's call contract."""
