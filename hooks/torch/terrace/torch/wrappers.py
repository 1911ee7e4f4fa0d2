"""Functions of PyTorch and Python that the plugin stands in front of, each put back by undo()."""

import functools
import inspect
import threading

import torch

OTHER_ALLOCATOR = ("terrace: `--allocator terrace` selects PyTorch's cudaMallocAsync backend, which has no such thing; "
                   "`terrace run --allocator native` leaves PyTorch its own")


class Wrappers:
    def __init__(self):
        self._undo = []

    def undo(self):
        for put_back in reversed(self._undo):
            put_back()
        self._undo.clear()

    def _replace(self, owner, name, make):
        """`make` takes the original and gives what stands in its place. Nothing where there is no such name."""
        original = getattr(owner, name, None)
        if original is None:
            return
        inherited = isinstance(owner, type) and name not in vars(owner)
        setattr(owner, name, make(original))
        self._undo.append(lambda: delattr(owner, name) if inherited else setattr(owner, name, original))

    def threads_begin_and_end_with(self, begin, end):
        """Default hooks belong to a thread: those that start from here on get them too. They go before it ends: what a
        thread holds of Python's it lets go after join() has returned, and where the process ends meanwhile that is
        fatal."""

        def make(original):
            def bootstrap(thread):
                begin()
                try:
                    original(thread)
                finally:
                    end()

            return bootstrap

        self._replace(threading.Thread, "_bootstrap_inner", make)

    def transforms_without(self, saved):
        """torch.func refuses to work under hooks: ours are away while it does."""

        def make(original):
            class Away:
                def __init__(self, message):
                    self._context = original(message)

                def __enter__(self):
                    self._ours = saved.remove()
                    try:
                        return self._context.__enter__()
                    except BaseException:
                        self._put_back()
                        raise

                def __exit__(self, *error):
                    left = self._context.__exit__(*error)
                    self._put_back()
                    return left

                def _put_back(self):
                    if self._ours:
                        saved.install()

            return Away

        self._replace(torch.autograd.graph, "disable_saved_tensors_hooks", make)

    def _call_first(self, owner, name, call, where=lambda args: True):
        def make(original):
            @functools.wraps(original)
            def wrapper(*args, **kwargs):
                if where(args):
                    call()
                return original(*args, **kwargs)

            return wrapper

        self._replace(owner, name, make)

    def before_weights_are_read_elsewhere(self, end):
        """By compiled and traced code, replicas and collectives: no module is asked for them there. `end` takes why."""
        for owner, name, why in ((torch, "compile", "compiled"), (torch.nn.DataParallel, "__init__", "replicated"),
                                 (torch.distributed, "init_process_group", "distributed")):
            self._call_first(owner, name, lambda why=why: end(why))
        for name in ("trace", "script"):  # functions are scripted when libraries are imported
            self._call_first(torch.jit, name, lambda: end("compiled"),
                             where=lambda args: bool(args) and isinstance(args[0], torch.nn.Module))

    def before_capture(self, call):
        """A captured graph reads and writes memory where it was."""
        graph = getattr(torch.cuda, "CUDAGraph", None)
        if isinstance(graph, type):
            self._call_first(graph, "capture_begin", call)

    def before_pools(self, call):
        """Of the program's own."""
        if isinstance(getattr(torch.cuda, "MemPool", None), type):
            self._call_first(torch.cuda.MemPool, "__init__", call)

    def before_memory_is_shared(self, call):
        """With other processes."""
        self._call_first(torch.UntypedStorage, "_share_cuda_", call)

    def name_the_other_allocator(self):
        """What PyTorch's cudaMallocAsync backend refuses, the other mode of `terrace run` lets through: its error says so."""

        def make(original):
            @functools.wraps(original)
            def wrapper(*args, **kwargs):
                try:
                    return original(*args, **kwargs)
                except RuntimeError as error:
                    if "cudaMallocAsync" in str(error) and OTHER_ALLOCATOR not in str(error):
                        error.args = (f"{error}\n{OTHER_ALLOCATOR}",)
                    raise

            return wrapper

        memory = torch.cuda.memory
        for owner, name in ((torch.UntypedStorage, "_share_cuda_"), (getattr(torch.cuda, "MemPool", None), "__init__"),
                            (memory, "use_mem_pool"), (memory, "_record_memory_history"), (memory, "memory_snapshot"), (torch.cuda, "memory_snapshot"),
                            (torch.cuda, "use_mem_pool"),
                            (memory, "_snapshot"), (torch._C, "_cuda_checkPoolLiveAllocations")):
            if owner is not None:
                self._replace(owner, name, make)

    def after_apply(self, call):
        """Module._apply: what `model.cuda()` and `model.half()` come to, for each module."""

        def make(original):
            def _apply(module, *args, **kwargs):
                result = original(module, *args, **kwargs)
                call(module)
                return result

            return _apply

        self._replace(torch.nn.Module, "_apply", make)

    def zeroing_without(self, drop):
        """zero_grad(set_to_none=True) of optimizers and modules asks each gradient whether it is there."""

        def make(original):
            default = inspect.signature(original).parameters["set_to_none"].default

            def zero_grad(owner, set_to_none=default):
                if set_to_none:
                    drop(owner.parameters() if isinstance(owner, torch.nn.Module)
                         else [p for group in owner.param_groups for p in group["params"]])
                return original(owner, set_to_none)

            zero_grad.__doc__ = original.__doc__
            return zero_grad

        for owner in (torch.optim.Optimizer, torch.nn.Module):
            self._replace(owner, "zero_grad", make)
