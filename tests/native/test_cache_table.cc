#include "cache_table.h"

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <random>
#include <thread>

#include "check.h"
#include "peer_table.h"
#include "shared_memory.h"

using namespace ldr;
using ldr_test::test;

namespace {

struct Fixture {
  explicit Fixture(bool remote_access = true) {
    CHECK_OK(Page::create(42, &page));
    table = std::make_unique<CacheTable>(*page, remote_access);
  }
  std::unique_ptr<Page> page;
  std::unique_ptr<CacheTable> table;
};

struct Params {
  std::vector<uint64_t> addresses{0x10000, 0x20000};
  std::vector<ldr_cache_key_t> keys;
  ldr_cache_params_t raw{};

  explicit Params(uint32_t kind = LDR_CACHE_CONTIGUOUS) {
    raw.struct_size = sizeof(raw);
    raw.kind = kind;
    raw.placement = LDR_PLACEMENT_DEVICE;
    raw.remote_accessible = 1;
    raw.num_entries = 4;
    raw.tensor_bytes = 4096;
  }
  Params &key(uint32_t kind, uint64_t id, uint64_t model_id, uint32_t batch_index) {
    keys.push_back({kind, batch_index, id, model_id});
    return *this;
  }
  const ldr_cache_params_t &get() {
    raw.addresses = addresses.data();
    raw.num_tensors = uint32_t(addresses.size());
    raw.keys = keys.data();
    raw.num_keys = uint32_t(keys.size());
    return raw;
  }
};

int64_t add(CacheTable &table, Params params) {
  int64_t id = 0;
  CHECK_OK(table.add(params.get(), &id));
  return id;
}

// 0: not bound.
int64_t owner(const CacheTable &table, uint32_t kind, uint64_t id, uint64_t model_id, uint32_t *batch_index_p = nullptr) {
  uint32_t batch_index = 99;
  CachePtr cache = table.find_key(kind, id, model_id, &batch_index);
  if (batch_index_p) *batch_index_p = batch_index;
  return cache ? cache->id : 0;
}

void ids_count_from_one() {
  Fixture f;
  CHECK_EQ(add(*f.table, Params()), 1);
  CHECK_EQ(add(*f.table, Params(LDR_CACHE_BLOCKS)), 2);
  f.table->remove(2);
  f.table->remove(2);
  f.table->remove(77);
  CHECK_EQ(add(*f.table, Params()), 3);
  CHECK_EQ(f.table->size(), 2u);
  CHECK(f.table->find(2) == nullptr);
  CHECK(f.table->find(0) == nullptr);
  CHECK_EQ(f.table->find(3)->stride(), 1024u);
}

void nonsense_is_refused() {
  Fixture f;
  int64_t id = 0;
  auto refused = [&](Params params) { CHECK_CODE(f.table->add(params.get(), &id), LDR_ERR_INVALID); };
  Params p;
  (p = Params()).raw.kind = 2, refused(p);
  (p = Params()).raw.placement = 2, refused(p);
  (p = Params()).raw.num_entries = 0, refused(p);
  (p = Params()).raw.num_entries = 3, refused(p);
  (p = Params()).raw.tensor_bytes = 0, refused(p);
  (p = Params()).addresses.clear(), refused(p);
  (p = Params()).addresses[1] = 0, refused(p);
  (p = Params()).addresses[1] = UINT64_MAX - 100, refused(p);
  (p = Params()).addresses.resize(kMaxTensors + 1, 1), refused(p);
  refused(Params().key(LDR_KEY_BLOCKS, 0, 0, 0));
  refused(Params(LDR_CACHE_BLOCKS).key(LDR_KEY_REQUEST, 0, 0, 0));
  refused(Params().key(3, 0, 0, 0));
  refused(Params().key(LDR_KEY_REQUEST, 0, 0, 4));
  refused(Params(LDR_CACHE_BLOCKS).key(LDR_KEY_BLOCKS, 0, 0, 0).key(LDR_KEY_BLOCKS, 0, 1, 0));
  Params many;
  for (uint32_t i = 0; i < 5; ++i) many.key(LDR_KEY_REQUEST, i, 0, 0);
  refused(many);
  CHECK_EQ(f.table->size(), 0u);
  CHECK_EQ(id, 0);
  // Registering never touches memory: any other address will do, also twice.
  (p = Params()).addresses = {1, 1};
  CHECK_EQ(add(*f.table, p), 1);
}

// Spec api-cachemanager 2.3, the "register" rows.
void key_conflicts() {
  Fixture f;
  uint32_t batch = 0;
  int64_t first = add(*f.table, Params().key(LDR_KEY_REQUEST, 5, 0, 1).key(LDR_KEY_PREFIX, 5, 0, 2));
  CHECK_EQ(owner(*f.table, LDR_KEY_REQUEST, 5, 0, &batch), first);
  CHECK_EQ(batch, 1u);
  CHECK_EQ(owner(*f.table, LDR_KEY_PREFIX, 5, 0, &batch), first);
  CHECK_EQ(batch, 2u);
  CHECK_EQ(owner(*f.table, LDR_KEY_REQUEST, 5, 1), 0);
  CHECK_EQ(owner(*f.table, LDR_KEY_REQUEST, 6, 0), 0);

  // Already bound: the first binding stays, and the others of the call are bound.
  int64_t second = add(*f.table, Params().key(LDR_KEY_REQUEST, 5, 0, 3).key(LDR_KEY_REQUEST, 5, 1, 0));
  CHECK_EQ(owner(*f.table, LDR_KEY_REQUEST, 5, 0, &batch), first);
  CHECK_EQ(batch, 1u);
  CHECK_EQ(owner(*f.table, LDR_KEY_REQUEST, 5, 1), second);
  // What was ignored does not come to life later.
  f.table->remove(first);
  CHECK_EQ(owner(*f.table, LDR_KEY_REQUEST, 5, 0), 0);
  CHECK_EQ(owner(*f.table, LDR_KEY_PREFIX, 5, 0), 0);
  CHECK_EQ(owner(*f.table, LDR_KEY_REQUEST, 5, 1), second);

  // Twice in one call: the last entry.
  int64_t third = add(*f.table, Params().key(LDR_KEY_REQUEST, 9, 0, 0).key(LDR_KEY_REQUEST, 9, 0, 3).key(LDR_KEY_REQUEST, 9, 0, 2));
  CHECK_EQ(owner(*f.table, LDR_KEY_REQUEST, 9, 0, &batch), third);
  CHECK_EQ(batch, 2u);

  // Placeholders bind nothing, and repeat freely.
  int64_t placeholders = add(*f.table, Params().key(LDR_KEY_REQUEST, kNoKeyId, 0, 0).key(LDR_KEY_REQUEST, kNoKeyId, 0, 1));
  CHECK(f.table->find(placeholders)->keys.empty());
  CHECK_EQ(owner(*f.table, LDR_KEY_REQUEST, kNoKeyId, 0), 0);
}

void newest_blocks_cache_wins() {
  Fixture f;
  int64_t old_one = add(*f.table, Params(LDR_CACHE_BLOCKS).key(LDR_KEY_BLOCKS, 0, 7, 0));
  CHECK_EQ(owner(*f.table, LDR_KEY_BLOCKS, 123, 7), old_one);
  CHECK_EQ(owner(*f.table, LDR_KEY_REQUEST, kNoKeyId, 7), old_one);  // one table for both
  int64_t new_one = add(*f.table, Params(LDR_CACHE_BLOCKS).key(LDR_KEY_BLOCKS, 0, 7, 0));
  CHECK_EQ(owner(*f.table, LDR_KEY_BLOCKS, 0, 7), new_one);
  CHECK(f.table->find(old_one)->keys.empty());
  f.table->remove(old_one);
  CHECK_EQ(owner(*f.table, LDR_KEY_BLOCKS, 0, 7), new_one);
  f.table->remove(new_one);
  CHECK_EQ(owner(*f.table, LDR_KEY_BLOCKS, 0, 7), 0);
}

void versions_and_slots() {
  Fixture f;
  CachePtr a = f.table->find(add(*f.table, Params()));
  CHECK(f.table->find_slot(a->slot, a->version) == a);
  CHECK(f.table->find_slot(a->slot, a->version + 1) == nullptr);
  CHECK(f.table->find_slot(a->slot + 1, a->version) == nullptr);
  CHECK(f.table->find_slot(UINT32_MAX, 0) == nullptr);
  std::shared_ptr<PeerPage> peer;
  CHECK_OK(PeerPage::map(f.page->fd(), 42, &peer));
  uint64_t table_version = peer->table_version();
  f.table->remove(a->id);
  CHECK(f.page->cache_version(a->slot) > a->version);
  CHECK(peer->table_version() > table_version);
  CHECK(f.table->find_slot(a->slot, a->version) == nullptr);
  CachePtr b = f.table->find(add(*f.table, Params()));
  CHECK_EQ(b->slot, a->slot);
  CHECK(b->version > a->version);
  CHECK(f.table->find_slot(b->slot, a->version) == nullptr);
}

void remove_waits_for_readers() {
  Fixture f;
  CachePtr cache = f.table->find(add(*f.table, Params()));
  std::atomic<bool> removed{false};
  std::thread remover;
  {
    auto guard = f.table->read_guard();
    remover = std::thread([&] {
      f.table->remove(cache->id);
      removed = true;
    });
    // The word moves at once, although the remover cannot return yet.
    while (f.page->cache_version(cache->slot) == cache->version) std::this_thread::yield();
    CHECK(f.table->find_slot(cache->slot, cache->version) == nullptr);
    CHECK(!removed);
  }
  remover.join();
  CHECK(removed);
}

void remove_is_not_starved() {
  Fixture f;
  std::atomic<bool> stop{false};
  std::vector<std::thread> readers;
  for (int i = 0; i < 3; ++i) {
    readers.emplace_back([&] {
      while (!stop) auto guard = f.table->read_guard();
    });
  }
  for (int i = 0; i < 50; ++i) f.table->remove(add(*f.table, Params()));
  stop = true;
  for (auto &reader : readers) reader.join();
}

void table_size_is_bounded() {
  // Spec 3.4 counts 24 + 64 for each cache + 8 for each tensor.
  Fixture remote(true), two_sided(false);
  Params big;
  big.addresses.assign(10000, 1);
  const int fitting = ((1 << 20) - 24) / (64 + 8 * 10000);
  int64_t id = 0;
  for (int i = 0; i < fitting; ++i) CHECK_OK(remote.table->add(big.get(), &id));
  CHECK_CODE(remote.table->add(big.get(), &id), LDR_ERR_INVALID);
  Writer out;
  remote.table->encode(out);
  CHECK(out.bytes().size() <= kMaxFrameBytes);
  remote.table->remove(id);
  CHECK_OK(remote.table->add(big.get(), &id));
  for (int i = 0; i < fitting + 5; ++i) CHECK_OK(two_sided.table->add(big.get(), &id));
}

void same_cache(const Cache &a, const Cache &b) {
  CHECK(a.id == b.id && a.slot == b.slot && a.version == b.version && a.kind == b.kind && a.placement == b.placement);
  CHECK(a.remote_accessible == b.remote_accessible && a.num_entries == b.num_entries && a.tensor_bytes == b.tensor_bytes);
  CHECK(a.addresses == b.addresses && a.mapping_ids == b.mapping_ids && a.mapping_offsets == b.mapping_offsets);
  CHECK_EQ(a.keys.size(), b.keys.size());
  for (size_t i = 0; i < a.keys.size(); ++i) {
    CHECK(a.keys[i].kind == b.keys[i].kind && a.keys[i].batch_index == b.keys[i].batch_index);
    CHECK(a.keys[i].id == b.keys[i].id && a.keys[i].model_id == b.keys[i].model_id);
  }
}

Reader reader_of(const Writer &writer) { return Reader(writer.bytes().data(), writer.bytes().size()); }

// A table with caches in one mapping, in two, and in none.
void fill(CacheTable &table, void *pool_a, void *pool_b) {
  uint64_t a = reinterpret_cast<uint64_t>(pool_a), b = reinterpret_cast<uint64_t>(pool_b);
  Params params;
  params.addresses = {a, a + 4096};
  add(table, params.key(LDR_KEY_REQUEST, 1, 2, 3).key(LDR_KEY_PREFIX, 4, 5, 1));
  params = Params(LDR_CACHE_BLOCKS);
  params.raw.remote_accessible = 0;
  params.raw.placement = LDR_PLACEMENT_HOST;
  params.addresses = {b + 8192, 0x1000, a + 4096, a};
  add(table, params.key(LDR_KEY_BLOCKS, 0, 6, 0));
  add(table, Params());
}

struct Pools {
  Pools() {
    CHECK_OK(shared_alloc(16384, &a, nullptr));
    CHECK_OK(shared_alloc(16384, &b, nullptr));
  }
  ~Pools() {
    CHECK_OK(shared_free(a));
    CHECK_OK(shared_free(b));
  }
  void *a = nullptr, *b = nullptr;
};

void round_trip() {
  Pools pools;
  Fixture f;
  fill(*f.table, pools.a, pools.b);
  Writer out;
  f.table->encode(out);
  PeerTable peer;
  CHECK(!peer.filled());
  CHECK_OK(peer.replace(reader_of(out)));
  CHECK(peer.filled());
  for (int64_t id = 1; id <= 3; ++id) same_cache(*f.table->find(id), *peer.find(id));
  CHECK(peer.find(4) == nullptr);
  uint64_t id_a = 0, id_b = 0, offset = 0;
  CHECK(shared_find(reinterpret_cast<uint64_t>(pools.a), 1, &id_a, &offset) && shared_find(reinterpret_cast<uint64_t>(pools.b), 1, &id_b, &offset));
  CHECK((peer.find(2)->mapping_ids == std::vector<uint64_t>{id_b, 0, id_a, id_a}));
  CHECK((peer.find(2)->mapping_offsets == std::vector<uint64_t>{8192, 0, 4096, 0}));
  uint32_t batch = 0;
  CHECK_EQ(peer.find_key(LDR_KEY_REQUEST, 1, 2, &batch)->id, 1);
  CHECK_EQ(batch, 3u);
  CHECK_EQ(peer.find_key(LDR_KEY_PREFIX, 4, 5, &batch)->id, 1);
  CHECK_EQ(peer.find_key(LDR_KEY_BLOCKS, 0, 6, &batch)->id, 2);
  CHECK(peer.find_key(LDR_KEY_REQUEST, 4, 5, &batch) == nullptr);
  // Without keys, for look-ups and grants.
  Writer bare;
  encode_cache(*f.table->find(1), false, bare);
  Reader in = reader_of(bare);
  CachePtr cache = decode_cache(in);
  CHECK(cache && in.finished() && cache->keys.empty());
}

void truncated_bytes() {
  Pools pools;
  Fixture f;
  fill(*f.table, pools.a, pools.b);
  Writer out;
  f.table->encode(out);
  PeerTable peer;
  CHECK_OK(peer.replace(reader_of(out)));
  for (size_t size = 0; size < out.bytes().size(); ++size) {
    std::vector<uint8_t> cut(out.bytes().begin(), out.bytes().begin() + long(size));  // its own block: the sanitizer sees any overrun
    CHECK_CODE(peer.replace(Reader(cut.data(), cut.size())), LDR_ERR_LINK_BROKEN);
  }
  CHECK(peer.find(1) != nullptr);  // a bad table changes nothing
  Writer longer = out;
  longer.u8(0);
  CHECK_CODE(peer.replace(reader_of(longer)), LDR_ERR_LINK_BROKEN);
}

void hostile_bytes() {
  auto encoded = [](auto change) {
    Cache cache{};
    cache.id = 1;
    cache.kind = LDR_CACHE_CONTIGUOUS;
    cache.num_entries = 4;
    cache.tensor_bytes = 64;
    cache.addresses = {1000, 2000};
    cache.mapping_ids = {0, 5};
    cache.mapping_offsets = {0, 100};
    cache.keys = {{LDR_KEY_REQUEST, 1, 2, 3}};
    change(cache);
    Writer out;
    encode_cache(cache, true, out);
    Reader in = reader_of(out);
    CachePtr result = decode_cache(in);
    return result && in.finished();
  };
  CHECK(encoded([](Cache &) {}));
  CHECK(!encoded([](Cache &c) { c.id = 0; }));
  CHECK(!encoded([](Cache &c) { c.id = -1; }));
  CHECK(!encoded([](Cache &c) { c.slot = kNumCacheSlots; }));
  CHECK(!encoded([](Cache &c) { c.kind = 2; }));
  CHECK(!encoded([](Cache &c) { c.placement = 2; }));
  CHECK(!encoded([](Cache &c) { c.num_entries = 0; }));
  CHECK(!encoded([](Cache &c) { c.num_entries = 5; }));
  CHECK(!encoded([](Cache &c) { c.tensor_bytes = 0; }));
  CHECK(!encoded([](Cache &c) { c.tensor_bytes = UINT64_MAX - 3; }));
  CHECK(!encoded([](Cache &c) { c.addresses[0] = 0; }));
  CHECK(!encoded([](Cache &c) { c.addresses.clear(), c.mapping_ids.clear(); }));
  CHECK(!encoded([](Cache &c) { c.mapping_offsets[1] = 2001; }));  // the mapping would begin beyond its tensor
  CHECK(!encoded([](Cache &c) { c.keys[0].batch_index = 4; }));
  CHECK(!encoded([](Cache &c) { c.keys[0].kind = LDR_KEY_BLOCKS; }));
  CHECK(!encoded([](Cache &c) { c.kind = LDR_CACHE_BLOCKS; }));
  CHECK(!encoded([](Cache &c) { c.keys.resize(5, c.keys[0]); }));

  Writer twice;
  twice.u32(2);
  Fixture f;
  CachePtr cache = f.table->find(add(*f.table, Params()));
  encode_cache(*cache, true, twice);
  encode_cache(*cache, true, twice);
  PeerTable peer;
  CHECK_CODE(peer.replace(reader_of(twice)), LDR_ERR_LINK_BROKEN);
  CHECK(!peer.filled());

  // Random damage: any answer will do, but no crash, no overrun, no giant allocation.
  Pools pools;
  Fixture g;
  fill(*g.table, pools.a, pools.b);
  Writer out;
  g.table->encode(out);
  std::mt19937_64 random(20240607);
  for (int round = 0; round < 20000; ++round) {
    std::vector<uint8_t> bytes = out.bytes();
    for (uint64_t n = random() % 4 + 1; n > 0; --n) bytes[random() % bytes.size()] = uint8_t(random());
    if (peer.replace(Reader(bytes.data(), bytes.size())).ok()) CHECK(peer.filled());
  }
}

void peer_mappings() {
  Pools pools;
  uint64_t id = 0, offset = 0;
  CHECK(shared_find(reinterpret_cast<uint64_t>(pools.a), 1, &id, &offset));
  Fd fd = shared_fd(id);
  PeerMappings mappings;
  Fixture g;
  std::shared_ptr<PeerPage> page;
  CHECK_OK(PeerPage::map(g.page->fd(), 42, &page));
  Cache cache{};
  cache.slot = 3;
  cache.version = page->cache_version(3);
  auto address = [&](uint64_t mapping_id, uint64_t offset, uint64_t size_bytes) {
    cache.mapping_ids = {mapping_id};
    cache.mapping_offsets = {offset};
    cache.tensor_bytes = size_bytes;
    return mappings.address(cache, 0);
  };
  CHECK(address(id, 0, 1) == nullptr);
  CHECK_OK(mappings.add(id, fd.get()));
  uint8_t *base = address(id, 0, 16384);
  CHECK(base != nullptr && base != pools.a);
  CHECK_OK(mappings.add(id, fd.get()));
  CHECK(address(id, 0, 16384) == base);
  static_cast<uint8_t *>(pools.a)[300] = 9;
  CHECK_EQ(*address(id, 300, 1), 9);
  CHECK(address(id, 1, 16384) == nullptr);
  CHECK(address(id, UINT64_MAX, 2) == nullptr);
  CHECK(address(id, 16384, 0) == base + 16384);
  CHECK(address(id + 1000, 0, 1) == nullptr);
  Fd unsealed(memfd_create("test", MFD_CLOEXEC));
  CHECK_EQ(ftruncate(unsealed.get(), 4096), 0);
  CHECK_CODE(mappings.add(77, unsealed.get()), LDR_ERR_LINK_BROKEN);
  CHECK_CODE(mappings.add(77, -1), LDR_ERR_LINK_BROKEN);
  CHECK_CODE(mappings.add(0, fd.get()), LDR_ERR_LINK_BROKEN);
  mappings.drop();
  CHECK(address(id, 0, 1) == nullptr);

  // Kept as long as one of the caches that it was used for lives.
  CHECK_OK(mappings.add(id, fd.get()));
  CHECK(address(id, 0, 1) != nullptr);
  cache.slot = 5;
  cache.version = page->cache_version(5);
  CHECK(address(id, 0, 1) != nullptr);
  g.page->advance_cache(3);
  mappings.drop_unused(*page);
  cache.slot = 5;
  CHECK(address(id, 0, 1) != nullptr);
  g.page->advance_cache(5);
  mappings.drop_unused(*page);
  CHECK(address(id, 0, 1) == nullptr);
}

}  // namespace

int main() {
  test("ids count from one", ids_count_from_one);
  test("nonsense is refused", nonsense_is_refused);
  test("key conflicts", key_conflicts);
  test("the newest blocks cache wins", newest_blocks_cache_wins);
  test("versions and slots", versions_and_slots);
  test("remove waits for readers", remove_waits_for_readers);
  test("remove is not starved", remove_is_not_starved);
  test("the table's size is bounded", table_size_is_bounded);
  test("round trip", round_trip);
  test("truncated bytes", truncated_bytes);
  test("hostile bytes", hostile_bytes);
  test("peer mappings", peer_mappings);
  return 0;
}
