"""A thread that looks now and then whether what PyTorch keeps and does not use lies in DDR.

Where a program's own hooks take what autograd saves, nobody asks the plugin within a pass, and whatever is allocated from
memory in DDR that is free again is a hundred times as slow.
"""

import threading


class OverflowWatch:
    INTERVAL = 0.1  # seconds

    def __init__(self, relieve):
        self._relieve = relieve  # called on the thread
        self._ended = threading.Event()
        self._thread = None

    def begin(self):
        """Once; nothing after end()."""
        if self._thread is None and not self._ended.is_set():
            self._thread = threading.Thread(target=self._run, name="terrace overflow", daemon=True)
            self._thread.start()

    def end(self):
        """For good: the thread looks no more when this returns."""
        self._ended.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self):
        while not self._ended.wait(self.INTERVAL):
            try:
                self._relieve()
            except (RuntimeError, OSError):
                return  # the device says no: whoever works on it hears of it himself
