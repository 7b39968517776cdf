.PHONY: install demo test quick check unit kernels chart images monitoring cluster scale runtime e2e faults long docs docs-serve docs-check generate format clean
RUN := .venv/bin/
CACHE := $(or $(KVPILOT_CACHE),$(HOME)/.cache/kvpilot)
# Let Python store compiled modules, even if the shell forbids it: engines then start in half the time.
unexport PYTHONDONTWRITEBYTECODE

install:
	scripts/install.sh

# KEEP=1 leaves everything running and prints the kubectl commands to try. PLAIN=1 prints lines instead of a live screen.
# WHERE=cluster IMAGE=... runs it on the cluster of kubectl's current context (docs/quickstart.md).
demo:
	@python=$$(scripts/python.sh) && PYTHONPATH=demo:localcluster "$$python" -m kvpilot_demo.prepare \
	$(if $(KEEP),--keep) $(if $(PLAIN),--plain) $(if $(filter cluster,$(WHERE)),--cluster) \
	$(if $(IMAGE),--image=$(IMAGE)) $(if $(MODEL),--model=$(MODEL)) $(if $(YES),--yes)

# Run all test folders, JOBS at a time, even if one fails. Most of them often wait, so five folders fill two cores.
JOBS ?= 5
test: install
	$(RUN)python scripts/run_tests.py --jobs $(JOBS)

# Fast checks to run while editing. They need no engine and no cluster.
quick: install
	$(RUN)python scripts/run_tests.py --jobs 2 --quick

check: install
	$(RUN)ruff format --check .
	$(RUN)ruff check .
# All clones share mypy's cache. The lock lets only one mypy write to it at a time.
	flock $(CACHE)/mypy.lock $(RUN)mypy --cache-dir=$(CACHE)/mypy operator/kvpilot_operator runtime/kvpilot_runtime kernels/kvpilot_kernels formats/kvpilot_formats probes/kvpilot_probes cli/kvpilot_cli kubectl/kvpilot_kubectl smallmodels/kvpilot_smallmodels demo/kvpilot_demo localcluster/kvpilot_localcluster tests/support benchmarks
	$(RUN)lint-imports
	$(RUN)python scripts/generate.py --check
	$(RUN)python scripts/check_prose.py

unit kernels chart images monitoring cluster scale runtime e2e faults: install
	$(RUN)pytest tests/$@

# Tests that take too long for CI: canaries under live load, with and without spare capacity.
long: install
	$(RUN)python scripts/run_tests.py --jobs 1 --long

# Build the documentation as a site in dist/site, serve it at http://127.0.0.1:8000, or test it in a browser.
docs:
	scripts/site.sh build
docs-serve:
	scripts/site.sh serve
docs-check:
	scripts/site.sh check

# Write all generated files, such as config/ (from charts/) and the API reference (from the operator's structs).
generate: install
	$(RUN)python scripts/generate.py

format: install
	$(RUN)ruff format .
	$(RUN)ruff check --fix .

clean:
	rm -rf .venv dist
