"""Any causal language model of Hugging Face transformers with plain attention, at batch 1, on a CPU or an NPU.

On an NPU (torch_npu) the model and its cache live on the device and KV blocks stay in host memory: states are copied
out of the device as they are computed, and into it when decoding starts. This has not been run on NPU hardware.

Every forward pass has the same shape whoever runs it (chunks of ``block_tokens``, then single tokens), so a process
that takes over KV from another one goes on with the very floats that it would have computed itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils import logging as transformers_logging

from . import models
from .base import GREEDY, ContextFull, EngineSpec, KvLayout, Sampling
from .models import Progress
from .paged_kv import PagedCache, PagedKv
from .request_checks import check_max_tokens, check_start, check_tokens
from .sampling import choose
from .text import TextCodec

_DTYPES = ("bfloat16", "float16", "float32", "float64")


class TransformersEngine:
    """See :class:`llm_datadist_ray.engines.base.Engine`. Sets torch's number of threads for the whole process."""

    def __init__(self, spec: EngineSpec, *, progress: Progress | None = None) -> None:
        _check(spec)
        self._device = _device(spec.device)
        folder = models.resolve(spec.model, progress=progress)
        torch.set_num_threads(spec.num_threads)
        transformers_logging.disable_progress_bar()
        self._text = TextCodec(folder.path)
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder.path, dtype=getattr(torch, spec.dtype), local_files_only=True
        )
        self._model = model.to(self._device).eval()
        # transformers 5.2x renamed the argument and warns about the old name.
        self._cache_name = "cache" if "cache" in signature(self._model.forward).parameters else "past_key_values"
        self._config = self._model.config.get_text_config()
        self._layout = self._probe_layout(folder.model_id, spec)
        self._eos_token_ids = _eos_token_ids(self._model)
        self._kv: PagedKv | None = None

    @property
    def layout(self) -> KvLayout:
        return self._layout

    @property
    def max_context_tokens(self) -> int:
        return self._config.max_position_embeddings

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self._eos_token_ids

    def attach(self, blocks: np.ndarray) -> None:
        if self._kv is not None:
            raise ValueError("KV memory is already attached to this engine")
        self._kv = PagedKv(blocks, self._layout, self._device)

    def encode(self, prompt: str, *, chat: bool) -> list[int]:
        return self._text.encode(prompt, chat=chat)

    def detokenizer(self) -> Callable[[int], str]:
        return self._text.detokenizer()

    @torch.inference_mode()
    def prefill(
        self,
        token_ids: Sequence[int],
        block_ids: Sequence[int],
        *,
        sampling: Sampling = GREEDY,
        on_layer: Callable[[int], None] | None = None,
        check: Callable[[], None] | None = None,
    ) -> int:
        self._check_tokens(token_ids)
        kv = self._attached()
        table = kv.checked_table(block_ids, len(token_ids))
        full_blocks, tail_tokens = divmod(len(token_ids), self._layout.block_tokens)
        if tail_tokens:
            kv.clear(block_ids[full_blocks])
        cache = PagedCache(self._config, kv, table)
        chunks = self._chunks(token_ids)
        for number, chunk in enumerate(chunks, 1):
            if check is not None:
                check()
            if number == len(chunks):
                # The blocks of a layer are final only when the last chunk has passed it.
                cache.on_layer = on_layer
            logits = self.forward(chunk, cache)
        return choose(logits, sampling, len(token_ids))

    @torch.inference_mode()
    def start_decode(
        self, num_tokens: int, first_token: int, block_ids: Sequence[int], *, sampling: Sampling = GREEDY
    ) -> PagedSequence:
        check_start(num_tokens, self.max_context_tokens)
        self._check_tokens([first_token])
        kv = self._attached()
        cache = PagedCache(self._config, kv, kv.checked_table(block_ids, num_tokens))
        cache.load(num_tokens)
        capacity = min(len(block_ids) * self._layout.block_tokens, self.max_context_tokens)
        return PagedSequence(self.forward, cache, sampling, num_tokens, first_token, capacity)

    @torch.inference_mode()
    def generate_alone(self, token_ids: Sequence[int], max_tokens: int, *, sampling: Sampling = GREEDY) -> list[int]:
        """Ends early, without an error, when the model's context is full."""
        self._check_tokens(token_ids)
        check_max_tokens(max_tokens)
        cache = DynamicCache(config=self._config)
        for chunk in self._chunks(token_ids):
            logits = self.forward(chunk, cache)
        generated = [choose(logits, sampling, len(token_ids))]
        room = self.max_context_tokens - len(token_ids) + 1
        while len(generated) < min(max_tokens, room) and generated[-1] not in self._eos_token_ids:
            logits = self.forward(generated[-1:], cache)
            generated.append(choose(logits, sampling, len(token_ids) + len(generated)))
        return generated

    def forward(self, token_ids: Sequence[int], cache: DynamicCache) -> torch.Tensor:
        """One forward pass over the next tokens of a sequence; returns the ``logits[vocab_size]`` behind them."""
        input_ids = torch.tensor([list(token_ids)], device=self._device)
        output = self._model(input_ids=input_ids, use_cache=True, logits_to_keep=1, **{self._cache_name: cache})
        return output.logits[0, -1]

    def _chunks(self, token_ids: Sequence[int]) -> list[Sequence[int]]:
        size = self._layout.block_tokens
        return [token_ids[start : start + size] for start in range(0, len(token_ids), size)]

    def _attached(self) -> PagedKv:
        if self._kv is None:
            raise ValueError("no KV memory: call attach() before prefill() or start_decode()")
        return self._kv

    def _check_tokens(self, token_ids: Sequence[int]) -> None:
        check_tokens(token_ids, self._config.vocab_size, self.max_context_tokens)

    @torch.inference_mode()
    def _probe_layout(self, model_id: str, spec: EngineSpec) -> KvLayout:
        """Asks the model itself, with one token: what a config says about KV heads differs between families."""
        kinds = set(getattr(self._config, "layer_types", None) or ["full_attention"])
        if kinds != {"full_attention"} or getattr(self._config, "sliding_window", None):
            raise ValueError(f"model {spec.model!r} does not have plain full attention in every layer")
        cache = DynamicCache(config=self._config)
        self.forward([0], cache)
        states = [getattr(layer, part, None) for layer in cache.layers for part in ("keys", "values")]
        shapes = {() if tensor is None else tuple(tensor.shape) for tensor in states}
        if len(shapes) != 1 or () in shapes:
            raise ValueError(f"model {spec.model!r} must have K and V of one shape in every layer, not {shapes}")
        _, num_kv_heads, _, head_dim = shapes.pop()
        itemsize = getattr(torch, spec.dtype).itemsize
        return KvLayout(model_id, len(cache.layers), num_kv_heads, head_dim, spec.dtype, spec.block_tokens, itemsize)


