"""TensorRT-LLM's attention kernels, through flashinfer-python and tokenspeed-mla, as a Backstamp plugin."""
