"""Codecs and kernels of our KV-cache formats, for CPU and GPU. They need neither vLLM nor Kubernetes."""
