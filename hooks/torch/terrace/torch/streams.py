"""The streams that PyTorch works on, as raw CUstreams; none where tensors are the host's."""

import torch


class CudaStreams:
    _seen = {}  # by device and raw stream

    @classmethod
    def current(cls, device):
        stream = torch.cuda.current_stream(device)
        raw = stream.cuda_stream
        cls._seen[(device, raw)] = stream
        return raw

    @classmethod
    def tie(cls, alias, device, stream):
        """The stream uses this memory: PyTorch's allocator waits for it before the memory serves others. Nothing where the
        memory is the stream's own."""
        alias.record_stream(cls._seen[(device, stream)])

    @staticmethod
    def mark(device):
        """All that the current stream has been given until now."""
        return torch.cuda.current_stream(device).record_event()

    @staticmethod
    def wait_for(device, mark):
        torch.cuda.current_stream(device).wait_event(mark)

    @classmethod
    def follow(cls, device, first):
        """The current stream waits for all that `first` has been given until now."""
        torch.cuda.current_stream(device).wait_stream(cls._seen[(device, first)])

    @staticmethod
    def is_capturing():
        return torch.cuda.is_current_stream_capturing()

    @staticmethod
    def finish(device):
        torch.cuda.synchronize(device)

    @staticmethod
    def give_back():
        """What PyTorch's allocator keeps and does not use goes back to the driver."""
        torch.cuda.empty_cache()


class HostStreams:
    @staticmethod
    def current(device):
        return None

    @staticmethod
    def tie(alias, device, stream):
        pass

    @staticmethod
    def mark(device):
        """None: what the host has asked for is done."""
        return None

    @staticmethod
    def wait_for(device, mark):
        pass

    @staticmethod
    def follow(device, first):
        pass

    @staticmethod
    def is_capturing():
        return False

    @staticmethod
    def finish(device):
        pass

    @staticmethod
    def give_back():
        pass
