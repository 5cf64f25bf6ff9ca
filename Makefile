.PHONY: install check test test-slow test-gpu bench

# On ROCm the image's own torch and Triton have to survive: that list names neither, and nothing here asks for Triton.
ROCM := $(shell python -c "import torch; print(torch.version.hip or '')" 2>/dev/null)
CONSTRAINTS := $(if $(ROCM),constraints-rocm.txt,constraints.txt)
ifeq ($(ROCM),)
EXTRAS := demo,test,interpreter
else
EXTRAS := demo,test
endif

install: ## into the active environment
	python -m pip install -c $(CONSTRAINTS) -e '.[$(EXTRAS)]'

check:
	ruff format --check .
	ruff check .
	mypy
	python -m serve_app.check_config serve_config.yaml configs/serve/*.yaml

# A process per core; Ray's tests share one cluster, so they share one process too.
test:
	OMP_NUM_THREADS=1 python -m pytest -m 'not gpu and not slow' -n auto --dist worksteal --ignore=tests/ray
	python -m pytest -m 'not gpu and not slow' tests/ray

test-slow:
	python -m pytest -m slow

test-gpu:
	python -m pytest -m gpu tests/gpu

bench:
	python benchmarks/bench_encoder.py --model qwen3-vl
	python benchmarks/bench_encoder.py --model dinov2
	python benchmarks/bench_graphs.py
	python benchmarks/bench_traffic.py
	python benchmarks/bench_kernels.py
	python benchmarks/bench_serve.py