class PagedSequence:
    """See :class:`llm_datadist_ray.engines.base.DecodeSequence`."""

    def __init__(
        self,
        forward: Callable[[Sequence[int], DynamicCache], torch.Tensor],
        cache: PagedCache,
        sampling: Sampling,
        num_tokens: int,
        last_token: int,
        capacity_tokens: int,
    ) -> None:
        self._forward = forward
        self._cache = cache
        self._sampling = sampling
        self._num_tokens = num_tokens
        self._last_token = last_token
        self._capacity_tokens = capacity_tokens

    @torch.inference_mode()
    def step(self) -> int:
        if self._num_tokens >= self._capacity_tokens:
            raise ContextFull(f"no room behind {self._num_tokens} tokens: blocks and context hold no more")
        logits = self._forward([self._last_token], self._cache)
        self._num_tokens += 1
        self._last_token = choose(logits, self._sampling, self._num_tokens)
        return self._last_token


def _check(spec: EngineSpec) -> None:
    if spec.dtype not in _DTYPES:
        raise ValueError(f"unknown dtype {spec.dtype!r}{models.nearest(spec.dtype, _DTYPES)}")
    if spec.block_tokens < 1 or spec.num_threads < 1:
        raise ValueError(f"block_tokens ({spec.block_tokens}) and num_threads ({spec.num_threads}) must be at least 1")


def _device(name: str) -> torch.device:
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "npu") or (kind == "cpu" and index) or (index and not index.isdecimal()):
        raise ValueError(f"unknown device {name!r}; known: cpu, npu, npu:N")
    if kind == "npu":
        try:
            import torch_npu  # noqa: F401  # teaches torch the device
        except ModuleNotFoundError as exc:
            raise ImportError(
                f"device {name!r} needs the Python package torch_npu; install llm-datadist-ray[npu] on a host "
                "with CANN, or use device 'cpu'",
                name="torch_npu",
            ) from exc
    return torch.device(name)


def _eos_token_ids(model: torch.nn.Module) -> frozenset[int]:
    """Of the generation config where the model has one (it may name several), else of the config."""
    for config in (getattr(model, "generation_config", None), model.config):
        eos = getattr(config, "eos_token_id", None)
        if eos is not None:
            return frozenset([eos] if isinstance(eos, int) else eos)
    return frozenset()
