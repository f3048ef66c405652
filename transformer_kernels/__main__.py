"""`python -m transformer_kernels` is `transformer-kernels`."""

from transformer_kernels.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
