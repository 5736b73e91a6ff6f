"""AMD's AITER behind Backstamp's call contract: paged attention for MHA, absorbed MLA for decode and prefill."""
