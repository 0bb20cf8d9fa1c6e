PYTHON ?= python3
PROMPT = The "import" statement
VENV = .venv
# Written once everything is installed, so that installing is not repeated until what it read has changed.
STAMP = $(VENV)/.installed
EXTRAS = dev,examples,plot,progress,test

export PROMPT

.PHONY: help demo test lint format docs bench test-gpu clean

help:
	@echo "make demo      generate text with the example model; PROMPT='...' to choose the start"
	@echo "make test      all tests on the CPU, with coverage; warnings are errors"
	@echo "make lint      ruff and mypy --strict"
	@echo "make format    let ruff rewrite the code"
	@echo "make docs      check that the docs' snippets run and their links resolve"
	@echo "make bench     the benchmarks"
	@echo "make test-gpu  the GPU tests, with PYTHON as it is: nothing is installed"
	@echo "make clean     remove what the other targets wrote, except $(VENV)"

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --disable-pip-version-check -q -c constraints.txt -e ".[$(EXTRAS)]"
	@touch $@

demo: $(STAMP)
	@$(VENV)/bin/python -m examples.eagle --prompt "$$PROMPT"

test: $(STAMP)
	$(VENV)/bin/python -m pytest --cov=graphkit --cov-report=term tests

lint: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy --strict graphkit graphkit_pytest.py tests/typing

format: $(STAMP)
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

docs: $(STAMP)
	$(VENV)/bin/python -m pytest tests/test_docs.py

bench: $(STAMP)
	$(VENV)/bin/python -m benchmarks.run

# For a machine whose own Python has torch with CUDA, pytest, attrs and numpy.
test-gpu:
	PYTHONPATH=. $(PYTHON) -m pytest -m gpu tests

clean:
	rm -rf build dist htmlcov .coverage .coverage.* .hypothesis .mypy_cache .pytest_cache .ruff_cache .benchmarks
	find . -name __pycache__ -type d -not -path "./$(VENV)/*" -prune -exec rm -rf {} +
