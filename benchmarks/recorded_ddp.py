"""CPU time of a recorded training step of DistributedDataParallel, against the eager one.

    python -m torch.distributed.run --standalone --nproc-per-node 2 -m benchmarks.recorded_ddp

Both steps run alternately in the same processes, on gloo with one thread each; CPU time is summed over the threads of
both processes. The losses must be bitwise equal.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

import transformer_kernels as tk

WARM_UP = 11  # DistributedDataParallel rebuilds its buckets and measures its own times in the first ten steps


class Loss(nn.Module):
    """The loss as a forward, which DistributedDataParallel calls."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model.loss(tokens[:, :-1], tokens[:, 1:])  # type: ignore[operator]


def make_step(options: argparse.Namespace) -> tuple[Callable[[Tensor], Tensor], torch.optim.Optimizer]:
    """A step of a char_gpt with the seed's weights, and its optimizer."""
    torch.manual_seed(0)
    sizes = {"layers": options.layers, "width": options.width, "heads": options.heads, "context": options.context}
    model = tk.build("char_gpt", backend="cpu", dropout=0.0, **sizes)
    loss_of = nn.parallel.DistributedDataParallel(Loss(model), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step(tokens: Tensor) -> Tensor:
        loss = loss_of(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, optimizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in {"layers": 4, "width": 128, "heads": 4, "context": 64, "batch": 64, "steps": 20}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    warnings.simplefilter("ignore", FutureWarning)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    eager, _ = make_step(options)
    step, optimizer = make_step(options)
    recorded = tk.graphed(step, optimizer, warm_up_calls=WARM_UP)
    generator = torch.Generator().manual_seed(dist.get_rank())
    times: dict[str, list[float]] = {"eager": [], "recorded": []}
    for number in range(WARM_UP + 2 + options.steps):
        tokens = torch.randint(65, (options.batch, options.context + 1), generator=generator)
        losses = []
        for name, called in (("eager", eager), ("recorded", recorded)):
            dist.barrier()
            begun = time.process_time()
            losses.append(called(tokens))
            seconds = torch.tensor(time.process_time() - begun, dtype=torch.float64)
            dist.all_reduce(seconds)
            if number >= WARM_UP + 2:
                times[name].append(seconds.item())
        if not torch.equal(*losses):
            raise RuntimeError(f"step {number}: the recorded loss is {losses[1].item()}, not {losses[0].item()}")
    if dist.get_rank() == 0:
        medians = {name: statistics.median(values) for name, values in times.items()}
        ratio = medians["eager"] / medians["recorded"]
        print(
            f"eager {1e3 * medians['eager']:.2f} ms, recorded {1e3 * medians['recorded']:.2f} ms of CPU: {ratio:.2f}x"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
