// A gate is a mutex, and who gives way comes behind who waits.
#include "engine/waiting/gate.h"

#include <atomic>
#include <thread>
#include <vector>

#include "tests/cpp/support/check.h"

using pycoll::engine::Gate;

TEST(one_thread_at_a_time) {
  Gate gate;
  long count = 0;
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int turn = 0; turn < 5000; ++turn) {
        const std::lock_guard<Gate> lock(gate);
        ++count;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(count == 20000, "counted %ld", count);
  CHECK(!gate.is_wanted(), "nobody waits any more");
}

TEST(who_gives_way_comes_behind_who_waits) {
  for (int round = 0; round < 200; ++round) {
    Gate gate;
    bool entered = false;
    gate.lock();
    std::thread other([&] {
      const std::lock_guard<Gate> lock(gate);
      entered = true;
    });
    while (!gate.is_wanted()) std::this_thread::yield();
    CHECK(!entered, "round %d: entered while the lock was held", round);
    gate.give_way();
    CHECK(entered, "round %d: the thread that gave way won", round);
    gate.unlock();
    other.join();
  }
}

TEST(a_crowd_gets_in_one_by_one) {
  constexpr int kThreads = 6;
  Gate gate;
  int entered = 0;
  gate.lock();
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&] {
      const std::lock_guard<Gate> lock(gate);
      ++entered;
    });
  }
  while (entered < kThreads) {
    if (gate.is_wanted()) gate.give_way();
  }
  gate.unlock();
  for (std::thread& thread : threads) thread.join();
  CHECK(entered == kThreads, "%d entered", entered);
}

TEST(a_lock_that_is_held_cannot_be_had_at_once) {
  Gate gate;
  CHECK(gate.try_lock(), "it is free");
  std::thread([&] { CHECK(!gate.try_lock(), "it is held"); }).join();
  gate.unlock();
  CHECK(gate.try_lock(), "it is free again");
  gate.unlock();
}

RUN_TESTS()
