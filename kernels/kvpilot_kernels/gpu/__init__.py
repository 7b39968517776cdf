"""GPU kernels: store, plan, decode, reduce and gather over packed pages (Triton and Gluon)."""
