"""Static reports of compilers on each kernel, and the record of verified kernels."""
