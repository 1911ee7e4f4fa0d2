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
        # At the last reading, as the preload library counts:
        self.used = 0  # bytes on the device; 0: there is none
        self.overflow = 0  # bytes that found no room there and lie in DDR
        self.refusals = 0
        self.asked = False  # to hold less, at the last reading
        self.switched_off = False  # `terrace off` has reached the process

    def limit(self):
        """Bytes to come down to, or that may be held."""
        if time.monotonic() >= self._stale_at:
            self.refresh()
        return self._limit

    def refresh(self):
        """What is read from here on is of this moment."""
        self._stale_at = time.monotonic() + READ_EVERY
        now = self._stash.lease()
        self.used, self.overflow, self.refusals = now.hbm_used_bytes, now.overflow_bytes, now.refusals
        self.asked = now.hbm_target_bytes < now.hbm_bytes
        self.switched_off = now.switched_off != 0
        self._limit = NO_LIMIT if self.switched_off else now.hbm_target_bytes

    def give_way(self, used, needed):
        """The process holds `used` and can go on with `needed`: the rest goes to those who asked for it."""
        self._stash.give_way(used, needed)
        self._stale_at, self.asked = 0.0, False
