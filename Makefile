.PHONY: install demo test quick check unit kernels chart images monitoring cluster scale runtime e2e faults long docs docs-serve docs-check generate format clean
RUN := .venv/bin/
CACHE := $(or $(KVPILOT_CACHE),$(HOME)/.cache/kvpilot)
# Whatever the shell says: what one process has compiled the next one reads, and engines start in half the time.
unexport PYTHONDONTWRITEBYTECODE

install:
	scripts/install.sh

# KEEP=1 leaves everything running and prints the kubectl commands to try. PLAIN=1 prints lines instead of a live screen.
# WHERE=cluster IMAGE=... runs it on the cluster of kubectl's current context (docs/quickstart.md).
demo:
	@python=$$(scripts/python.sh) && PYTHONPATH=demo:localcluster "$$python" -m kvpilot_demo.prepare \
	$(if $(KEEP),--keep) $(if $(PLAIN),--plain) $(if $(filter cluster,$(WHERE)),--cluster) \
	$(if $(IMAGE),--image=$(IMAGE)) $(if $(MODEL),--model=$(MODEL)) $(if $(YES),--yes)

# Every part, JOBS at a time, whichever fail; the summary comes last. Half of them mostly wait: four fill two cores.
JOBS ?= 4
test: install
	$(RUN)python scripts/run_tests.py --jobs $(JOBS)

# What one runs while editing: it needs no engine and no cluster.
quick: install
	$(RUN)python scripts/run_tests.py --jobs 2 --quick

check: install
	$(RUN)ruff format --check .
	$(RUN)ruff check .
# What it knows of files that are the same serves every clone; one at a time, since it waits for no other.
	flock $(CACHE)/mypy.lock $(RUN)mypy --cache-dir=$(CACHE)/mypy operator/kvpilot_operator runtime/kvpilot_runtime kernels/kvpilot_kernels formats/kvpilot_formats probes/kvpilot_probes cli/kvpilot_cli kubectl/kvpilot_kubectl smallmodels/kvpilot_smallmodels demo/kvpilot_demo localcluster/kvpilot_localcluster tests/support benchmarks
	$(RUN)lint-imports
	$(RUN)python scripts/generate.py --check
	$(RUN)python scripts/check_prose.py

unit kernels chart images monitoring cluster scale runtime e2e faults: install
	$(RUN)pytest tests/$@

# What takes longer than CI has: canaries under live load, with and without spare capacity.
long: install
	$(RUN)python scripts/run_tests.py --jobs 1 --long

# The documentation as a site, with its own packages: built into dist/site, shown at http://127.0.0.1:8000, read in a browser.
docs:
	scripts/site.sh build
docs-serve:
	scripts/site.sh serve
docs-check:
	scripts/site.sh check

# All that is made of something else in here, such as config/ of charts/ and the API's reference of crds/.
generate: install
	$(RUN)python scripts/generate.py

format: install
	$(RUN)ruff format .
	$(RUN)ruff check --fix .

clean:
	rm -rf .venv dist
