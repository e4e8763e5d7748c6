"""Ray's decorators without its type hints, which do not know concurrency groups."""

from __future__ import annotations

from typing import Any

import ray

actor: Any = ray.remote
method: Any = ray.method
