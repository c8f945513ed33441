VENV ?= .venv
BIN := $(VENV)/bin
# A third of the suite waits for browsers, locks and processes: more workers than cores.
TEST_WORKERS ?= $(shell echo $$(($$(getconf _NPROCESSORS_ONLN) * 3 / 2)))

.PHONY: run test lint bench

run: $(VENV)/.installed
	$(BIN)/python manage.py up

test: lint
	$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadgroup

lint: $(VENV)/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/mypy
	$(BIN)/python manage.py makemigrations --check --dry-run
	$(BIN)/python manage.py state_diagrams --check
	SECRET_KEY=$$($(BIN)/python -c 'import secrets; print(secrets.token_urlsafe(60))') \
	PUBLIC_URL=https://signalbox.example $(BIN)/python manage.py check --deploy --fail-level WARNING

bench: $(VENV)/.installed
	$(BIN)/python -m bench

$(VENV)/.installed: requirements.txt
	python3 -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.txt
	touch $@
