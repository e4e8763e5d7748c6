// Memory runs out at any one point of a transfer: it ends once, with a code, nothing moves afterwards, and the engines go on.
#include <pthread.h>

#include <atomic>
#include <cstdlib>
#include <new>

#include "end_to_end.h"

namespace {

// Allocations until the one that fails: of the thread that set it, or of the copy threads. Negative: none.
thread_local int64_t left_here = -1;
std::atomic<int64_t> left_in_copy_threads{-1};
std::atomic<bool> has_failed{false};

bool is_copy_thread() {
  static thread_local int known = -1;
  if (known < 0) {
    char name[16] = "";
    pthread_getname_np(pthread_self(), name, sizeof(name));
    if (!*name || strcmp(name, "ldr-copy") != 0) return false;  // it gets its name a little later
    known = 1;
  }
  return true;
}

bool must_fail() {
  if (left_here >= 0 && left_here-- == 0) return has_failed = true;
  if (left_in_copy_threads.load(std::memory_order_relaxed) < 0 || !is_copy_thread()) return false;
  if (left_in_copy_threads.fetch_sub(1) != 0) return false;
  return has_failed = true;
}

}  // namespace

__attribute__((noinline)) void *operator new(size_t size) {
  void *memory = must_fail() ? nullptr : malloc(size ? size : 1);
  if (!memory) throw std::bad_alloc();
  return memory;
}
__attribute__((noinline)) void *operator new(size_t size, const std::nothrow_t &) noexcept { return must_fail() ? nullptr : malloc(size ? size : 1); }
__attribute__((noinline)) void operator delete(void *memory) noexcept { free(memory); }
__attribute__((noinline)) void operator delete(void *memory, size_t) noexcept { free(memory); }
__attribute__((noinline)) void operator delete(void *memory, const std::nothrow_t &) noexcept { free(memory); }

using namespace ldr_test;

namespace {

enum class Where { kCaller, kCopyThreads };

void set_left(Where where, int64_t left) {
  if (where == Where::kCaller) left_here = left;
  else left_in_copy_threads = left;
}

bool is_linked(ldr_engine_t *engine) {
  ldr_link_info_t info;
  return ldr_link_query(engine, kSourceId, &info) == LDR_OK && info.state == LDR_LINK_READY;
}

struct Case {
  uint32_t path, direction, num_blocks;
  Where where;
  bool waited;
};

// Fails the nth allocation of a transfer. False: it had fewer.
bool fail_nth(const Case &c, Pair *pair, int64_t n) {
  constexpr uint64_t kStride = 64 << 10;
  TestCache source(pair->source, true, LDR_CACHE_BLOCKS, 1, c.num_blocks, kStride, 1), sink(pair->sink, true, LDR_CACHE_BLOCKS, 1, c.num_blocks, kStride, 2);
  std::vector<int32_t> blocks(c.num_blocks), reversed(c.num_blocks);
  for (uint32_t i = 0; i < c.num_blocks; ++i) reversed[c.num_blocks - 1 - i] = blocks[i] = int32_t(i);
  ldr_transfer_params_t params = transfer(c.direction, kSourceId, LDR_MOVE_BLOCKS, source.id, sink.id);
  params.src_blocks = list(blocks);
  params.dst_blocks = list(reversed);
  const TestCache &from = c.direction == LDR_PULL ? source : sink, &to = c.direction == LDR_PULL ? sink : source;
  std::vector<uint8_t> expected = to.bytes();
  for (uint32_t i = 0; i < c.num_blocks; ++i) expect(expected, to, 0, (c.num_blocks - 1 - i) * kStride, from, 0, i * kStride, kStride);

  has_failed = false;
  uint64_t op_id = 0;
  set_left(c.where, n);
  int32_t status = c.waited ? ldr_transfer(pair->sink, &params, nullptr) : ldr_transfer_submit(pair->sink, &params, 1, &op_id);
  if (c.where == Where::kCaller) left_here = -1;
  if (!c.waited && status == LDR_OK) status = next_op_event(pair->sink).status;
  set_left(c.where, -1);
  CHECK(status == LDR_OK || (has_failed && (status == LDR_ERR_NO_MEMORY || status == LDR_ERR_LINK_BROKEN)));
  if (status == LDR_OK) CHECK(memcmp(to.memory, expected.data(), expected.size()) == 0);
  // A link that outlived it is free, and carries the next one as if nothing had been. What was pushed into a broken one may still arrive.
  if (status != LDR_ERR_LINK_BROKEN && is_linked(pair->sink)) {
    memset(to.memory, 0xEE, to.size);
    const int32_t again = ldr_transfer(pair->sink, &params, nullptr);
    CHECK(again == LDR_OK || !is_linked(pair->sink));
    if (again == LDR_OK) CHECK(memcmp(to.memory, expected.data(), expected.size()) == 0);
  }
  return has_failed;
}

void fail_each(const Case &c) {
  const uint32_t path_set = 1u << c.path;
  auto pair = std::make_unique<Pair>(path_set, true);
  int64_t n = 0;
  for (; fail_nth(c, pair.get(), n); ++n) {
    CHECK(n < 2000);
    pair = std::make_unique<Pair>(path_set, true);
  }
  fprintf(stderr, "    %lld allocations\n", (long long)n);
  CHECK(n > 0 || c.where == Where::kCopyThreads);  // a small one needs none of those
}

}  // namespace

int main() {
  // Each path in both directions, each way of waiting, one and many pieces; not their product, which takes minutes.
  const struct {
    uint32_t path, direction, num_blocks;
    bool waited;
  } cases[] = {
      {LDR_PATH_SHM, LDR_PULL, 64, true},  {LDR_PATH_SHM, LDR_PUSH, 1, false}, {LDR_PATH_CMA, LDR_PULL, 1, true},
      {LDR_PATH_CMA, LDR_PUSH, 64, false}, {LDR_PATH_UNIX, LDR_PULL, 64, false}, {LDR_PATH_UNIX, LDR_PUSH, 64, true},
  };
  for (const auto &[path, direction, num_blocks, waited] : cases) {
    fprintf(stderr, " %s, %s of %u blocks, %s\n", ldr_path_name(path), direction == LDR_PULL ? "pull" : "push", num_blocks, waited ? "waited for" : "submitted");
    for (Where where : {Where::kCaller, Where::kCopyThreads}) {
      test(where == Where::kCaller ? "on the caller's thread" : "on a copy thread", [&] { fail_each({path, direction, num_blocks, where, waited}); });
    }
  }
}
