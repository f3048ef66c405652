"""CPU recordings, counted."""

from transformer_kernels.graphs._host import HostGraphs


class CountedHostGraphs(HostGraphs):
    def __init__(self):
        super().__init__()
        self.runs = self.captures = self.replays = 0

    def run(self, work):
        self.runs += 1
        return super().run(work)

    def capture(self, work, inputs=()):
        replay = super().capture(work, inputs)
        self.captures += 1

        def counted():
            self.replays += 1
            return replay()

        return counted
