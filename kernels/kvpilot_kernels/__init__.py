"""Reference codecs and kernels of the KV-cache formats; knows neither vLLM nor Kubernetes."""
