"""`python -m benchmarks gpu`: all measurements that need a GPU, in at most eight minutes.

Each measurement runs in its own process (`python -m benchmarks.gpu NAME`), so that one that fails
or hangs does not affect the others. `--cpu` is a dry run with tiny sizes, which tests the program.

It needs torch, numpy and safetensors. On a machine with a GPU but without a network, the last comes
from the wheels that `make setup` fetched, copied there with the repository:

python -m pip install --no-index --no-deps --find-links .venv/wheels safetensors
"""
