// Copies inside a process against a byte model, in one arena where caches overlap as chance has it; refusals in the order of the specification; what ends one.
#include "local_copy.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "engines.h"

using namespace ldr;
using ldr_test::test;

namespace {

using Random = std::mt19937_64;
using Bytes = std::vector<uint8_t>;

Status keep_going() { return Status::success(); }

struct Table {
  Table() {
    CHECK_OK(Page::create(42, &page));
    caches = std::make_unique<CacheTable>(*page, true);
  }
  std::unique_ptr<Page> page;
  std::unique_ptr<CacheTable> caches;
};

struct Shape {
  uint32_t kind = LDR_CACHE_CONTIGUOUS;
  uint64_t num_entries = 1, stride = 1;
  std::vector<uint64_t> addresses;

  ldr_cache_params_t params() const {
    ldr_cache_params_t p{};
    p.struct_size = sizeof(p);
    p.kind = kind;
    p.num_tensors = uint32_t(addresses.size());
    p.num_entries = num_entries;
    p.tensor_bytes = num_entries * stride;
    p.addresses = addresses.data();
    return p;
  }
  int64_t add_to(CacheTable &caches) const {
    int64_t id = 0;
    CHECK_OK(caches.add(params(), &id));
    return id;
  }
};

uint64_t address_of(const void *pointer) { return reinterpret_cast<uint64_t>(pointer); }

Bytes random_bytes(size_t size, Random &random) {
  Bytes bytes(size);
  for (uint8_t &byte : bytes) byte = uint8_t(random());
  return bytes;
}

// Tensors anywhere in the arena, also over each other.
Shape random_shape(const Bytes &arena, uint32_t num_tensors, uint64_t num_entries, uint64_t stride, Random &random) {
  Shape shape;
  shape.kind = random() % 2 ? LDR_CACHE_BLOCKS : LDR_CACHE_CONTIGUOUS;  // layouts are not compared
  shape.num_entries = num_entries;
  shape.stride = stride;
  for (uint32_t i = 0; i < num_tensors; ++i) shape.addresses.push_back(address_of(arena.data()) + random() % (arena.size() - num_entries * stride));
  return shape;
}

// Lists of either width, alive as long as their owner.
struct List {
  std::vector<int32_t> narrow;
  std::vector<int64_t> wide;
  List(const std::vector<uint64_t> &blocks, bool is_wide) {
    if (is_wide) wide.assign(blocks.begin(), blocks.end());
    else narrow.assign(blocks.begin(), blocks.end());
  }
  ldr_block_list_t get() const {
    if (!wide.empty()) return {wide.data(), wide.size(), 8, 0};
    return {narrow.empty() ? nullptr : narrow.data(), narrow.size(), 4, 0};
  }
};

// Moves as the specification writes them, inside a copy of the arena.
struct Model {
  Bytes bytes;
  const uint64_t base;
  explicit Model(const Bytes &arena) : bytes(arena), base(address_of(arena.data())) {}

