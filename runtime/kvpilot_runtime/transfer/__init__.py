"""Transfer of our pages: to host memory, to a file for pages that host memory evicts, and to other engines."""
