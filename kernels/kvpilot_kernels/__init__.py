"""KV-cache formats, their reference codecs and kernels; knows neither vLLM nor Kubernetes."""
