// What keeps an allocated cache, and when its memory and its version word go (spec api-cachemanager 2.3, 2.4, 5.5).
#include <atomic>
#include <thread>

#include "cache_table.h"
#include "check.h"
#include "peer_table.h"

using namespace ldr;
using ldr_test::test;

namespace {

struct Fixture {
  explicit Fixture(bool remote_access = false) {
    CHECK_OK(Page::create(42, &page));
    table = std::make_unique<CacheTable>(*page, remote_access);
    ldr_pool_params_t params{};
    params.placement = LDR_PLACEMENT_DEVICE;
    params.size_bytes = 1u << 20;
    params.page_shift = 12;
    CHECK_OK(Pool::create(params, &pool));
  }
  Status try_allocate(uint32_t kind, std::vector<ldr_cache_key_t> keys, int64_t *id_p) {
    ldr_cache_params_t params{};
    params.kind = kind;
    params.placement = LDR_PLACEMENT_DEVICE;
    params.remote_accessible = 1;
    params.num_tensors = 2;
    params.num_entries = 4;
    params.tensor_bytes = 4096;
    params.keys = keys.data();
    params.num_keys = uint32_t(keys.size());
    PoolMemory memory;
    std::vector<uint64_t> addresses;
    CHECK_OK(pool->allocate(params.tensor_bytes, params.num_tensors, &memory, &addresses));
    params.addresses = addresses.data();
    return table->add(params, id_p, std::move(memory));
  }
  int64_t allocate(std::vector<ldr_cache_key_t> keys = {}, uint32_t kind = LDR_CACHE_CONTIGUOUS) {
    int64_t id = 0;
    CHECK_OK(try_allocate(kind, keys, &id));
    return id;
  }
  int64_t add(std::vector<ldr_cache_key_t> keys, uint32_t kind = LDR_CACHE_CONTIGUOUS) {
    std::vector<uint64_t> addresses = {0x10000, 0x20000};
    ldr_cache_params_t params{};
    params.kind = kind;
    params.placement = LDR_PLACEMENT_DEVICE;
    params.remote_accessible = 1;
    params.num_tensors = 2;
    params.num_entries = 4;
    params.tensor_bytes = 4096;
    params.keys = keys.data();
    params.num_keys = uint32_t(keys.size());
    params.addresses = addresses.data();
    int64_t id = 0;
    CHECK_OK(table->add(params, &id));
    return id;
  }
  int64_t owner(uint64_t request_id, uint32_t kind = LDR_KEY_REQUEST) {
    uint32_t batch = 0;
    CachePtr cache = table->find_key(kind, request_id, 0, &batch);
    return cache ? cache->id : 0;
  }
  uint64_t used() { return pool->info().used_bytes; }
  // What a peer that fetches the table sees.
  bool is_encoded(int64_t id) {
    Writer out;
    table->encode(out);
    PeerTable peer;
    CHECK_OK(peer.replace(Reader(out.bytes().data(), out.bytes().size())));
    return peer.find(id) != nullptr;
  }

