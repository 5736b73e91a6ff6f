"""Ascend NPUs behind Backstamp's call contract: paged MHA, absorbed MLA and gated delta nets through torch-npu."""
