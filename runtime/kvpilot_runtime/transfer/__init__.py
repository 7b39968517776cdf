"""Transfer of our pages: to host memory, to a file below it, and to other engines."""
