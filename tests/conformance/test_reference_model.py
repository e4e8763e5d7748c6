"""Random calls on both ends against a model of the reference rules (spec api-cachemanager §2.2 - §2.4, §5.5)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from llm_datadist_ray import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex, LLMException, LLMStatusCode
from tests.conformance import reference_side as side
from tests.conformance.conftest import PATHS
from tests.conformance.pair import End, Pair
from tests.conformance.status import KV_CACHE_NOT_EXIST, PARAM_INVALID

INVALID = 2**64 - 1
PAGE_BYTES = 4096
NUM_PAGES = 12  # six caches of two tensors
POOL = f'{{"memory_size": {NUM_PAGES * PAGE_BYTES}, "page_shift": 12}}'
OUT_OF_MEMORY = LLMStatusCode.LLM_OUT_OF_MEMORY
SUCCESS = LLMStatusCode.LLM_SUCCESS

Name = tuple[bool, int, int]  # is prefix, id, model id
# Few, so that they meet; None is a placeholder.
names = st.one_of(
    st.none(),
    st.tuples(st.just(False), st.integers(0, 2), st.integers(0, 1)),
    st.tuples(st.just(True), st.integers(0, 1), st.just(0)),
)
key_lists = st.lists(names, max_size=side.NUM_ENTRIES)
entries = st.integers(0, side.NUM_ENTRIES)  # the last one is beyond the cache
tensor_ranges = st.sampled_from([None, 0, 1])

# What is done often stands here often.
_ACTIONS = [
    *("allocate", "allocate", "allocate_blocks", "register", "register_blocks", "register_blocks"),
    *("deallocate", "remove_cache_key", "pull_by_key", "pull_by_key", "pull_by_key", "pull_by_id", "pull_by_id"),
    *("pull_unknown", "pull_blocks", "pull_blocks"),
]


@dataclass
class ModelCache:
    tag: int
    is_blocks: bool
    is_allocated: bool
    has_id: bool = True
    keys: dict[Name, int] = field(default_factory=dict)
    """The names that are bound to it, and the entry of each."""
    pulled: dict[Name, set[int]] = field(default_factory=dict)
    """Tensors that were pulled of a key by ranges."""


class ModelEnd:
    """What one end must hold."""

    def __init__(self) -> None:
        self.caches: dict[int, ModelCache] = {}
        self.next_tag = 1

    def tag(self) -> int:
        self.next_tag += 1
        return self.next_tag

    def owner(self, name: Name) -> ModelCache | None:
        return next((cache for cache in self.caches.values() if name in cache.keys), None)

    def num_used_pages(self) -> int:
        return sum(side.NUM_TENSORS for cache in self.caches.values() if cache.is_allocated)

    def forget_unheld(self) -> None:
        """An allocated contiguous cache goes with its id and its last key; a blocks cache with its id."""
        self.caches = {
            number: cache
            for number, cache in self.caches.items()
            if cache.has_id or (cache.keys and not cache.is_blocks)
        }

    def remove_key(self, name: Name) -> None:
        cache = self.owner(name)
        if cache is not None and cache.is_allocated:
            del cache.keys[name]
            self.forget_unheld()

    def consume(self, cache: ModelCache, entry: int, tensor: int | None) -> None:
        """After a pull of that entry, of one tensor or of all."""
        bound = [name for name, at in cache.keys.items() if at == entry]
        if not cache.is_allocated or not bound or bound[0][0]:
            return
        pulled = cache.pulled.setdefault(bound[0], set())
        pulled |= set(range(side.NUM_TENSORS)) if tensor is None else {tensor}
        if len(pulled) == side.NUM_TENSORS:
            self.remove_key(bound[0])


def cache_key(end: End, name: Name | None) -> CacheKey:
    if name is None:
        return CacheKey(end.cluster_id, INVALID, 0)
    is_prefix, number, model_id = name
    if is_prefix:
        return CacheKey(end.cluster_id, INVALID, model_id, number)
    return CacheKey(end.cluster_id, number, model_id)


def run(end: End, function: Any, *args: Any, **kwargs: Any) -> tuple[LLMStatusCode, Any]:
    try:
        return SUCCESS, end.process.run(function, *args, **kwargs)
    except LLMException as error:
        return error.status_code, None


class ReferenceRules(RuleBasedStateMachine):
    def __init__(self, pair: Pair) -> None:
        super().__init__()
        self.pair = pair
        self.ends = [pair.a, pair.b]
        self.models = [ModelEnd(), ModelEnd()]
        pair.init_with_pools()

    def teardown(self) -> None:
        for end in self.ends:
            end.reset()

    # One rule, so that every run mixes everything: of several ones some are switched off for a run.
    @rule(
        at=st.sampled_from([0, 1]),
        action=st.sampled_from(_ACTIONS),
        data=st.data(),
    )
    def act(self, at: int, action: str, data: st.DataObject) -> None:
        getattr(self, action)(at, data)

    # Making and giving back, at one end

    def allocate(self, at: int, data: st.DataObject) -> None:
        end, model, keys = self.ends[at], self.models[at], data.draw(key_lists, "keys")
        tag, bound = model.tag(), [name for name in keys if name is not None]
        code, cache_id = run(end, side.allocate, tag, [cache_key(end, name) for name in keys], is_blocks=False)
        if model.num_used_pages() + side.NUM_TENSORS > NUM_PAGES:
            assert code == OUT_OF_MEMORY
        elif len(set(bound)) < len(bound) or any(model.owner(name) for name in bound):
            assert code == PARAM_INVALID
        else:
            assert code == SUCCESS
            bindings = {name: entry for entry, name in enumerate(keys) if name is not None}
            model.caches[cache_id] = ModelCache(tag, is_blocks=False, is_allocated=True, keys=bindings)

    def allocate_blocks(self, at: int, data: st.DataObject) -> None:
        end, model, model_id = self.ends[at], self.models[at], data.draw(st.sampled_from([None, 0, 1]), "model_id")
        tag, name = model.tag(), (False, INVALID, model_id or 0)
        key = None if model_id is None else BlocksCacheKey(end.cluster_id, model_id)
        code, cache_id = run(end, side.allocate, tag, key, is_blocks=True)
        if model.num_used_pages() + side.NUM_TENSORS > NUM_PAGES:
            assert code == OUT_OF_MEMORY
        elif key is not None and model.owner(name):
            assert code == PARAM_INVALID
        else:
            assert code == SUCCESS
            keys = {} if key is None else {name: 0}
            model.caches[cache_id] = ModelCache(tag, is_blocks=True, is_allocated=True, keys=keys)

    def register(self, at: int, data: st.DataObject) -> None:
        """A key that is bound stays where it is; of equal ones the last entry is served."""
        end, model, keys = self.ends[at], self.models[at], data.draw(key_lists, "keys")
        tag = model.tag()
        code, cache_id = run(end, side.register, tag, [cache_key(end, name) for name in keys], is_blocks=False)
        assert code == SUCCESS
        bindings = {name: entry for entry, name in enumerate(keys) if name is not None and not model.owner(name)}
        model.caches[cache_id] = ModelCache(tag, is_blocks=False, is_allocated=False, keys=bindings)

    def register_blocks(self, at: int, data: st.DataObject) -> None:
        """The newest is served."""
        end, model, model_id = self.ends[at], self.models[at], data.draw(st.sampled_from([0, 1]), "model_id")
        tag, name = model.tag(), (False, INVALID, model_id)
        code, cache_id = run(end, side.register, tag, BlocksCacheKey(end.cluster_id, model_id), is_blocks=True)
        assert code == SUCCESS
        if (loser := model.owner(name)) is not None:
            del loser.keys[name]
        model.caches[cache_id] = ModelCache(tag, is_blocks=True, is_allocated=False, keys={name: 0})

    def deallocate(self, at: int, data: st.DataObject) -> None:
        held = [number for number, cache in self.models[at].caches.items() if cache.has_id]
        if not held:
            return
        number = data.draw(st.sampled_from(held), "cache id")
        assert run(self.ends[at], side.deallocate, number)[0] == SUCCESS
        cache = self.models[at].caches[number]
        if cache.is_allocated:
            cache.has_id = False
            self.models[at].forget_unheld()

    def remove_cache_key(self, at: int, data: st.DataObject) -> None:
        end, name = self.ends[at], data.draw(st.one_of(names, self.bound_names(at)), "key")
        end.process.manage("remove_cache_key", cache_key(end, name))
        if name is not None:
            self.models[at].remove_key(name)

    # Pulling from the end ``at``

    def pull_by_key(self, at: int, data: st.DataObject) -> None:
        name = data.draw(st.one_of(names.filter(bool), self.bound_names(at), self.bound_names(at)), "key")
        tensor = data.draw(tensor_ranges, "tensor")
        cache = self.models[at].owner(name)
        entry = cache.keys[name] if cache is not None else 0
        self.pull_entry(at, cache_key(self.ends[at], name), cache, entry, tensor)

    def pull_by_id(self, at: int, data: st.DataObject) -> None:
        if not self.models[at].caches:
            return
        number = data.draw(st.sampled_from(sorted(self.models[at].caches)), "cache id")
        entry, tensor = data.draw(entries, "entry"), data.draw(tensor_ranges, "tensor")
        cache = self.models[at].caches[number]
        key = CacheKeyByIdAndIndex(self.ends[at].cluster_id, number, entry)
        if cache.is_blocks:
            code, _ = run(self.ends[1 - at], side.pull, key, is_blocks=False)
            assert code == (PARAM_INVALID if entry < side.NUM_ENTRIES else KV_CACHE_NOT_EXIST)
        else:
            self.pull_entry(at, key, cache if entry < side.NUM_ENTRIES else None, entry, tensor)

    def pull_unknown(self, at: int, data: st.DataObject) -> None:
        """An id that is no cache of that end any more, or never was."""
        number = data.draw(st.integers(-1, 60), "cache id")
        if number in self.models[at].caches or self.ends[at].process.run(side.is_pull_target, number):
            return
        key = CacheKeyByIdAndIndex(self.ends[at].cluster_id, number, 0)
        assert run(self.ends[1 - at], side.pull, key, is_blocks=False)[0] == KV_CACHE_NOT_EXIST

    def pull_blocks(self, at: int, data: st.DataObject) -> None:
        model_id = data.draw(st.sampled_from([0, 1]), "model_id")
        cache = self.models[at].owner((False, INVALID, model_id))
        key = BlocksCacheKey(self.ends[at].cluster_id, model_id)
        code, found = run(self.ends[1 - at], side.pull, key, is_blocks=True)
        if cache is None:
            assert code == KV_CACHE_NOT_EXIST
        else:
            assert (code, found) == (SUCCESS, [side.byte_of(cache.tag, tensor, 0) for tensor in range(2)])

    def bound_names(self, at: int) -> st.SearchStrategy[Name]:
        """Of contiguous caches, of which a single key is pulled."""
        caches = (cache for cache in self.models[at].caches.values() if not cache.is_blocks)
        bound = sorted(name for cache in caches for name in cache.keys)
        return st.sampled_from(bound) if bound else names.filter(bool)

    def pull_entry(self, at: int, key: Any, cache: ModelCache | None, entry: int, tensor: int | None) -> None:
        ranges: dict[str, Any] = {}
        if tensor is not None:
            one = range(tensor, tensor + 1)
            ranges = {"src_layer_range": one, "dst_layer_range": one, "tensor_num_per_layer": 1}
        code, found = run(self.ends[1 - at], side.pull, key, is_blocks=False, **ranges)
        if cache is None:
            assert code == KV_CACHE_NOT_EXIST
            return
        pulled = range(side.NUM_TENSORS) if tensor is None else [tensor]
        expected = [side.byte_of(cache.tag, index, entry) if index in pulled else 255 for index in range(2)]
        assert (code, found) == (SUCCESS, expected)
        self.models[at].consume(cache, entry, tensor)

    @invariant()
    def pools_hold_what_is_referenced(self) -> None:
        for end, model in zip(self.ends, self.models, strict=True):
            assert end.process.run(side.used_bytes) == model.num_used_pages() * PAGE_BYTES


class PoolPair:
    """The pair as the machine wants it: fresh engines with pools for every run."""

    def __init__(self, pair: Pair) -> None:
        self.a, self.b = pair.a, pair.b
        self._pair = pair

    def init_with_pools(self) -> None:
        self.a.init(listen=False, mem_pool_cfg=POOL)
        self.b.init(listen=True, mem_pool_cfg=POOL)
        self._pair.link()


@pytest.mark.mode("two-sided")
@pytest.mark.timeout(240)
def test_random_calls_follow_the_reference_rules(idle_pair: Pair) -> None:
    # The rules are those of the owner's table, whatever carries the bytes: many runs on one path, some on each.
    is_first_path = idle_pair.path == PATHS[0]
    run_state_machine_as_test(
        lambda: ReferenceRules(PoolPair(idle_pair)),  # type: ignore[arg-type]
        settings=settings(
            max_examples=80 if is_first_path else 15,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
