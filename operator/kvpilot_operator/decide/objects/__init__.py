"""Decide the Kubernetes objects of a QuantizedLLMService: workloads, Services, routes, pools, claims, pod marks."""
