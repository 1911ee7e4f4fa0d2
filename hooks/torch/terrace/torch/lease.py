"""What this process may hold on a device: its lease from the daemon, or the policy's budget where there is none."""

import time

NO_LIMIT = 1 << 62
READ_EVERY = 1e-3  # seconds: it is asked for with each tensor that is saved


class Lease:
    """It grows as the daemon grants more, and its target falls when others need room."""

    def __init__(self, stash):
        self._stash = stash
        self._limit = 0
        self._stale_at = 0.0
        self.used = 0  # as the preload library counts, at the last reading; 0: there is none
        self.asked = False  # to hold less, at the last reading
        self.switched_off = False  # `terrace off` has reached the process

    def limit(self):
        """Bytes to come down to, or that may be held."""
        moment = time.monotonic()
        if moment < self._stale_at:
            return self._limit
        self._stale_at = moment + READ_EVERY
        now = self._stash.lease()
        self.used = now.hbm_used_bytes
        self.asked = now.hbm_target_bytes < now.hbm_bytes
        self.switched_off = now.switched_off != 0
        self._limit = NO_LIMIT if self.switched_off else now.hbm_target_bytes
        return self._limit

    def give_way(self, used, needed):
        """The process holds `used` and can go on with `needed`: the rest goes to those who asked for it."""
        self._stash.give_way(used, needed)
        self._stale_at, self.asked = 0.0, False
