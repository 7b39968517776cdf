"""The codecs in plain torch: what the kernels are tested against, and what runs on a CPU."""
