# Copyright (c) Clean Slate contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

PYTHON ?= python3

.DEFAULT_GOAL := help
.PHONY: help venv engine

help: ## this list
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: ## make the Ansible venvs (core 2.19 and 2.21) in the cache
	@$(PYTHON) scripts/bootstrap.py venv

engine: ## install the CPU SGLang and the tiny model into the cache
	@$(PYTHON) scripts/bootstrap.py engine
