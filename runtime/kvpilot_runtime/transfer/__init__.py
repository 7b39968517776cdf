"""Pages of ours that leave the GPU: to host memory, to a file below it, and to other engines."""
