"""The streams that PyTorch works on, as raw CUstreams; none where tensors are the host's."""

import torch


class CudaStreams:
    @staticmethod
    def current(device):
        return torch.cuda.current_stream(device).cuda_stream

    @staticmethod
    def tie(alias, device):
        """The current stream uses this memory: PyTorch's allocator waits for it before the memory serves others."""
        alias.record_stream(torch.cuda.current_stream(device))

    @staticmethod
    def is_capturing():
        return torch.cuda.is_current_stream_capturing()

    @staticmethod
    def finish():
        torch.cuda.synchronize()

    @staticmethod
    def give_back():
        """What PyTorch's allocator keeps and does not use goes back to the driver."""
        torch.cuda.empty_cache()


class HostStreams:
    @staticmethod
    def current(device):
        return None

    @staticmethod
    def tie(alias, device):
        pass

    @staticmethod
    def is_capturing():
        return False

    @staticmethod
    def finish():
        pass

    @staticmethod
    def give_back():
        pass
