"""A pretend CUDA device for a torch without CUDA, to rehearse on.

Its tensors are on `cuda:0` for torch and for everybody who asks, and are computed on the CPU.
What a GPU refuses is refused: tensors of two devices in one kernel, a generator of the CPU, a
kernel that only CPUs have, collectives on CPU tensors. What a GPU does not do for you is not done:
`torch.empty` is full of NaN. Kernels, bytes and waits of the host are counted, with the line of
code that caused them. It says nothing about speed, rounding, streams, graphs or generated kernels.

`library` compiles and loads it, `cuda` makes torch believe in it, `nccl` joins several processes.
"""
