"""Where PyTorch 1.13 and 2.x differ, as one set of functions."""

import torch

if hasattr(torch.Tensor, "untyped_storage"):

    def storage_of(tensor):
        return tensor.untyped_storage()

    def new_storage(nbytes, device):
        return torch.UntypedStorage(nbytes, device=device)

else:

    def storage_of(tensor):
        return tensor.storage().untyped()

    def new_storage(nbytes, device):
        return storage_of(torch.empty(nbytes, dtype=torch.uint8, device=device))


# PyTorch's own, whatever else a class of tensors shows under these names.
data_of = torch.Tensor.data.__get__
set_data = torch.Tensor.data.__set__
gradient_of = torch.Tensor.grad.__get__
set_gradient = torch.Tensor.grad.__set__
delete_gradient = torch.Tensor.grad.__delete__


def expired(weak):
    return torch.UntypedStorage._expired(weak)


def revive(weak):
    """The storage behind a weak reference, or None where nobody holds it any more."""
    if expired(weak):
        return None
    return torch.UntypedStorage._new_with_weak_ptr(weak)


def forget(weak):
    torch.UntypedStorage._free_weak_ref(weak)


def view_of(storage, like, geometry):
    """A tensor over the storage with the dtype and device of `like`, at (size, stride, offset)."""
    size, stride, offset = geometry
    base = torch.empty(0, dtype=torch.uint8, device=like.device).set_(storage)
    width = like.element_size()
    usable = base[: storage.nbytes() // width * width]
    return usable.view(like.dtype).as_strided(size, stride, offset)


def push_default_hooks(pack, unpack):
    torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


def pop_default_hooks():
    torch._C._autograd._pop_saved_tensors_default_hooks()


TELLS_TOP_HOOKS = hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks")  # from PyTorch 2.1 on


def top_default_hooks():
    """(pack, unpack) that a tensor saved now would meet; None: there are none, or nobody tells."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) if TELLS_TOP_HOOKS else None
