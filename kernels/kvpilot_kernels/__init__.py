"""Reference codecs and kernels of the KV-cache formats; they are independent of vLLM and Kubernetes."""
