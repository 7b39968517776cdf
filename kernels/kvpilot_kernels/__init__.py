"""Codecs and kernels of the KV-cache formats, for CPU and GPU, independent of vLLM and Kubernetes."""
