.PHONY: install check test test-slow test-gpu bench

# On ROCm the image's own torch has to survive, so that list names none.
CONSTRAINTS := $(shell python -c "import torch; print('constraints-rocm.txt' if torch.version.hip else 'constraints.txt')" 2>/dev/null || echo constraints.txt)

install: ## into the active environment
	python -m pip install -c $(CONSTRAINTS) -e '.[demo,test]'

check:
	ruff format --check .
	ruff check .
	mypy
	python -m serve_app.check_config serve_config.yaml configs/serve/*.yaml

test:
	python -m pytest -m 'not gpu and not slow'

test-slow:
	python -m pytest -m slow

test-gpu:
	python -m pytest -m gpu tests/gpu

bench:
	python benchmarks/bench_encoder.py --model qwen3-vl
	python benchmarks/bench_encoder.py --model dinov2
	python benchmarks/bench_graphs.py
	python benchmarks/bench_serve.py
