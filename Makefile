# Two commands do everything on a fresh machine (git, make, python3 >= 3.11, pip):
#   make quickstart    real text to a trained GPT
#   make test          the tests that a laptop runs
# With your own environment: make PYTHON=/path/to/python test
VENV := .venv
TORCH ?= torch==2.13.0
ifdef PYTHON
  READY :=
  READY_DEV :=
else
  PYTHON := $(VENV)/bin/python
  READY := $(VENV)/.ready
  READY_DEV := $(VENV)/.ready-dev
endif
CORPUS ?=
TEST_WORKERS ?= 2

.PHONY: quickstart test test-quick test-all test-gpu test-scripts checks format docs dist sbom clean

quickstart: $(READY)
	$(PYTHON) tools/quickstart.py $(if $(CORPUS),--corpus $(CORPUS))

# tests/support/distribution.py shares tests between the workers; it replaces xdist's loadfile.
test: $(READY_DEV)
	$(PYTHON) -m pytest tests -m "not slow and not gpu" -n $(TEST_WORKERS) --dist loadfile

# For the loop of an editor, in less than a minute: tests of one process that take milliseconds, without Triton kernels.
test-quick: $(READY_DEV)
	$(PYTHON) -m pytest tests -m "not slow and not gpu" --quick -n $(TEST_WORKERS) --dist loadfile

test-all: $(READY_DEV)
	$(PYTHON) -m pytest tests -m "not gpu" -n $(TEST_WORKERS) --dist loadfile

test-gpu: $(READY_DEV)
	$(PYTHON) -m pytest tests -m gpu

# MEGATRON_LM=FOLDER: the entry scripts of a checkout of Megatron-LM, on this package.
test-scripts: $(READY_DEV)
	MEGATRON_LM="$(MEGATRON_LM)" $(PYTHON) tests/scripts/checkout.py

checks: $(READY_DEV)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy
	$(PYTHON) -c 'from importlinter.cli import lint_imports_command as lint; lint()'

# The site is in build/site. A link that leads nowhere is an error.
docs: $(READY_DEV)
	$(PYTHON) -m mkdocs build --strict

# A wheel of this commit. build/ is removed first, because files in it would get into the wheel.
dist: $(READY)
	rm -rf build/lib build/bdist.* dist
	$(PYTHON) -m pip wheel --quiet --no-deps --wheel-dir dist .

# A bill of materials (CycloneDX) of the versions that images install.
sbom: $(READY)
	$(PYTHON) -m pip install --quiet --disable-pip-version-check "cyclonedx-bom>=5"
	mkdir -p dist
	$(PYTHON) -m cyclonedx_py requirements containers/constraints.txt --pyproject pyproject.toml --output-file dist/sbom.json

format: $(READY_DEV)
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

# A Python without ensurepip (Debian without python3-venv) gets its pip from the pip that started it.
$(VENV)/bin/python:
	python3 -c 'import sys; assert sys.version_info >= (3, 11), "Python 3.11 or newer is needed, this is " + sys.version'
	python3 -m venv $(VENV) || (python3 -m venv --clear --without-pip $(VENV) && python3 -m pip --python $(VENV)/bin/python install pip)

# Installs torch first and alone, so that packages that depend on it use this build.
$(VENV)/.ready: $(VENV)/bin/python pyproject.toml
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --editable ".[mlm]"
	touch $@

$(VENV)/.ready-dev: $(VENV)/.ready
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --editable ".[mlm,dev]"
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
