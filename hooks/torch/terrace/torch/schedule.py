"""What a round of forward and backward saves and when backward reads it: learned from one, expected of the next.

Pure: no device, no clock, no lock. A round begins with the first tensor saved while nothing is, and ends when the
graph has let go of all. Saves are numbered in their order.
"""

KNOWN_ROUNDS = 8  # training, evaluation and other shapes may take turns
_FAR = 1 << 60


class Round:
    """One that went to its end: bytes by save, and the saves in the order of their first use. `needs`: what it needed beside
    them, by place."""

    def __init__(self, sizes, uses, needs=None):
        self.sizes = tuple(sizes)
        self.uses = tuple(uses)
        self.needs = needs
        self.bytes = sum(self.sizes)
        self._at_work = {}
        self.turn = {save: turn for turn, save in enumerate(uses)}

    def most_at_work(self, count):
        """Bytes of so many saves used in a row, at most."""
        most = self._at_work.get(count)
        if most is None:
            sizes = [self.sizes[save] for save in self.uses]
            most = max((sum(sizes[i : i + count]) for i in range(len(sizes))), default=0)
            self._at_work[count] = most
        return most


def choose_victims(round_, budget):
    """The saves that leave HBM so that the others fit: those used last, since they have longest to travel."""
    excess = sum(round_.sizes) - budget
    victims = set()
    for save in sorted(range(len(round_.sizes)), key=lambda save: round_.turn.get(save, _FAR), reverse=True):
        if excess <= 0:
            break
        victims.add(save)
        excess -= round_.sizes[save]
    return victims


class Schedule:
    """Follows the round that runs. Until one is known, what was saved last is expected first."""

    def __init__(self):
        self.known = []  # the newest first
        self.changes = 0  # rounds that went another way than any known one
        self._begin()

    def _begin(self):
        self.sizes = []
        self.uses = []
        self._used = set()
        self.expected = self.known[0] if self.known else None
        self._changed = False

    def save(self, nbytes):
        """A tensor was saved. Returns its number."""
        self.sizes.append(nbytes)
        number = len(self.sizes) - 1
        if self.expected is not None and not self._fits(self.expected, number):
            prefix = tuple(self.sizes)
            self.expected = next((r for r in self.known if r.sizes[: number + 1] == prefix), None)
            if self.expected is None and not self._changed:
                self._changed = True
                self.changes += 1
        return number

    def _fits(self, round_, number):
        return number < len(round_.sizes) and round_.sizes[number] == self.sizes[number]

    def use(self, number):
        """Backward reads a save."""
        if number not in self._used:
            self._used.add(number)
            self.uses.append(number)

    @property
    def place_now(self):
        """Saves and uses so far."""
        return len(self.sizes) + len(self.uses)

    def most_at_work(self, count):
        """Of the last round with backward; None: there was none."""
        return self.known[0].most_at_work(count) if self.known else None

    @property
    def last_bytes(self):
        """Saved in the last round with backward; 0: there was none."""
        return self.known[0].bytes if self.known else 0

    @property
    def in_backward(self):
        return bool(self.uses)

    def was_used(self, number):
        return number in self._used

    def distance(self, number):
        """How far off its first use is: larger is later. Comparable within a round that goes as expected."""
        if self.expected is not None:
            return self.expected.turn.get(number, _FAR)
        return -number

    def order(self):
        """Saves in the order in which backward is expected to read them."""
        return self.expected.uses if self.expected is not None else range(len(self.sizes) - 1, -1, -1)

    def place(self, number):
        """Where a save stands in order(); its end where it does not."""
        if self.expected is not None:
            return self.expected.turn.get(number, len(self.expected.uses))
        return len(self.sizes) - 1 - number

    def end(self, needs=None):
        """The graph has let go of all. One without backward teaches nothing."""
        if self.uses:
            done = Round(self.sizes, self.uses, needs)
            self.known = [r for r in self.known if r.sizes != done.sizes]
            self.known = [done] + self.known[: KNOWN_ROUNDS - 1]
        self._begin()
