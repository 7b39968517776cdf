"""GPU kernels over packed pages, in Triton and Gluon: store, plan, decode, reduce and gather."""