  void move(uint64_t dst, uint64_t src, uint64_t size) {
    Bytes taken;
    for (uint64_t b = 0; b < size; ++b) taken.push_back(bytes.at(src - base + b));
    for (uint64_t b = 0; b < size; ++b) bytes.at(dst - base + b) = taken[b];
  }
  void move_pairs(uint64_t dst, uint64_t src, uint64_t stride, const std::vector<uint64_t> &src_blocks, const std::vector<uint64_t> &dst_blocks) {
    for (size_t first = 0, last; first < src_blocks.size(); first = last) {
      last = first + 1;
      while (last < src_blocks.size() && src_blocks[last] == src_blocks[last - 1] + 1 && dst_blocks[last] == dst_blocks[last - 1] + 1) ++last;
      move(dst + dst_blocks[first] * stride, src + src_blocks[first] * stride, (last - first) * stride);
    }
  }
  void check(const Bytes &arena, uint64_t seed) const {
    if (arena != bytes) ldr_test::failed(__FILE__, __LINE__, "bytes differ, seed " + std::to_string(seed));
  }
};

ldr_local_copy_params_t entry_params(int64_t src, int64_t dst) {
  ldr_local_copy_params_t p{};
  p.struct_size = sizeof(p);
  p.move = LDR_MOVE_ENTRY;
  p.src_cache_id = src;
  p.dst_cache_id = dst;
  p.size_bytes = -1;
  return p;
}

ldr_local_copy_params_t block_params(int64_t src, int64_t dst, const List &src_blocks, const List &dst_blocks) {
  ldr_local_copy_params_t p{};
  p.struct_size = sizeof(p);
  p.move = LDR_MOVE_BLOCKS;
  p.src_cache_id = src;
  p.dst_cache_id = dst;
  p.src_blocks = src_blocks.get();
  p.dst_blocks = dst_blocks.get();
  return p;
}

void random_entries() {
  Table table;
  for (uint64_t seed = 0; seed < 2000; ++seed) {
    Random random(seed);
    Bytes arena = random_bytes(600, random);
    uint32_t num_tensors = 1 + random() % 3;
    Shape src = random_shape(arena, num_tensors, 1 + random() % 5, 1 + random() % 40, random);
    Shape dst = random() % 4 ? random_shape(arena, num_tensors, 1 + random() % 5, 1 + random() % 40, random) : src;
    auto p = entry_params(src.add_to(*table.caches), dst.add_to(*table.caches));
    if (random() % 4 == 0) dst = src, p.dst_cache_id = p.src_cache_id;
    p.src_batch_index = uint32_t(random() % src.num_entries);
    p.dst_batch_index = uint32_t(random() % dst.num_entries);
    const uint64_t least = std::min(src.stride, dst.stride);
    p.offset_bytes = random() % 2 ? random() % least : 0;
    if (src.stride > dst.stride || random() % 2) p.size_bytes = int64_t(1 + random() % (least - p.offset_bytes));
    const uint64_t size = p.size_bytes > 0 ? uint64_t(p.size_bytes) : src.stride - p.offset_bytes;
    Model model(arena);
    for (uint32_t i = 0; i < num_tensors; ++i) {
      model.move(dst.addresses[i] + p.dst_batch_index * dst.stride + p.offset_bytes, src.addresses[i] + p.src_batch_index * src.stride + p.offset_bytes, size);
    }
    CHECK_OK(copy_caches(*table.caches, p, keep_going));
    model.check(arena, seed);
    for (int64_t id : {p.src_cache_id, p.src_cache_id + 1}) table.caches->remove(id);
  }
}

// Stretches of neighbours and single blocks.
std::vector<uint64_t> random_list(size_t count, uint64_t num_blocks, Random &random) {
  std::vector<uint64_t> blocks;
  while (blocks.size() < count) {
    uint64_t next = blocks.empty() || random() % 3 == 0 ? random() % num_blocks : (blocks.back() + 1) % num_blocks;
    blocks.push_back(next);
  }
  return blocks;
}

void random_blocks() {
  ldr_test::TestEngine engine(1);
  Table table;
  for (uint64_t seed = 0; seed < 2000; ++seed) {
    Random random(seed);
    Bytes arena = random_bytes(600, random);
    uint32_t num_tensors = 1 + random() % 3;
    const uint64_t stride = 1 + random() % 24;
    Shape src = random_shape(arena, num_tensors, 1 + random() % 16, stride, random);
    Shape dst = random() % 2 ? random_shape(arena, num_tensors, 1 + random() % 16, stride, random) : src;
    const size_t count = random() % 20;
    std::vector<uint64_t> from = random_list(count, src.num_entries, random), to = random_list(count, dst.num_entries, random);
    List src_list(from, random() % 2), dst_list(to, random() % 2);
    Model model(arena);
    for (uint32_t i = 0; i < num_tensors; ++i) model.move_pairs(dst.addresses[i], src.addresses[i], stride, from, to);
    if (random() % 2) {
      const int64_t src_id = src.add_to(*table.caches), dst_id = dst.add_to(*table.caches);
      CHECK_OK(copy_caches(*table.caches, block_params(src_id, dst_id, src_list, dst_list), keep_going));
      table.caches->remove(src_id);
      table.caches->remove(dst_id);
    } else {
      ldr_raw_copy_params_t p{sizeof(p), num_tensors, src.addresses.data(), dst.addresses.data(), stride, src_list.get(), dst_list.get()};
      CHECK_C(ldr_raw_copy(engine, &p), LDR_OK);
    }
    model.check(arena, seed);
  }
}

// However a copy is divided, also where source and destination overlap either way.
void parts() {
  for (uint64_t seed = 0; seed < 3000; ++seed) {
    Random random(seed);
    Bytes arena = random_bytes(300, random);
    const uint32_t num_tensors = 1 + random() % 3;
    std::vector<Run> runs;
    uint64_t total = 0;
    for (size_t k = random() % 4; k-- > 0;) {
      runs.push_back({random() % 50, random() % 50, 1 + random() % 150});
      total += runs.back().size_bytes * num_tensors;
    }
    std::vector<uint64_t> src, dst;
    for (uint32_t i = 0; i < num_tensors; ++i) {
      src.push_back(address_of(arena.data()) + random() % 100);
      dst.push_back(address_of(arena.data()) + random() % 100);
    }
    Model model(arena);
    for (uint32_t i = 0; i < num_tensors; ++i) {
      for (const Run &run : runs) model.move(dst[i] + run.dst_offset, src[i] + run.src_offset, run.size_bytes);
    }
    LocalMove move(src, dst, runs);
    const uint64_t max_bytes = 1 + random() % 60;
    const uint32_t max_runs = 1 + uint32_t(random() % 3);
    size_t turns = 0;
    for (; !move.done(); ++turns) move.move_some(max_bytes, max_runs);
    CHECK(turns >= (total + max_bytes - 1) / max_bytes);
    CHECK(turns >= (runs.size() * num_tensors + max_runs - 1) / max_runs);
    model.check(arena, seed);
  }
}

struct Pair {
  Table table;
  Bytes from = Bytes(64 * 8, 1), to = Bytes(64 * 8, 2);
  int64_t src = add(64, 2, from), dst = add(64, 2, to), short_entries = add(32, 2, to), one_tensor = add(64, 1, to);

