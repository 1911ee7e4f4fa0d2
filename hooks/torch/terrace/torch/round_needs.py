"""What a round of forward and backward needs on the device beside what is saved, place by place: pure.

A place is a number of saves and uses since the round began. `need` is the most that everything else held from there to
the next place; `alive` what is saved and not yet done with, wherever it is.
"""

import bisect


class RoundNeeds:
    def __init__(self):
        self._places = []
        self._others = []
        self._needs = []
        self._alive = []
        self._in_backward = []
        self._wanted = []  # set by close()
        self._passing = []
        self.most = 0
        self.most_in_forward = 0
        self.most_passing = 0  # of need beyond what was there when the place was reached

    def add(self, place, others, need, alive, in_backward):
        if self._places and self._places[-1] == place:  # a second look at the same place
            self._others[-1], self._needs[-1] = max(self._others[-1], others), max(self._needs[-1], need)
            return
        self._places.append(place)
        self._others.append(others)
        self._needs.append(need)
        self._alive.append(alive)
        self._in_backward.append(in_backward)

    def close(self):
        """In forward what is saved stays, so the most that comes decides. In backward it goes by itself, which makes room for
        what comes later: there need and what is alive decide together."""
        turn = self._in_backward.index(True) + 1 if True in self._in_backward else len(self._places)
        alive_at_turn = max(self._alive[:turn], default=0)
        wanted, passing, behind, ahead, most = [], [], 0, 0, 0
        for index in range(len(self._places) - 1, -1, -1):
            need, alive = self._needs[index], self._alive[index]
            most = max(most, need - self._others[index])
            passing.append(most)
            if self._in_backward[index]:
                behind = max(behind, need + alive)
                wanted.append(behind)
            else:
                ahead = max(ahead, need, behind - alive_at_turn)
                wanted.append(ahead)
                self.most_in_forward = max(self.most_in_forward, need)
            self.most = max(self.most, need)
        self.most_passing = most
        self._wanted, self._passing = wanted[::-1], passing[::-1]

    def _at(self, place):
        return max(0, bisect.bisect_right(self._places, place) - 1)

    def wanted(self, place, alive):
        """Bytes that what is saved must leave free from this place on."""
        if not self._places:
            return 0
        index = self._at(place)
        return max(0, self._wanted[index] - (alive if self._in_backward[index] else 0))

    def passing(self, place):
        """Bytes that come and go from this place on, beyond what is there when they come."""
        return self._passing[self._at(place)] if self._places else 0

    def others(self, place):
        """What was there at this very place; None: nobody looked."""
        index = self._at(place)
        return self._others[index] if self._places and self._places[index] == place else None

    def passing_at(self, place):
        """What came and went between this very place and the next, at most; None: nobody looked."""
        index = self._at(place)
        return self._needs[index] - self._others[index] if self._places and self._places[index] == place else None
