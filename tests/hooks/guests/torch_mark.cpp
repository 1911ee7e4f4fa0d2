// libc10_cuda.so as far as a process can be seen to have PyTorch loaded: its name.
extern "C" __attribute__((visibility("default"))) int loopback_torch() { return 1; }
