"""The kernels that run on a GPU: store, plan, decode, reduce and gather over packed pages (Triton and Gluon)."""
