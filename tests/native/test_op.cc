#include "op.h"

#include <atomic>
#include <condition_variable>
#include <thread>
#include <vector>

#include "check.h"
#include "clock.h"
#include "engine.h"

using namespace ldr;
using ldr_test::test;

namespace {

std::unique_ptr<Engine> make_engine() {
  ldr_engine_params_t params{};
  params.struct_size = sizeof(params);
  params.cluster_id = 1;
  std::unique_ptr<Engine> engine;
  CHECK_OK(Engine::create(params, &engine));
  return engine;
}

void first_reason_wins() {
  Op op;
  int calls = 0;
  op.on_stop([&] { ++calls; });
  CHECK(!op.stopped());
  CHECK(op.stop(LDR_ERR_TIMEOUT, "late"));
  CHECK(!op.stop(LDR_ERR_CANCELLED, "cancelled"));
  CHECK_EQ(calls, 1);
  CHECK_EQ(op.stop_status().code, ldr_status_t(LDR_ERR_TIMEOUT));
  CHECK_EQ(op.stop_status().text, std::string("late"));
  op.on_stop([&] { ++calls; });
  CHECK_EQ(calls, 2);  // at once
}

void one_winner_among_many() {
  for (int round = 0; round < 200; ++round) {
    Op op;
    std::atomic<int> wins{0}, calls{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < 3; ++i) threads.emplace_back([&, i] { wins += op.stop(LDR_ERR_CANCELLED, std::to_string(i)); });
    op.on_stop([&] { ++calls; });
    for (auto &thread : threads) thread.join();
    CHECK_EQ(wins.load(), 1);
    CHECK_EQ(calls.load(), 1);
  }
}

void submitted_gives_one_event() {
  auto engine = make_engine();
  OpPtr op;
  CHECK_OK(engine->ops.begin(false, 77, &op));
  CHECK(op->id != 0);
  CHECK(engine->ops.find(op->id) == op);
  CHECK_EQ(engine->ops.in_flight(), 1u);
  op->bytes_done = 5;
  op->path = LDR_PATH_CMA;
  engine->ops.complete(op, fail(LDR_ERR_NO_CACHE, "gone"));
  engine->ops.complete(op, Status::success());  // a second one is nothing
  CHECK(!engine->ops.find(op->id));
  CHECK_EQ(engine->ops.in_flight(), 0u);
  ldr_event_t events[4];
  uint32_t count = 0;
  CHECK_OK(engine->events.take(events, 4, 0, &count));
  CHECK_EQ(count, 1u);
  CHECK_EQ(events[0].id, op->id);
  CHECK_EQ(events[0].user_tag, uint64_t(77));
  CHECK_EQ(events[0].bytes, uint64_t(5));
  CHECK_EQ(events[0].status, int32_t(LDR_ERR_NO_CACHE));
  CHECK_EQ(events[0].kind, uint16_t(LDR_EVENT_OP));
  CHECK_EQ(events[0].path, uint16_t(LDR_PATH_CMA));
  std::string text;
  CHECK(engine->ops.error_text(op->id, &text));
  CHECK_EQ(text, std::string("gone"));
}

void waited_runs_its_tasks_itself() {
  auto engine = make_engine();
  OpPtr op;
  CHECK_OK(engine->ops.begin(true, 0, &op));
  std::thread::id ran_on;
  std::thread other([&] {
    engine->ops.resume(op, [&] {
      ran_on = std::this_thread::get_id();
      engine->ops.complete(op, fail(LDR_ERR_STALE, "old"));
    });
  });
  CHECK_CODE(engine->ops.wait(op), LDR_ERR_STALE);
  CHECK(ran_on == std::this_thread::get_id());
  other.join();
  ldr_event_t event;
  uint32_t count = 1;
  CHECK_OK(engine->events.take(&event, 1, 0, &count));
  CHECK_EQ(count, 0u);  // no event for a waited one
}

void submitted_goes_on_on_a_copy_thread() {
  auto engine = make_engine();
  OpPtr op;
  CHECK_OK(engine->ops.begin(false, 0, &op));
  std::thread::id ran_on;
  engine->ops.resume(op, [&] {
    ran_on = std::this_thread::get_id();
    engine->ops.complete(op, Status::success());
  });
  ldr_event_t event;
  uint32_t count = 0;
  CHECK_OK(engine->events.take(&event, 1, 20 * kSecond, &count));
  CHECK_EQ(count, 1u);
  CHECK(ran_on != std::this_thread::get_id());
}

void handler_goes_with_the_completion() {
  auto engine = make_engine();
  OpPtr op;
  CHECK_OK(engine->ops.begin(false, 0, &op));
  auto held = std::make_shared<int>(0);
  std::weak_ptr<int> watch = held;
  op->on_stop([held = std::move(held)] {});
  engine->ops.complete(op, Status::success());
  CHECK(watch.expired());
}

void last_failures_are_kept() {
  auto engine = make_engine();
  std::vector<uint64_t> ids;
  for (int i = 0; i < 1030; ++i) {
    OpPtr op;
    CHECK_OK(engine->ops.begin(true, 0, &op));
    engine->ops.complete(op, fail(LDR_ERR_INTERNAL, "failure %d", i));
    CHECK_CODE(engine->ops.wait(op), LDR_ERR_INTERNAL);
    if (!ids.empty()) CHECK(op->id > ids.back());
    ids.push_back(op->id);
  }
  std::string text;
  CHECK(!engine->ops.error_text(ids[5], &text));
  CHECK(engine->ops.error_text(ids[6], &text));
  CHECK_EQ(text, std::string("failure 6"));
  CHECK(engine->ops.error_text(ids[1029], &text));
}

void bounded() {
  auto engine = make_engine();
  std::vector<OpPtr> ops(65536);
  for (OpPtr &op : ops) CHECK_OK(engine->ops.begin(true, 0, &op));
  OpPtr extra;
  CHECK_CODE(engine->ops.begin(true, 0, &extra), LDR_ERR_BUSY);
  engine->ops.complete(ops[0], Status::success());
  CHECK_OK(engine->ops.begin(true, 0, &ops[0]));
  for (OpPtr &op : ops) engine->ops.complete(op, Status::success());
}

void close_stops_and_waits() {
  auto engine = make_engine();
  OpTable ops(*engine);
  OpPtr op;
  CHECK_OK(ops.begin(false, 0, &op));
  std::atomic<bool> completed{false};
  std::thread worker;
  op->on_stop([&] {
    worker = std::thread([&] {
      completed = true;
      ops.complete(op, op->stop_status());
    });
  });
  ops.close();
  ops.wait_all();
  CHECK(completed.load());
  worker.join();
  OpPtr late;
  CHECK_CODE(ops.begin(false, 0, &late), LDR_ERR_CLOSED);
  std::string text;
  CHECK(ops.error_text(op->id, &text));
  CHECK_CONTAINS(text, "destroyed");
}

}  // namespace

int main() {
  test("the first reason to stop wins", first_reason_wins);
  test("one winner among many threads", one_winner_among_many);
  test("a submitted operation gives one event", submitted_gives_one_event);
  test("a waited operation runs its tasks itself", waited_runs_its_tasks_itself);
  test("a submitted operation goes on on a copy thread", submitted_goes_on_on_a_copy_thread);
  test("the stop handler goes with the completion", handler_goes_with_the_completion);
  test("the last 1024 failures are kept", last_failures_are_kept);
  test("operations in flight are bounded", bounded);
  test("close stops and waits", close_stops_and_waits);
}
