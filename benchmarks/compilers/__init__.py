"""What compilers, sanitizers and GPUs said of each kernel, and what is installed here."""