  int64_t add(uint64_t stride, uint32_t num_tensors, const Bytes &memory) {
    Shape shape;
    shape.num_entries = 4;
    shape.stride = stride;
    shape.addresses.assign(num_tensors, address_of(memory.data()));
    return shape.add_to(*table.caches);
  }
  void refuses(const ldr_local_copy_params_t &p, ldr_status_t code, const char *text) {
    Status status = copy_caches(*table.caches, p, keep_going);
    CHECK_CODE(status, code);
    CHECK_CONTAINS(status.text, text);
    CHECK(std::all_of(to.begin(), to.end(), [](uint8_t byte) { return byte == 2; }));
  }
};

// Each fault stays when the next is added before it, so that the order is seen too.
void refusals_of_entries() {
  Pair pair;
  auto p = entry_params(pair.src, pair.dst);
  p.size_bytes = 65;
  pair.refuses(p, LDR_ERR_INVALID, "65 bytes at offset 0 do not fit");
  p.offset_bytes = 64;
  pair.refuses(p, LDR_ERR_INVALID, "offset 64 is not inside");
  p.dst_batch_index = 4;
  pair.refuses(p, LDR_ERR_INVALID, "batch index 4, but the destination");
  p.src_batch_index = 5;
  pair.refuses(p, LDR_ERR_INVALID, "batch index 5, but the source");
  p.dst_cache_id = pair.one_tensor;
  pair.refuses(p, LDR_ERR_INVALID, "the source cache has 2 tensors, the destination cache 1");
  p.dst_cache_id = 99;
  pair.refuses(p, LDR_ERR_NO_CACHE, "no destination cache 99");
  p.src_cache_id = -1;
  pair.refuses(p, LDR_ERR_NO_CACHE, "no source cache -1");
  for (int64_t size : {int64_t(0), int64_t(-2)}) {
    p.size_bytes = size;
    pair.refuses(p, LDR_ERR_INVALID, "-1 or more than 0");
  }
  p.move = LDR_MOVE_ENTRY_TO_BLOCKS;
  pair.refuses(p, LDR_ERR_INVALID, "move 2");

  const List blocks({1}, true);
  p = entry_params(pair.src, pair.dst);
  p.src_blocks = blocks.get();
  pair.refuses(p, LDR_ERR_INVALID, "block lists given");
  p = entry_params(pair.src, pair.short_entries);
  pair.refuses(p, LDR_ERR_INVALID, "64 bytes at offset 0 do not fit");  // -1 is the source's entry
  p.offset_bytes = 32;
  pair.refuses(p, LDR_ERR_INVALID, "destination entries of 32");
  p.size_bytes = 20, p.offset_bytes = 13;
  pair.refuses(p, LDR_ERR_INVALID, "20 bytes at offset 13");
  p = entry_params(pair.src, pair.dst);
  p.size_bytes = INT64_MAX, p.offset_bytes = 63;
  pair.refuses(p, LDR_ERR_INVALID, "do not fit");
  p.offset_bytes = UINT64_MAX;
  pair.refuses(p, LDR_ERR_INVALID, "is not inside");
}

void refusals_of_blocks() {
  Pair pair;
  auto refuses = [&](std::vector<uint64_t> from, std::vector<uint64_t> to, ldr_status_t code, const char *text, int64_t dst = 0) {
    for (bool is_wide : {false, true}) {
      const List src_list(from, is_wide), dst_list(to, is_wide);
      pair.refuses(block_params(pair.src, dst ? dst : pair.dst, src_list, dst_list), code, text);
    }
  };
  refuses({0, 1}, {2, 4}, LDR_ERR_INVALID, "dst_blocks[1] is 4, but the destination");
  refuses({0, 4}, {2, 4}, LDR_ERR_INVALID, "src_blocks[1] is 4, but the source");
  refuses({uint64_t(-1)}, {0}, LDR_ERR_INVALID, "src_blocks[0] is -1");
  refuses({0}, {uint64_t(-7)}, LDR_ERR_INVALID, "dst_blocks[0] is -7");
  refuses({4}, {0}, LDR_ERR_INVALID, "destination blocks 32", pair.short_entries);
  refuses({4}, {0}, LDR_ERR_INVALID, "the destination cache 1", pair.one_tensor);
  refuses({4}, {0}, LDR_ERR_NO_CACHE, "no destination cache 77", 77);
  refuses({0, 1}, {0}, LDR_ERR_INVALID, "2 source blocks for 1", 77);
  const List none({}, false);
  CHECK_OK(copy_caches(*pair.table.caches, block_params(pair.src, pair.dst, none, none), keep_going));
  pair.refuses(block_params(99, pair.dst, none, none), LDR_ERR_NO_CACHE, "no source cache 99");
}

void refusals_of_raw() {
  ldr_test::TestEngine engine(1);
  Bytes from(64, 1), to(64, 2);
  const uint64_t src = address_of(from.data()), dst = address_of(to.data()), zero = 0;
  const List one({1}, false), two({0, 1}, false), none({}, false), negative({uint64_t(-1)}, false);
  auto run = [&](const uint64_t *sources, const uint64_t *destinations, uint64_t block_bytes, const List &from_list, const List &to_list, uint32_t num_tensors = 1) {
    ldr_raw_copy_params_t p{sizeof(p), num_tensors, sources, destinations, block_bytes, from_list.get(), to_list.get()};
    return ldr_raw_copy(engine, &p);
  };
  CHECK_C(run(&src, &dst, 8, one, two), LDR_ERR_INVALID);
  CHECK_C(run(&src, &dst, 0, one, one), LDR_ERR_INVALID);
  CHECK_C(run(nullptr, &dst, 8, one, one), LDR_ERR_INVALID);
  CHECK_C(run(&src, nullptr, 8, one, one), LDR_ERR_INVALID);
  CHECK_C(run(&zero, &dst, 8, one, one), LDR_ERR_INVALID);
  CHECK_C(run(&src, &zero, 8, one, one), LDR_ERR_INVALID);
  CHECK_CONTAINS(ldr_last_error(), "tensor 0 at address 0");
  CHECK_C(run(&src, &dst, 8, negative, one), LDR_ERR_INVALID);
  CHECK_CONTAINS(ldr_last_error(), "src_blocks reaches block -1");
  CHECK_C(run(&src, &dst, 8, one, negative), LDR_ERR_INVALID);
  CHECK_C(run(&src, &dst, UINT64_MAX / 2, one, one), LDR_ERR_INVALID);  // ends beyond the address space
  CHECK_C(ldr_raw_copy(engine, nullptr), LDR_ERR_INVALID);
  CHECK_C(run(&src, &dst, 8, none, none), LDR_OK);
  CHECK_C(run(nullptr, nullptr, 8, one, one, 0), LDR_OK);
  CHECK(to == Bytes(64, 2));
  CHECK_C(run(&src, &dst, 8, one, one), LDR_OK);
  CHECK_EQ(std::count(to.begin(), to.end(), 1), 8);
  CHECK_EQ(int(to[8]), 1);
}

// An unregistration between two batches: what was written stays, nothing more is.
void ends_between_batches() {
  constexpr uint64_t kSize = 10u << 20, kBatch = 4u << 20;
  for (int what : {0, 1, 2}) {  // the source goes, the destination goes, the caller has enough
    Table table;
    Bytes from(kSize, 1), to(kSize, 2);
    Shape shape;
    shape.stride = kSize;
    shape.addresses = {address_of(from.data())};
    const int64_t src = shape.add_to(*table.caches);
    shape.addresses = {address_of(to.data())};
    const int64_t dst = shape.add_to(*table.caches);
    int asked = 0;
    auto go_on = [&]() -> Status {
      if (++asked < 3) return Status::success();
      if (what == 2) return fail(LDR_ERR_CLOSED, "enough");
      table.caches->remove(what == 0 ? src : dst);
      return Status::success();
    };
    Status status = copy_caches(*table.caches, entry_params(src, dst), go_on);
    CHECK_CODE(status, what == 2 ? LDR_ERR_CLOSED : LDR_ERR_NO_CACHE);
    CHECK_EQ(asked, 3);
    CHECK(to[2 * kBatch - 1] == 1 && to[2 * kBatch] == 2);
    CHECK_EQ(std::count(to.begin(), to.end(), 1), std::ptrdiff_t(2 * kBatch));
  }
}

// Memory is freed as soon as its cache is unregistered; the sanitizer sees whoever touches it then.
void unregistered_by_another_thread() {
  for (bool source_goes : {true, false}) {
    Table table;
    Bytes stays(1u << 20);
    auto goes = std::make_unique<Bytes>(1u << 20);
    Shape shape;
    shape.num_entries = 16;
    shape.stride = 65536;
    shape.addresses = {address_of(goes->data())};
    const int64_t leaving = shape.add_to(*table.caches);
    shape.addresses = {address_of(stays.data())};
    const int64_t staying = shape.add_to(*table.caches);
    std::atomic<int> copies{0};
    std::thread copier([&] {
      auto p = source_goes ? entry_params(leaving, staying) : entry_params(staying, leaving);
      Status status;
      for (; status.ok(); ++copies) status = copy_caches(*table.caches, p, keep_going);
      CHECK_CODE(status, LDR_ERR_NO_CACHE);
    });
    while (copies < 100) std::this_thread::yield();
    table.caches->remove(leaving);
    goes.reset();
    copier.join();
  }
}

// Without the stop it would take minutes. A shared file shows that it has begun, whatever a thread checker thinks of looking at the memory itself.
void a_shutdown_ends_a_long_copy() {
  constexpr uint64_t kBlock = 1u << 20;
  const int fd = memfd_create("test", MFD_CLOEXEC);
  CHECK(fd >= 0 && ftruncate(fd, 2 * kBlock) == 0);
  void *memory = mmap(nullptr, 2 * kBlock, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  CHECK(memory != MAP_FAILED);
  memset(memory, 7, kBlock);
  ldr_test::TestEngine engine(1);
  Shape shape;
  shape.num_entries = 2;
  shape.stride = kBlock;
  shape.addresses = {address_of(memory)};
  const ldr_cache_params_t params = shape.params();
  int64_t id = 0;
  CHECK_C(ldr_cache_register(engine, &params, &id), LDR_OK);
  const List from(std::vector<uint64_t>(1000000, 0), false), to(std::vector<uint64_t>(1000000, 1), false);
  std::thread copier([&] {
    const auto p = block_params(id, id, from, to);
    CHECK_C(ldr_cache_copy(engine, &p), LDR_ERR_CLOSED);
    CHECK_CONTAINS(ldr_last_error(), "during a local copy from cache 1 to cache 1");
  });
  for (char byte = 0; byte != 7;) CHECK_EQ(pread(fd, &byte, 1, kBlock), ssize_t(1));
  ldr_engine_shutdown(engine);
  copier.join();
  // Only the handle is left, and answers.
  ldr_engine_info_t info;
  const ldr_raw_copy_params_t raw{};
  CHECK_C(ldr_engine_info(engine, &info), LDR_ERR_CLOSED);
  CHECK_C(ldr_raw_copy(engine, &raw), LDR_ERR_CLOSED);
  CHECK_EQ(ldr_engine_event_fd(engine), -1);
  ldr_engine_shutdown(engine);
  engine.destroy();
  munmap(memory, 2 * kBlock);
  close(fd);
}

void through_the_c_functions() {
  ldr_test::TestEngine engine(1);
  Bytes memory(256);
  for (size_t b = 0; b < memory.size(); ++b) memory[b] = uint8_t(b);
  Shape shape;
  shape.num_entries = 8;
  shape.stride = 32;
  shape.addresses = {address_of(memory.data())};
  const ldr_cache_params_t params = shape.params();
  int64_t id = 0;
  CHECK_C(ldr_cache_register(engine, &params, &id), LDR_OK);
  const List from({0, 0, 1}, false), to({5, 7, 6}, true);
  auto p = block_params(id, id, from, to);
  CHECK_C(ldr_cache_copy(engine, &p), LDR_OK);
  for (uint64_t b = 0; b < 32; ++b) CHECK(memory[160 + b] == b && memory[224 + b] == b && memory[192 + b] == 32 + b && memory[128 + b] == 128 + b);
  p = entry_params(id, id);
  p.src_batch_index = 2, p.dst_batch_index = 3, p.offset_bytes = 30;
  CHECK_C(ldr_cache_copy(engine, &p), LDR_OK);
  CHECK(memory[125] == 125 && memory[126] == 94 && memory[127] == 95 && memory[128] == 128);
  CHECK_C(ldr_cache_copy(engine, nullptr), LDR_ERR_INVALID);
  CHECK_C(ldr_cache_copy(nullptr, &p), LDR_ERR_INVALID);
  CHECK_C(ldr_cache_unregister(engine, id), LDR_OK);
  CHECK_C(ldr_cache_copy(engine, &p), LDR_ERR_NO_CACHE);
}

}  // namespace

int main() {
  test("random entries, also over each other", random_entries);
  test("random blocks, by cache and by address", random_blocks);
  test("in parts of any size", parts);
  test("refusals of entries, in order", refusals_of_entries);
  test("refusals of blocks, in order", refusals_of_blocks);
  test("refusals of raw copies", refusals_of_raw);
  test("ends between two batches", ends_between_batches);
  test("unregistered by another thread", unregistered_by_another_thread);
  test("a shutdown ends a long copy", a_shutdown_ends_a_long_copy);
  test("through the C functions", through_the_c_functions);
}
