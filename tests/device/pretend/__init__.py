"""A pretend CUDA device for a torch without CUDA, to rehearse on.

Its tensors are on `cuda:0` for torch and for everybody who asks, and are computed on the CPU.
What a GPU refuses is refused: tensors of two devices in one kernel, a generator of the CPU, a
kernel that only CPUs have, a wait while a CUDA graph is captured, collectives on CPU tensors.
What a GPU does not do for you is not done: `torch.empty` is full of NaN. Kernels, bytes and waits
of the host are counted, with the line of code that caused them. CUDA graphs are recorded and
replayed on the addresses that they saw.

It says nothing about speed, rounding or races between streams.

`library` compiles and loads it, `cuda` makes torch believe in it, `streams` has streams, events and
graphs, `flex` refuses what inductor does, `flash` is the attention kernel that CPUs lack, `nccl`
joins several processes, and `triton` compiles kernels for a GPU that is not there.
"""