  std::unique_ptr<Page> page;
  std::shared_ptr<Pool> pool;
  std::unique_ptr<CacheTable> table;
};

ldr_cache_key_t request(uint64_t id, uint32_t batch = 0) { return {LDR_KEY_REQUEST, batch, id, 0}; }
ldr_cache_key_t prefix(uint64_t id, uint32_t batch = 0) { return {LDR_KEY_PREFIX, batch, id, 0}; }
KeyName name(uint64_t request_id) { return key_name(LDR_KEY_REQUEST, request_id, 0); }

void conflicts() {
  Fixture f;
  const int64_t first = f.allocate({request(5), prefix(5, 1)});
  int64_t id = 0;
  auto bound = [&](uint32_t kind, std::vector<ldr_cache_key_t> keys) {
    const uint64_t used = f.used();
    CHECK_CODE(f.try_allocate(kind, keys, &id), LDR_ERR_KEY_BOUND);
    CHECK_EQ(f.used(), used);
    CHECK_EQ(id, 0);
  };
  bound(LDR_CACHE_CONTIGUOUS, {request(5)});
  bound(LDR_CACHE_CONTIGUOUS, {request(9), prefix(5, 1)});
  CHECK_EQ(f.owner(9), 0);  // nothing kept
  bound(LDR_CACHE_CONTIGUOUS, {request(9), request(9, 1)});
  CHECK_CODE(f.try_allocate(LDR_CACHE_CONTIGUOUS, {request(1), request(2), request(3), request(4), request(6)}, &id), LDR_ERR_INVALID);
  // Placeholders do not count, not even beside a blocks cache of that model.
  const int64_t blocks = f.allocate({{LDR_KEY_BLOCKS, 0, 0, 0}}, LDR_CACHE_BLOCKS);
  CHECK(f.allocate({request(kNoKeyId), request(kNoKeyId, 1), request(7, 2)}) > blocks);
  bound(LDR_CACHE_BLOCKS, {{LDR_KEY_BLOCKS, 0, 0, 0}});
  // Registrations keep their own rules, and a key that is free again can be bound again.
  CHECK(f.add({request(5)}) > first);
  CHECK_EQ(f.owner(5), first);
  f.table->unbind(request(5));
  CHECK_EQ(f.owner(5), 0);
  f.allocate({request(5)});
}

void id_and_keys_keep_it() {
  for (bool id_first : {false, true}) {
    Fixture f;
    const int64_t id = f.allocate({request(1), prefix(2, 1)});
    const CachePtr cache = f.table->find(id);
    const uint32_t slot = cache->slot;
    const uint64_t version = cache->version;
    auto drop = [&] {
      CHECK_OK(f.table->drop_id(id));
      CHECK(f.table->find(id) == nullptr);  // for us
      CHECK_CODE(f.table->drop_id(id), LDR_ERR_NO_CACHE);
    };
    if (id_first) {
      drop();
      CHECK_EQ(f.table->find_shown(id)->id, id);  // for peers, by its keys and by id
      CHECK_EQ(f.owner(1), id);
      CHECK(f.is_encoded(id));
    }
    f.table->unbind({LDR_KEY_REQUEST, 99, 1, 0});
    CHECK_EQ(f.owner(1), 0);
    CHECK_EQ(f.owner(2, LDR_KEY_PREFIX), id);
    f.table->unbind(request(2));  // the other table
    CHECK(f.table->find_shown(id) != nullptr);
    f.table->unbind(prefix(2));
    CHECK_EQ(f.page->cache_version(slot), version + (id_first ? 1 : 0));
    if (!id_first) {
      CHECK(f.table->find(id) != nullptr);
      drop();
    }
    CHECK(f.table->find_shown(id) == nullptr);
    CHECK(f.table->find_slot(slot, version) == nullptr);
    CHECK_EQ(f.page->cache_version(slot), version + 1);
    CHECK_EQ(f.table->size(), 0u);
  }
}

void memory_goes_back() {
  Fixture f;
  int64_t id = f.allocate({request(1)});
  CHECK_EQ(f.used(), uint64_t(8192));
  CHECK_OK(f.table->drop_id(id));
  CHECK_EQ(f.used(), uint64_t(8192));
  f.table->unbind(request(1));
  CHECK_EQ(f.used(), uint64_t(0));

  id = f.allocate({{LDR_KEY_BLOCKS, 0, 0, 3}}, LDR_CACHE_BLOCKS);  // at once, with its key
  CHECK_OK(f.table->drop_id(id));
  CHECK_EQ(f.used(), uint64_t(0));
  CHECK(f.table->find_shown(id) == nullptr);

  id = f.allocate({request(1), prefix(1)});  // unregister takes the keys, too
  f.table->remove(id);
  CHECK_EQ(f.used(), uint64_t(0));
  CHECK_EQ(f.owner(1), 0);

  id = f.allocate();  // whoever holds it keeps the memory, but nobody finds it
  CachePtr held = f.table->find(id);
  CHECK_OK(f.table->drop_id(id));
  CHECK_EQ(f.used(), uint64_t(8192));
  CHECK(f.table->find_slot(held->slot, held->version) == nullptr);
  held = nullptr;
  CHECK_EQ(f.used(), uint64_t(0));
  CHECK_CODE(f.table->drop_id(0), LDR_ERR_NO_CACHE);
  CHECK_CODE(f.table->drop_id(id), LDR_ERR_NO_CACHE);
}

void registered_ones_stay() {
  Fixture f;
  const int64_t id = f.add({request(1)});
  CHECK_OK(f.table->drop_id(id));
  f.table->unbind(request(1));
  f.table->unbind(request(2));
  f.table->unbind(request(kNoKeyId));
  CHECK_EQ(f.owner(1), id);
  CHECK(f.table->find(id) != nullptr);
  CHECK(!f.table->pin(*f.table->find(id)));
  CHECK(f.table->unpin(id) == nullptr);
  f.table->remove(id);
  CHECK_EQ(f.owner(1), 0);
}

void pins_keep_it() {
  for (bool by_unregister : {false, true}) {
    Fixture f;
    const int64_t id = f.allocate({{LDR_KEY_BLOCKS, 0, 0, 3}}, LDR_CACHE_BLOCKS);
    CachePtr cache = f.table->find(id);
    CHECK(f.table->pin(*cache));
    CHECK(f.table->pin(*cache));
    if (by_unregister) f.table->remove(id);
    else CHECK_OK(f.table->drop_id(id));
    CHECK(f.table->find_shown(id) == nullptr);
    uint32_t batch = 0;
    CHECK(f.table->find_key(LDR_KEY_BLOCKS, 0, 3, &batch) == nullptr);
    uint32_t tensor = 0;
    CHECK(f.table->find_address(cache->addresses[0], 1, &tensor) == nullptr);
    CHECK(!f.is_encoded(id));
    CHECK(!f.table->pin(*cache));  // for no new reader
    CHECK(f.table->find_slot(cache->slot, cache->version) != nullptr);  // those that have it go on
    f.allocate({{LDR_KEY_BLOCKS, 0, 0, 3}}, LDR_CACHE_BLOCKS);          // the key is free
    CHECK(f.table->unpin(id) == nullptr);
    CHECK_EQ(f.page->cache_version(cache->slot), cache->version);
    CachePtr gone = f.table->unpin(id);
    CHECK_EQ(gone->id, id);
    CHECK_EQ(f.page->cache_version(cache->slot), cache->version + 1);
    cache = nullptr;
    CHECK_EQ(f.used(), uint64_t(2 * 8192));
    f.table->let_go(std::move(gone));
    CHECK_EQ(f.used(), uint64_t(8192));
    CHECK(f.table->unpin(id) == nullptr);
  }
}

void consumption() {
  Fixture f;
  const int64_t id = f.allocate({request(1), request(2, 1)});
  KeyName key;
  CHECK(CacheTable::request_key(*f.table->find(id), 1, &key));
  CHECK(key == name(2));
  CHECK(!CacheTable::request_key(*f.table->find(id), 3, &key));
  CHECK(f.table->pin(*f.table->find(id)));
  f.table->consume(id, name(1), 1, 1);
  CHECK_EQ(f.owner(1), id);  // tensor 0 is unread
  f.table->consume(id, name(2), 0, 1);
  CHECK_EQ(f.owner(2), id);  // per key, not per cache
  f.table->consume(id, name(1), 1, 1);
  CHECK_EQ(f.owner(1), id);
  f.table->consume(id, name(1), 0, 1);
  CHECK_EQ(f.owner(1), 0);
  CHECK_OK(f.table->drop_id(id));
  f.table->consume(id, name(2), 0, 0);  // all at once
  CHECK_EQ(f.owner(2), 0);
  CHECK(f.table->find_shown(id) == nullptr);
  CHECK_EQ(f.used(), uint64_t(8192));
  f.table->let_go(f.table->unpin(id));
  CHECK_EQ(f.used(), uint64_t(0));
  // A key that somebody else has bound again meanwhile is not his to consume.
  const int64_t other = f.allocate({request(1)});
  f.table->consume(id, name(1), 0, 0);
  CHECK_EQ(f.owner(1), other);
  f.table->consume(other, name(1), 0, 9);  // more than there are
  CHECK_EQ(f.owner(1), 0);
}

void addresses() {
  Fixture f;
  const int64_t id = f.allocate();
  const CachePtr cache = f.table->find(id);
  uint32_t tensor = 9;
  CHECK_EQ(f.table->find_address(cache->addresses[1] + 96, 4000, &tensor)->id, id);
  CHECK_EQ(tensor, 1u);
  CHECK(f.table->find_address(cache->addresses[1] + 97, 4000, &tensor) == nullptr);
  CHECK(f.table->find_address(cache->addresses[0] - 1, 2, &tensor) == nullptr);
  CHECK(f.table->find_address(cache->addresses[0], 4097, &tensor) == nullptr);
  CHECK(f.table->find_address(UINT64_MAX, UINT64_MAX, &tensor) == nullptr);
}

void memory_waits_for_readers() {
  Fixture f;
  const int64_t id = f.allocate();
  std::atomic<bool> dropped{false};
  std::thread dropper;
  {
    auto guard = f.table->read_guard();
    dropper = std::thread([&] {
      CHECK_OK(f.table->drop_id(id));
      dropped = true;
    });
    while (f.table->find(id)) std::this_thread::yield();
    CHECK(!dropped);
    CHECK_EQ(f.used(), uint64_t(8192));
  }
  dropper.join();
  CHECK_EQ(f.used(), uint64_t(0));
}

// The table that peers fetch is bounded by what they can see.
void table_size_shrinks() {
  Fixture f(true);
  std::vector<int64_t> ids;
  for (int round = 0; round < 3; ++round) {
    std::vector<uint64_t> many(60000, 0x10000);
    ldr_cache_params_t params{};
    params.num_tensors = uint32_t(many.size());
    params.num_entries = 1;
    params.tensor_bytes = 4096;
    params.placement = LDR_PLACEMENT_DEVICE;
    params.addresses = many.data();
    PoolMemory memory;
    std::vector<uint64_t> addresses;
    CHECK_OK(f.pool->allocate(1, 1, &memory, &addresses));
    int64_t first = 0, second = 0, third = 0;
    CHECK_OK(f.table->add(params, &first, memory));
    CHECK_OK(f.table->add(params, &second, memory));
    CHECK_CODE(f.table->add(params, &third, memory), LDR_ERR_INVALID);
    CHECK(f.table->pin(*f.table->find(first)));
    CHECK_OK(f.table->drop_id(first));  // a reader keeps it, but nobody sees it
    CHECK_OK(f.table->add(params, &third, memory));
    f.table->let_go(f.table->unpin(first));
    CHECK_CODE(f.table->add(params, &first, memory), LDR_ERR_INVALID);
    CHECK_OK(f.table->drop_id(second));
    CHECK_OK(f.table->drop_id(third));
  }
}

// Readers pin and read what others deallocate and allocate anew: no reader ever sees another's bytes.
void races() {
  Fixture f;
  std::atomic<bool> stop{false};
  std::atomic<int64_t> newest{0};
  std::atomic<uint64_t> num_read{0};
  std::vector<std::thread> readers;
  for (int i = 0; i < 2; ++i) {
    readers.emplace_back([&] {
      while (!stop) {
        CachePtr cache = f.table->find_shown(newest);
        if (!cache || !f.table->pin(*cache)) continue;
        const auto *word = reinterpret_cast<const int64_t *>(cache->addresses[0]);
        const int64_t id = cache->id;
        cache = nullptr;  // only the pin keeps it
        for (int look = 0; look < 50; ++look) CHECK_EQ(*word, id);
        num_read.fetch_add(1);
        f.table->let_go(f.table->unpin(id));
      }
    });
  }
  for (uint64_t round = 0; round < 3000 || num_read < 100; ++round) {
    PoolMemory memory;
    std::vector<uint64_t> addresses;
    CHECK_OK(f.pool->allocate(4096, 1, &memory, &addresses));
    ldr_cache_params_t params{};
    params.num_tensors = 1;
    params.num_entries = 1;
    params.tensor_bytes = 4096;
    params.addresses = addresses.data();
    int64_t id = 0;
    *reinterpret_cast<int64_t *>(addresses[0]) = int64_t(round) + 1;  // ids count from one
    CHECK_OK(f.table->add(params, &id, std::move(memory)));
    newest = id;
    if (round % 8 == 0) std::this_thread::yield();
    CHECK_OK(f.table->drop_id(id));
  }
  stop = true;
  for (std::thread &reader : readers) reader.join();
  CHECK_EQ(f.used(), uint64_t(0));
  CHECK_EQ(f.table->size(), 0u);
}

}  // namespace

int main() {
  test("key conflicts of allocations", conflicts);
  test("id and keys keep it", id_and_keys_keep_it);
  test("memory goes back", memory_goes_back);
  test("registered ones stay", registered_ones_stay);
  test("pins keep it", pins_keep_it);
  test("consumption", consumption);
  test("addresses", addresses);
  test("memory waits for readers", memory_waits_for_readers);
  test("table size shrinks", table_size_shrinks);
  test("races", races);
}
