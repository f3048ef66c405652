"""The benchmark suite: workloads with counted bytes and FLOPs, one harness, honest peers, recorded evidence."""
