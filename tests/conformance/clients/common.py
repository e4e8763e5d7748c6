"""What the clients share: arguments, the barrier between their steps, tensors and the comparison of bytes.

How a client uses the transfer API is in its own file.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

HOST_IP = "127.0.0.1"
_DEADLINE_S = 60


class Client:
    """One process of a client program: ``roles`` in the order of their ranks, the first argument says which it is."""

    def __init__(self, roles: Sequence[str], *flags: str) -> None:
        parser = argparse.ArgumentParser()
        parser.add_argument("role", choices=roles)
        parser.add_argument("--rendezvous", required=True, help="a file that the processes meet at; must be new")
        parser.add_argument("--ports", required=True, type=int, nargs="+", help="free ports, the same in every process")
        for flag in flags:
            parser.add_argument(f"--{flag}")
        self.args = parser.parse_args()
        self.role: str = self.args.role
        self.rank = roles.index(self.role)
        self.ports: list[int] = self.args.ports
        self._store = dist.FileStore(self.args.rendezvous, len(roles))
        self._store.set_timeout(timedelta(seconds=_DEADLINE_S))
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore("gloo", self._store),
            rank=self.rank,
            world_size=len(roles),
            timeout=timedelta(seconds=_DEADLINE_S),
        )

    def barrier(self) -> None:
        """Until every process is here."""
        dist.barrier()

    def tell(self, event: str) -> None:
        """Lets :meth:`wait_for` of this event go on, in every process."""
        self._store.set(event, "1")

    def wait_for(self, event: str) -> None:
        self._store.wait([event])

    def end(self) -> None:
        self.barrier()
        dist.destroy_process_group()
        print(f"{self.role}: everything is as expected", flush=True)


def poll(question: Callable[[], Any], answers: Sequence[Any]) -> Any:
    """Asks again and again, as clients do with a second between, until the answer is one of these."""
    deadline = time.monotonic() + _DEADLINE_S
    while (answer := question()) not in answers:
        require(time.monotonic() < deadline, f"still {answer} after {_DEADLINE_S} s, and not one of {answers}")
        time.sleep(0.02)
    return answer


def require(condition: Any, text: str) -> None:
    if not condition:
        sys.exit(f"WRONG: {text}")


def random_tensor(shape: Sequence[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random bytes, the same for the same seed and size in every process."""
    size_bytes = math.prod(shape) * dtype.itemsize
    values = torch.randint(0, 256, (size_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return values.view(dtype).view(tuple(shape))


def tensors_at(addresses: Sequence[int], shape: Sequence[int], dtype: torch.dtype) -> list[torch.Tensor]:
    """Tensors on memory of the library, which must outlive them."""
    size_bytes = math.prod(shape) * dtype.itemsize
    buffers = [(ctypes.c_uint8 * size_bytes).from_address(address) for address in addresses]
    return [torch.frombuffer(buffer, dtype=dtype).view(tuple(shape)) for buffer in buffers]


def check_bytes(what: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Ends this process unless both hold the same bytes."""
    require(actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}")
    got, want = (tensor.contiguous().view(torch.uint8).flatten() for tensor in (actual, expected))
    wrong = (got != want).nonzero().flatten()
    require(
        not len(wrong),
        f"{what}: {len(wrong)} of {len(want)} bytes differ, from {wrong[0] if len(wrong) else 0} "
        f"to {wrong[-1] if len(wrong) else 0}",
    )


def rank_table(ports: Sequence[int], version: str = "1.0") -> str:
    """Rank i is device i of this host; its device listens on ``ports[i]``."""
    devices = [
        {"device_id": str(rank), "device_ip": HOST_IP, "device_port": str(port), "rank_id": str(rank)}
        for rank, port in enumerate(ports)
    ]
    servers = [{"server_id": HOST_IP, "device": devices}]
    return json.dumps({"version": version, "server_count": "1", "status": "completed", "server_list": servers})
