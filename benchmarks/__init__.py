"""The benchmark suite: workloads with byte and FLOP counts, one timing harness, peers, recorded results."""
