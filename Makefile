# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

# Any Python 3.9 or newer; the venvs look for their own interpreters.
PYTHON ?= python3
RUN = $(PYTHON) tests/tools/run.py

.DEFAULT_GOAL := help
.PHONY: help venv engine system gates unit test full lab soak oracle mutation ee demo clean clean-cache

help: ## this list
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

demo: ## relaunch a real SGLang twice on this machine and ask it something
	@$(PYTHON) scripts/demo.py

test: system venv engine ## gates, unit tests and one scenario per promise
	@$(RUN) test --budget 1500

full: system venv engine ## everything; SHARD=K/N runs one part
	@$(RUN) full $(if $(SHARD),--shard $(SHARD))

lab: system venv ## the lab alone: LXC containers, with this machine as their Proxmox node
	@$(RUN) lab

faults: system venv ## the fault matrix: real faults at each entry point, with the counts of what went wrong (docs/faults.md)
	@nice $(PYTHON) tests/tools/faults.py --budget 540

faults-proof: system venv ## each row of the fault matrix without its defence: it must turn red
	@nice $(PYTHON) tests/tools/faults.py --proof

soak: system venv ## 200 relaunches in a row in the lab with random faults (COUNT=N, SEED=N, MINUTES=N); docs/development.md
	@nice $(PYTHON) tests/tools/soak.py --count $(or $(COUNT),200) $(if $(SEED),--seed $(SEED)) $(if $(MINUTES),--minutes $(MINUTES))

oracle: ## our reading of SGLang's options against the parsers of its wheels 0.5.10 to 0.5.23 (VERSIONS="..." for some)
	@$(PYTHON) scripts/bootstrap.py engine || echo "without an engine, names of options are all that is compared"
	@nice $(PYTHON) tests/tools/oracle.py $(VERSIONS)

ee: ## the context of an execution environment, in build/ee (see docs/scale.md)
	@$(PYTHON) scripts/bootstrap.py newest-venv
	@"$$($(PYTHON) scripts/bootstrap.py venv-dir)/bin/python" tests/tools/execution_environment.py make

mutation: venv ## which changes of a decision no test would see (hours; MODULES="leftovers holders" for some)
	@nice $(PYTHON) tests/tools/mutation.py --show $(MODULES)

gates: venv ## sanity, lint, types, docs, changelog, build and install
	@$(RUN) gates

unit: venv ## unit and case tests on both ansible-cores
	@$(RUN) unit

venv: ## make the Ansible venvs (core 2.19 and 2.21) in the cache
	@$(PYTHON) scripts/bootstrap.py venv

engine: ## install the CPU SGLang and the tiny model into the cache
	@$(PYTHON) scripts/bootstrap.py engine

system: ## install the system packages of the tests (root, apt)
	@$(PYTHON) scripts/system_packages.py

clean: ## remove what runs left in the checkout
	@rm -rf build tests/output tests/integration/inventory .ansible .mypy_cache .pytest_cache .ruff_cache .hypothesis cleanslate-sglang-*.tar.gz
	@find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

clean-cache: ## remove the venvs, the engine and the model as well
	@rm -rf "$$($(PYTHON) scripts/bootstrap.py cache-dir)"
