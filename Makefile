# The commands of the project; each sets up what it needs.
PYTHON ?= $(shell command -v python3.12 || command -v python3.11 || command -v python3)
VENV   ?= .venv
BIN    := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint selftest bench clean

help:            ## list the commands
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

setup: $(VENV)/.ready  ## create .venv with the tested versions of everything
