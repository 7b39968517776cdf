"""Programs other than Python libraries that benchmarks and tests run: helm, kubectl, promtool, linters.

Each program has a small module with a function that returns its Path. A program on the user's PATH takes precedence.
Otherwise the program is fetched once into `${KVPILOT_CACHE:-~/.cache/kvpilot}/tools/NAME-VERSION` with the machine's
own package clients. `fetch` has the common code.
"""
