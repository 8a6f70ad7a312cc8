"""Data sheets of GPUs by name, as their makers state them; no number is measured here."""

from typing import NamedTuple

MACHINE = 8  # GPUs that share a machine


class Device(NamedTuple):
    """The rates of one GPU and of its links to others."""

    flops: float  # dense bfloat16, floating-point operations per second
    bandwidth: float  # bytes per second of its own memory
    memory: float  # bytes
    link: float  # bytes per second in each direction, to the others of a machine
    network: float  # bytes per second in each direction, through all cards of a machine

    def ring(self, processes: int) -> float:
        """Return the bytes per second that every process sends in a ring, as fast as its slowest
        link.

        NCCL lays a ring through every card of a machine, so they share what leaves it.
        """
        return self.link if processes <= MACHINE else min(self.link, self.network)


# Data sheets on nvidia.com ("H100", "H200", "A100", "L40S", "HGX B200"), without sparsity; of the
# H20, which has none, the HGX H20 brief that its sellers quote. Cards: DGX H100, H200 and B200
# have eight of 400 Gb/s, DGX A100 eight of 200 Gb/s; of the L40S one of 400 Gb/s is assumed, and
# its link is PCIe 4.0 x16.
DEVICES = {
    "h100": Device(989e12, 3.35e12, 80e9, 450e9, 400e9),  # SXM5
    "h200": Device(989e12, 4.8e12, 141e9, 450e9, 400e9),
    "b200": Device(2250e12, 8.0e12, 180e9, 900e9, 400e9),
    "a100": Device(312e12, 2.039e12, 80e9, 300e9, 200e9),  # SXM4, 80 GB
    "a100-40gb": Device(312e12, 1.555e12, 40e9, 300e9, 200e9),
    "l40s": Device(362e12, 0.864e12, 48e9, 32e9, 50e9),
    "h20": Device(148e12, 4.0e12, 96e9, 450e9, 400e9),
}
