"""Python runs this when it starts, since `terrace run` put its folder first in PYTHONPATH.

It makes `import torch` bring Terrace along, then runs the sitecustomize that it stands in front of, if there is one.
A process that never imports torch gets a finder that is asked for names and says no.
"""

import importlib.machinery
import importlib.util
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))


class _Loader:
    """Torch's own loader, with Terrace behind it."""

    def __init__(self, real):
        self._real = real

    def __getattr__(self, name):
        return getattr(self._real, name)

    def create_module(self, spec):
        return self._real.create_module(spec)

    def exec_module(self, module):
        module.__loader__ = module.__spec__.loader = self._real
        self._real.exec_module(module)
        try:
            import terrace.torch  # noqa: F401
        except Exception as error:  # a guest never breaks what it visits
            print(f"terrace: torch: not loaded: {type(error).__name__}: {error}", file=sys.stderr)


class _Finder:
    """Says where torch is, as the finders behind it do, with another loader."""

    def __init__(self):
        self._asking = False

    def find_spec(self, name, path=None, target=None):
        if name != "torch" or self._asking:
            return None
        self._asking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._asking = False
        if spec is not None and spec.loader is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = _Loader(spec.loader)
        return spec


def _run_the_one_behind():
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or os.curdir) != HERE]
sys.path.append(os.path.dirname(HERE))  # last, so that it shadows nothing: for `import terrace.torch`
sys.meta_path.insert(0, _Finder())
_run_the_one_behind()
