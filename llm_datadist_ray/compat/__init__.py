"""Runs programs written for upstream's package: ``import llm_datadist`` gives this one's objects (spec api-types §1).

In a program: ``llm_datadist_ray.compat.install()`` before the first ``import llm_datadist``. Around a program that
shall stay as it is: ``python -m llm_datadist_ray.compat SCRIPT ARGS...``. Both concern this process only: one that is
spawned and imports ``llm_datadist`` again, and a Ray worker, must install for itself.
"""

from __future__ import annotations

from llm_datadist_ray.compat.finder import install

__all__ = ["install"]
