"""Transfer of our pages to host memory and to other engines."""
