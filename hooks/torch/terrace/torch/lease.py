"""What this process may hold on a device: its lease from the daemon, or the policy's budget where there is none."""

NO_LIMIT = 1 << 62


class Lease:
    """Read anew each time it matters: it grows as the daemon grants more, and its target falls when others need room."""

    def __init__(self, stash):
        self._stash = stash
        self.used = 0  # as the preload library counts, at the last reading; 0: there is none
        self.asked = False  # to hold less, at the last reading

    def limit(self):
        """Bytes to come down to, or that may be held."""
        now = self._stash.lease()
        self.used = now.hbm_used_bytes
        self.asked = now.hbm_target_bytes < now.hbm_bytes
        return NO_LIMIT if now.switched_off else now.hbm_target_bytes

    def give_way(self, used, needed):
        """The process holds `used` and can go on with `needed`: the rest goes to those who asked for it."""
        self._stash.give_way(used, needed)
