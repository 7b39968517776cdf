"""Programs other than Python libraries that benchmarks and tests run: helm, kubectl, promtool, linters.

One small module per program, each with one function that returns the Path of the program: the one on the user's PATH
first, else fetched once into `${KVPILOT_CACHE:-~/.cache/kvpilot}/tools/NAME-VERSION` by the machine's own package
clients. `fetch` has what they share.
"""
