"""The other process of :mod:`llm_datadist_ray.cli.path_probe`: offers a cache until standard input ends.

Reads the secret, in hex, from the first line; prints where it listens as one line of JSON.
"""

from __future__ import annotations

import json
import sys

from llm_datadist_ray._native import NativeEngine
from llm_datadist_ray.cli.path_probe import LOOPBACK, SOURCE_CLUSTER_ID, make_blocks, pattern, register


def main() -> None:
    secret = bytes.fromhex(sys.stdin.readline())
    blocks = make_blocks()
    blocks[:] = pattern()
    with NativeEngine(cluster_id=SOURCE_CLUSTER_ID, remote_access=True, listen_ip=LOOPBACK, secret=secret) as engine:
        cache_id = register(engine, blocks)
        print(json.dumps({"port": engine.info().listen_port, "cache_id": cache_id}), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
