"""Interface to the kernels for backends, and the launch parameters of the kernels."""
