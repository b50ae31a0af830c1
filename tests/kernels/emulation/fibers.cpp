// The threads of a cluster as fibers, in any order that CUDA allows.
#include "emulation.h"

namespace emulation {

Fiber* current = nullptr;
Index grid = {}, block = {};
std::vector<Fiber*> ready = {};
std::string error = {};
void (*body)() = nullptr;
size_t shared_bytes = 0;
void* scheduler[5];

[[noreturn]] void leave() { __builtin_longjmp(scheduler, 1); }

[[noreturn]] void fail(const std::string& message) {
  const Index& cta = current->cta->index;
  error = message + " (thread " + std::to_string(current->thread.x) + " of CTA " + std::to_string(cta.x) + ", " +
          std::to_string(cta.y) + ")";
  leave();
}

void pause() {
  if (!__builtin_setjmp(current->context)) leave();
}

void enter() {
  body();
  Fiber& fiber = *current;
  if (fiber.arrivals != fiber.awaited) fail("a thread leaves without waiting at the cluster's barrier");
  if (!--fiber.cta->alive && fiber.awaited < fiber.cta->read_until) fail("a CTA leaves while others read its memory");
  leave();
}

void resume(Fiber* fiber) {
  current = fiber;
  if (__builtin_setjmp(scheduler)) return;
  if (fiber->started) __builtin_longjmp(fiber->context, 1);
  fiber->started = true;
  setcontext(&fiber->start);
}

// Fibers keep their stacks from run to run.
std::vector<std::unique_ptr<Fiber>> pool = {};

Fiber& fresh(size_t index) {
  if (index == pool.size()) {
    pool.push_back(std::make_unique<Fiber>());
    pool.back()->stack.reset(new char[STACK]);
  }
  Fiber& fiber = *pool[index];
  fiber.started = false;
  fiber.arrivals = fiber.awaited = 0;
  fiber.copies.assign(1, {});
  getcontext(&fiber.start);
  fiber.start.uc_stack.ss_sp = fiber.stack.get();
  fiber.start.uc_stack.ss_size = STACK;
  makecontext(&fiber.start, enter, 0);
  return fiber;
}

std::unique_ptr<Cta> new_cta(Cluster& cluster, Index index, int rank, char* base) {
  auto cta = std::make_unique<Cta>();
  cta->index = index;
  cta->rank = rank;
  cta->cluster = &cluster;
  cta->base = base;
  cta->alive = size_t(block.x);
  cta->barrier.expected = block.x;
  cta->warps.resize(size_t(block.x / LANES));
  for (Meeting& warp : cta->warps) warp.expected = LANES;
  return cta;
}

void run_cluster(Index first, int size, unsigned order) {
  const size_t stride = (shared_bytes + 15) / 16 * 16 + GUARD;
  Cluster cluster;
  cluster.threads = size_t(size) * size_t(block.x);
  ready.clear();
  poison_memory(size_t(size) * stride);
  for (int rank = 0; rank < size; ++rank) {
    cluster.ctas.push_back(new_cta(cluster, {first.x + rank, first.y, first.z}, rank, watched + size_t(rank) * stride));
    for (int thread = 0; thread < block.x; ++thread) {
      Fiber& fiber = fresh(size_t(rank) * size_t(block.x) + size_t(thread));
      fiber.thread = {thread, 0, 0};
      fiber.cta = cluster.ctas.back().get();
      ready.push_back(&fiber);
    }
  }
  watched_bytes = size_t(size) * stride;
  while (!ready.empty() && error.empty()) {
    order = order * 1664525 + 1013904223;  // any order is allowed, so take many
    std::swap(ready[(order >> 8) % ready.size()], ready.back());
    Fiber* next = ready.back();
    ready.pop_back();
    resume(next);
  }
  watched_bytes = 0;
  for (const auto& cta : cluster.ctas) {
    if (!error.empty()) return;
    if (cta->alive) error = std::to_string(cta->alive) + " threads of a CTA wait for threads that never come";
  }
}

}  // namespace emulation

