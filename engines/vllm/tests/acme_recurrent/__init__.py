"""A third party's delta rule and MLA prefill, right and wrong: `torch_native`'s answers with one thing dropped."""
