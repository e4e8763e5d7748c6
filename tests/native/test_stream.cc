// Transfers between two engines over data connections.
#include "stream_fixture.h"

using namespace ldr_test;

namespace {

// Two engines and a link between them with two data connections.
struct Pair {
  explicit Pair(uint32_t flags = LDR_ENGINE_REMOTE_ACCESS) : a(make_engine(1, flags)), b(make_engine(2, flags)) {
    Fd control_a, control_b;
    std::vector<Fd> data_a(2), data_b(2);
    socket_pair(&control_a, &control_b);
    for (int i = 0; i < 2; ++i) socket_pair(&data_a[i], &data_b[i]);
    link_a = make_link(*a, 2, std::move(control_a), std::move(data_a));
    link_b = make_link(*b, 1, std::move(control_b), std::move(data_b));
  }
  ~Pair() {
    (void)link_a->close(true, kNever);
    (void)link_b->close(true, kNever);
  }
  std::unique_ptr<Engine> a, b;
  LinkPtr link_a, link_b;
};

void one_small_piece() {
  Pair pair;
  TestCache local(*pair.a, 1, 4096, 1), remote(*pair.b, 2, 4096, 2);
  for (int round : {0, 1}) {
    std::vector<uint8_t> before = local.tensors[0];
    Run run(pair.link_a, LDR_PULL, local.cache, remote.cache);
    run.piece(local.cache->addresses[0] + 10, 1, 20, 100).start();
    CHECK_OK(run.wait());
    memcpy(&before[10], &remote.tensors[1][20], 100);
    CHECK(local.tensors[0] == before);
    CHECK_EQ(run.job->op->bytes_done.load(), 100u);
    std::fill(local.tensors[0].begin(), local.tensors[0].end(), uint8_t(round));
  }
  CHECK_EQ(pair.b->bytes_served[LDR_PATH_UNIX].load(), 200u);
}

// More than the window of both connections, in pieces smaller and larger than a chunk, with gaps.
void many_chunks(uint32_t direction) {
  Pair pair;
  constexpr uint64_t kSize = 24 * kMiB;
  TestCache local(*pair.a, 2, kSize, 1), remote(*pair.b, 2, kSize, 2);
  std::vector<std::vector<uint8_t>> expected_local = local.tensors, expected_remote = remote.tensors;
  Run run(pair.link_a, direction, local.cache, remote.cache);
  std::mt19937_64 random(5);
  uint64_t total = 0;
  for (uint32_t tensor = 0; tensor < 2; ++tensor) {
    for (uint64_t at = 0; at < kSize;) {
      uint64_t size = random() % 50 == 0 ? 2 * kMiB + random() % 4096 : 1 + random() % 5000;
      size = std::min(size, kSize - at);
      run.piece(local.cache->addresses[tensor] + at, 1 - tensor, at, size);
      uint8_t *here = &expected_local[tensor][at], *there = &expected_remote[1 - tensor][at];
      direction == LDR_PULL ? memcpy(here, there, size) : memcpy(there, here, size);
      total += size;
      at += size + random() % 100;
    }
  }
  CHECK_OK(run.start().wait());
  CHECK(local.tensors == expected_local);
  CHECK(remote.tensors == expected_remote);
  CHECK_EQ(run.job->op->bytes_done.load(), total);
  CHECK_EQ(pair.b->bytes_served[LDR_PATH_UNIX].load(), total);
}

// Four jobs at once on the same two connections: both ends pull and push.
void all_directions_at_once() {
  Pair pair;
  constexpr uint64_t kSize = 4 * kMiB;
  TestCache pull_to_a(*pair.a, 4, kSize, 1), push_from_a(*pair.a, 4, kSize, 2), pull_from_a(*pair.a, 4, kSize, 3), push_to_a(*pair.a, 4, kSize, 4);
  TestCache pull_from_b(*pair.b, 4, kSize, 5), push_to_b(*pair.b, 4, kSize, 6), pull_to_b(*pair.b, 4, kSize, 7), push_from_b(*pair.b, 4, kSize, 8);
  for (int round = 0; round < 3; ++round) {
    Run runs[] = {Run(pair.link_a, LDR_PULL, pull_to_a.cache, pull_from_b.cache), Run(pair.link_a, LDR_PUSH, push_from_a.cache, push_to_b.cache),
                  Run(pair.link_b, LDR_PULL, pull_to_b.cache, pull_from_a.cache), Run(pair.link_b, LDR_PUSH, push_from_b.cache, push_to_a.cache)};
    for (Run &run : runs) run.everything().start();
    for (Run &run : runs) CHECK_OK(run.wait());
    CHECK(pull_to_a.tensors == pull_from_b.tensors);
    CHECK(push_to_b.tensors == push_from_a.tensors);
    CHECK(pull_to_b.tensors == pull_from_a.tensors);
    CHECK(push_to_a.tensors == push_from_b.tensors);
    for (TestCache *cache : {&pull_from_a, &pull_from_b, &push_from_a, &push_from_b}) {
      for (auto &tensor : cache->tensors) tensor[size_t(round)] ^= 0xFF, tensor.back() ^= 0xFF;
    }
  }
}

void owner_checks_ranges_and_rights() {
  Pair pair;
  TestCache local(*pair.a, 1, 4096, 1), remote(*pair.b, 2, 4096, 2), closed(*pair.b, 1, 4096, 3, false);
  const std::vector<uint8_t> before = local.tensors[0];
  const auto remote_before = remote.tensors;
  auto refused = [&](const TestCache &of, uint32_t tensor, uint64_t offset, ldr_status_t expected, const char *text) {
    for (uint32_t direction : {LDR_PULL, LDR_PUSH}) {
      Run run(pair.link_a, direction, local.cache, of.cache);
      Status status = run.piece(local.cache->addresses[0], tensor, offset, 100).start().wait();
      CHECK_CODE(status, expected);
      CHECK_CONTAINS(status.text, text);
      CHECK_CONTAINS(status.text, "cluster 2");
      CHECK_EQ(run.job->op->bytes_done.load(), 0u);
    }
  };
  refused(remote, 2, 0, LDR_ERR_INVALID, "outside its cache");
  refused(remote, 1, 3997, LDR_ERR_INVALID, "outside its cache");
  refused(remote, 0, UINT64_MAX - 10, LDR_ERR_INVALID, "outside its cache");
  refused(closed, 0, 0, LDR_ERR_INVALID, "not accessible");
  CachePtr gone = remote.cache;
  remote.remove();
  refused(remote, 0, 0, LDR_ERR_NO_CACHE, "gone");
  CHECK(local.tensors[0] == before);
  CHECK(remote.tensors == remote_before);
  CHECK(pair.link_a->ready() && pair.link_b->ready());
}

void two_sided_serves_reads_only() {
  Pair pair(0);
  TestCache local(*pair.a, 1, 4096, 1), remote(*pair.b, 1, 4096, 2, false);
  CHECK_OK(Run(pair.link_a, LDR_PULL, local.cache, remote.cache).everything().start().wait());
  CHECK(local.tensors == remote.tensors);
  CHECK_CODE(Run(pair.link_a, LDR_PUSH, local.cache, remote.cache).everything().start().wait(), LDR_ERR_INVALID);
}

// Memory that nobody can touch, at either end: an error, and the connection goes on.
void bad_addresses() {
  Pair pair;
  TestCache good_a(*pair.a, 1, kMiB, 1), good_b(*pair.b, 1, kMiB, 2), bad_a(*pair.a, {4096}, kMiB), bad_b(*pair.b, {4096}, kMiB);
  CHECK_CODE(Run(pair.link_a, LDR_PULL, good_a.cache, bad_b.cache).everything().start().wait(), LDR_ERR_NO_CACHE);
  CHECK_CODE(Run(pair.link_a, LDR_PUSH, good_a.cache, bad_b.cache).everything().start().wait(), LDR_ERR_NO_CACHE);
  CHECK_CODE(Run(pair.link_a, LDR_PULL, bad_a.cache, good_b.cache).everything().start().wait(), LDR_ERR_INVALID);
  CHECK_CODE(Run(pair.link_a, LDR_PUSH, bad_a.cache, good_b.cache).everything().start().wait(), LDR_ERR_INVALID);
  CHECK_OK(Run(pair.link_a, LDR_PULL, good_a.cache, good_b.cache).everything().start().wait());
  CHECK(good_a.tensors == good_b.tensors);
}

void grant_version_is_checked() {
  Pair pair;
  TestCache local(*pair.a, 1, 4096, 1), remote(*pair.b, 1, 4096, 2);
  Run run(pair.link_a, LDR_PULL, local.cache, remote.cache);
  run.job->has_grant = true;
  run.job->grant_slot = 7;
  run.job->grant_version = pair.b->page->grant_version(7);
  CHECK_OK(run.everything().start().wait());
  pair.b->page->advance_grant(7);
  Run late(pair.link_a, LDR_PULL, local.cache, remote.cache);
  late.job->has_grant = true;
  late.job->grant_slot = 7;
  late.job->grant_version = run.job->grant_version;
  CHECK_CODE(late.everything().start().wait(), LDR_ERR_STALE);
  late.job->grant_slot = kNumGrantSlots;
  late.state = std::make_shared<Run::State>();
  late.job->op = std::make_shared<Op>();
  CHECK_CODE(late.start().wait(), LDR_ERR_INVALID);
}

}  // namespace

int main() {
  test("one small piece", one_small_piece);
  test("many chunks, pull", [] { many_chunks(LDR_PULL); });
  test("many chunks, push", [] { many_chunks(LDR_PUSH); });
  test("all directions at once", all_directions_at_once);
  test("the owner checks ranges and rights", owner_checks_ranges_and_rights);
  test("two-sided serves reads only", two_sided_serves_reads_only);
  test("bad addresses", bad_addresses);
  test("the grant's version is checked", grant_version_is_checked);
  return 0;
}
