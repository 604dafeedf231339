"""Random joins, leaves, interrupts, resets and capacities; every request must give what it gives alone.

python tests/batch_soak.py [--device cuda] [--steps 10000]
"""

import argparse
import random
import sys
import tempfile
from pathlib import Path

from batch_jobs import add, load, run

import realizar_torch as rt
from realizar_torch.generation import batch_rows

CAPACITIES = ((1, 64), (4, 128), (8, 96))
REQUESTS = 16
LONGEST = 30


def break_off_reads(chance):
    """From now on a read of a step's tokens fails, at random; gives what undoes it."""
    originals = {kind: kind.read for kind in (batch_rows.HostRows, batch_rows.GraphRows)}
    for kind, read in originals.items():

        def broken(self, read=read):
            if chance():
                raise KeyboardInterrupt
            return read(self)

        kind.read = broken

    def undo():
        for kind, read in originals.items():
            kind.read = read

    return undo


class Soak:
    """A batch that is used at random; ``compared`` counts the completions that were checked."""

    def __init__(self, model, device, seed):
        self.model, self.device, self.random = model, device, random.Random(seed)
        self.known, self.compared, self.interrupts, self.resets = {}, 0, 0, 0
        self.restart()

    def restart(self):
        """Another batch, of any of the capacities."""
        self.capacity = self.random.choice(CAPACITIES)
        self.batch = rt.BatchedGenerator(self.model, max_batch=self.capacity[0], max_seq_len=self.capacity[1])
        self.numbers, self.cancelled = {}, set()

    def expected(self, number):
        """Tokens of a request that has the rows for itself."""
        if (number, self.capacity) not in self.known:
            found = run(self.model, [number], self.device, *self.capacity, longest=LONGEST)
            self.known[number, self.capacity] = found[number]
        return self.known[number, self.capacity]

    def check(self):
        for done in self.batch.collect():
            number = self.numbers.pop(done.id)
            tokens, reason = self.expected(number)
            if done.id in self.cancelled:
                assert done.reason == "cancelled" and done.token_ids == tokens[: len(done.token_ids)]
            else:
                assert (done.token_ids, done.reason) == (tokens, reason), (number, self.capacity, done)
            self.compared += 1

    def run(self, steps):
        undo = break_off_reads(lambda: self.random.random() < 0.02)
        try:
            for _ in range(steps):
                self.step()
        finally:
            undo()
        while self.batch.step():
            pass
        self.check()
        assert not self.numbers

    def step(self):
        chance = self.random.random()
        if chance < 0.001:
            self.restart()
        elif chance < 0.003:
            self.batch.reset()
            self.numbers, self.resets = {}, self.resets + 1
        elif chance < 0.02 and self.numbers:
            number = self.random.choice(list(self.numbers))
            if self.batch.cancel(number):
                self.cancelled.add(number)
        while self.batch.pending < 2 * self.capacity[0] and self.random.random() < 0.4:
            number = self.random.randrange(REQUESTS)
            self.numbers[add(self.batch, number, self.device, LONGEST)] = number
        try:
            self.batch.step()
        except KeyboardInterrupt:
            self.interrupts += 1
        self.check()


def soak(model, device, steps, seed=1):
    """Runs ``steps`` steps; every difference is an AssertionError."""
    test = Soak(model, device, seed)
    for test.capacity in CAPACITIES:
        for number in range(REQUESTS):
            test.expected(number)
    test.restart()
    test.run(steps)
    return test


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=10_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        test = soak(load(Path(folder), options.device), options.device, options.steps)
    print(f"{test.compared} completions right, {test.interrupts} interrupts, {test.resets} resets")


if __name__ == "__main__":
    sys.exit(main())
