// The kernels on a CPU: the words of CUDA and of device.cuh, over threads that are fibers.
//
// The CTAs of a cluster run together in one system thread. A fiber runs until it waits for others, and
// shared memory starts as NaNs. What ends the run with a message: two accesses to shared memory that no
// barrier orders, in whichever order they happened to run; a fiber that waits for one that never comes;
// lanes that meet at different operations; and an address outside the buffers.
#pragma once
#include <algorithm>
#include <cmath>
#include <csetjmp>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <ucontext.h>
#include <utility>
#include <vector>

#define DEVICE inline
#define UNWATCHED __attribute__((no_sanitize("thread")))
#define IN_CLUSTERS
#define __global__
#define __launch_bounds__(threads, ctas)
#define __maxnreg__(registers)
#define __grid_constant__

struct Float16 { unsigned short bits; };
struct BFloat16 { unsigned short bits; };
struct alignas(16) Pack { unsigned word[4]; };
struct alignas(16) Four { float value[4]; };

namespace emulation {

constexpr int LANES = 32;
constexpr size_t STACK = 64 << 10;
constexpr size_t GUARD = 4096;  // behind a CTA's shared memory
constexpr unsigned char POISON = 0xFF;

struct Index { int x, y, z; };
struct Range { const char* begin; const char* end; int writable; };
struct Fiber;
struct Cta;

// Fibers that wait until all of them have come to the same place.
struct Meeting {
  int expected = 0;
  int place = 0;
  std::vector<Fiber*> here = {};
};

struct Cluster {
  std::vector<std::unique_ptr<Cta>> ctas = {};
  std::vector<Fiber*> waiting = {};
  size_t threads = 0, arrived = 0, phase = 0;
  std::vector<bool> relaxed = {};  // of each arrival: whether it hands nothing over
};

struct Cta {
  Index index = {};
  int rank = 0;
  unsigned barriers = 0;    // that its threads have passed
  unsigned read_until = 0;  // the cluster's barrier behind the last read by another CTA
  Cluster* cluster = nullptr;
  char* base = nullptr;  // of its shared memory
  size_t alive = 0;
  Meeting barrier = {};
  std::vector<Meeting> warps = {};
};

struct Fiber {
  jmp_buf context;
  ucontext_t start;
  std::unique_ptr<char[]> stack = nullptr;
  bool started = false;
  Index thread = {};
  Cta* cta = nullptr;
  unsigned arrivals = 0, awaited = 0;  // of the cluster's barrier
  const void* given = nullptr;       // a lane's part of an operation of its warp
  void* result = nullptr;
  std::vector<std::vector<std::pair<char*, const void*>>> copies = {};  // batches, the last open; null: zeros

  int lane() const { return thread.x % LANES; }
  int number() const { return cta->rank * 1024 + thread.x; }  // in the cluster
  Meeting& warp() { return cta->warps[thread.x / LANES]; }
};

inline Fiber* current = nullptr;
inline Index grid = {}, block = {};
inline std::vector<Fiber*> ready = {};
inline jmp_buf scheduler;
inline std::string error = {};
inline const Range* ranges = nullptr;
inline int range_count = 0, likely = 0;
inline std::function<void()> body = {};

[[noreturn]] inline void leave() { _longjmp(scheduler, 1); }

[[noreturn]] inline void fail(const std::string& message) {
  const Index& cta = current->cta->index;
  error = message + " (thread " + std::to_string(current->thread.x) + " of CTA " + std::to_string(cta.x) + ", " +
          std::to_string(cta.y) + ")";
  leave();
}

inline void pause() {
  if (!_setjmp(current->context)) leave();
}

// Waits for everybody; the last to come does `last` for all.
template <class Last> void meet(Meeting& meeting, int place, const Last& last) {
  if (!meeting.here.empty() && meeting.place != place)
    fail("threads wait for each other in lines " + std::to_string(meeting.place) + " and " + std::to_string(place));
  meeting.place = place;
  meeting.here.push_back(current);
  if (int(meeting.here.size()) < meeting.expected) return pause();
  last(meeting.here);
  for (Fiber* fiber : meeting.here)
    if (fiber != current) ready.push_back(fiber);
  meeting.here.clear();
}

// Runs `all(lanes)` once, with the lanes in order, when each has given its part.
template <class Given, class Result, class All> Result warp_together(int line, const Given& given, const All& all) {
  Result result = {};
  current->given = &given;
  current->result = &result;
  meet(current->warp(), line, [&](const std::vector<Fiber*>& here) {
    const Given* parts[LANES];
    Result* results[LANES];
    for (Fiber* fiber : here) {
      parts[fiber->lane()] = static_cast<const Given*>(fiber->given);
      results[fiber->lane()] = static_cast<Result*>(fiber->result);
    }
    all(parts, results);
  });
  return result;
}

inline size_t shared_bytes = 0;  // of a CTA

inline void check(const void* address, size_t bytes, bool writing) {
  const char* at = static_cast<const char*>(address);
  if (reinterpret_cast<uintptr_t>(at) % bytes) fail("an address is not aligned to " + std::to_string(bytes) + " bytes");
  for (int i = 0; i < range_count; ++i, ++likely) {
    const Range& range = ranges[likely %= range_count];
    if (at < range.begin || at + bytes > range.end) continue;
    if (writing && !range.writable) fail("a write to an input");
    return;
  }
  fail(writing ? "a write outside the buffers" : "a read outside the buffers");
}

inline void check_shared(const void* address, size_t bytes) {
  const char* at = static_cast<const char*>(address);
  if (reinterpret_cast<uintptr_t>(at) % bytes) fail("a shared address is not aligned");
  if (at < current->cta->base || at + bytes > current->cta->base + shared_bytes)
    fail("an address outside shared memory");
}

// ---- races in shared memory

// When two bytes were last written, or read since. All threads of a CTA pass the same barriers, so counts
// tell whether one lies between two accesses.
struct Access {
  int16_t cta;           // its rank in the cluster, or SEVERAL
  int16_t thread;        // its number in the cluster, or SEVERAL
  uint16_t next;         // the CTA's next barrier then, from 1 on; 0: there was no access
  uint16_t arrivals;     // at the cluster's barrier until then
};
struct Shadow { Access write, read; };

constexpr int16_t SEVERAL = -1;
constexpr Access UNDER_WAY = {SEVERAL, SEVERAL, 0xFFFF, 0xFFFF};  // a copy that has not been waited for
inline std::vector<Pack> memory = {};      // of all CTAs of the cluster, a guard behind each
inline std::vector<Shadow> shadow = {};    // of each two bytes
inline char* watched = nullptr;            // the memory's first byte
inline Shadow* shadows = nullptr;          // and its shadow
inline size_t watched_bytes = 0;           // 0 while no fiber runs

UNWATCHED inline Access access_now(bool by_warp) {
  const Fiber& now = *current;
  return {int16_t(now.cta->rank), by_warp ? SEVERAL : int16_t(now.number()), uint16_t(now.cta->barriers + 1),
          uint16_t(now.arrivals)};
}

// Whether an arrival that hands over lies between an access and what the fiber has awaited.
UNWATCHED inline bool handed_over(const Access& then) {
  const std::vector<bool>& relaxed = current->cta->cluster->relaxed;
  for (size_t arrival = then.arrivals; arrival < current->awaited; ++arrival)
    if (!relaxed[arrival]) return true;
  return false;
}

UNWATCHED inline bool happened_before(const Access& then, const Access& now) {
  return then.next == 0 || (then.thread == now.thread && then.thread != SEVERAL) ||
         (then.cta == now.cta && then.next < now.next) || handed_over(then);
}

UNWATCHED inline Access both(const Access& one, const Access& other) {
  return {one.cta == other.cta ? one.cta : SEVERAL, SEVERAL, one.next > other.next ? one.next : other.next,
          one.arrivals > other.arrivals ? one.arrivals : other.arrivals};
}

// Notes an access, and fails where another thread's is neither before nor behind it. What ldmatrix reads
// goes to other lanes than the one that gives the address: a whole warp reads it.
UNWATCHED inline void note(const char* at, size_t bytes, bool writing, bool by_warp = false) {
  const size_t first = size_t(at - watched) / 2, last = (size_t(at - watched) + bytes - 1) / 2;
  const Access now = access_now(by_warp);
  for (size_t i = first; i <= last; ++i) {
    Shadow& shadow = shadows[i];
    if (!happened_before(shadow.write, now)) fail(writing ? "a race of two writes" : "a race of a write and a read");
    if (!writing) shadow.read = happened_before(shadow.read, now) ? now : both(shadow.read, now);
    else if (!happened_before(shadow.read, now)) fail("a race of a read and a write");
    else shadow = {now, {}};
  }
}

// Any access to any memory: only that to shared memory is of interest.
UNWATCHED inline void touch(const void* address, size_t bytes, bool writing) {
  const char* at = static_cast<const char*>(address);
  if (size_t(at - watched) >= watched_bytes) return;
  if (at < current->cta->base || at + bytes > current->cta->base + shared_bytes) fail("an address outside shared memory");
  note(at, bytes, writing);
}

// A copy may land at any time from here until it is waited for.
UNWATCHED inline void start_copy(const char* to) {
  note(to, 16, true);
  std::fill_n(shadows + (to - watched) / 2, 8, Shadow{UNDER_WAY, {}});
}

UNWATCHED inline void land_copy(char* to, const void* from) {
  std::fill_n(shadows + (to - watched) / 2, 8, Shadow{});
  note(to, 16, true);
  if (from) std::memcpy(to, from, 16);
  else std::memset(to, 0, 16);
}

// ---- arithmetic

inline float float_from(uint32_t bits) { float value; std::memcpy(&value, &bits, 4); return value; }
inline uint32_t bits_from(float value) { uint32_t bits; std::memcpy(&bits, &value, 4); return bits; }

inline float widen_half(uint16_t bits) {
  const uint32_t sign = uint32_t(bits & 0x8000) << 16, exponent = bits >> 10 & 31, fraction = bits & 1023;
  if (exponent == 31) return float_from(sign | 0x7F800000 | fraction << 13);
  if (exponent) return float_from(sign | (exponent + 112) << 23 | fraction << 13);
  const float tiny = float(fraction) * 0x1p-24f;
  return sign ? -tiny : tiny;
}

// Drops `bits` low bits of a magnitude, to nearest, ties to even.
inline uint32_t round_off(uint32_t magnitude, int bits) {
  return (magnitude + (1u << (bits - 1)) - 1 + (magnitude >> bits & 1)) >> bits;
}

inline uint16_t narrow_half(float value) {
  const uint32_t bits = bits_from(value), magnitude = bits & 0x7FFFFFFF;
  const uint16_t sign = uint16_t(bits >> 16 & 0x8000);
  if (magnitude > 0x7F800000) return 0x7FFF;
  if (magnitude >= 0x47800000) return sign | 0x7C00;  // 2^16 and more
  if (magnitude >= 0x38800000) return uint16_t(sign | round_off(magnitude - 0x38000000, 13));
  const int shift = 126 - int(magnitude >> 23);  // a subnormal: multiples of 2^-24
  if (shift > 31) return sign;
  return uint16_t(sign | round_off((magnitude & 0x7FFFFF) | 0x800000, shift));
}

inline uint16_t narrow_bfloat(float value) {
  const uint32_t bits = bits_from(value);
  if ((bits & 0x7FFFFFFF) > 0x7F800000) return 0x7FFF;
  return uint16_t(bits >> 31 << 15 | round_off(bits & 0x7FFFFFFF, 16));
}

}  // namespace emulation

#define threadIdx (emulation::current->thread)
#define blockIdx (emulation::current->cta->index)
#define gridDim (emulation::grid)

// ---- the words of device.cuh, in its order

DEVICE unsigned char* shared_memory() { return reinterpret_cast<unsigned char*>(emulation::current->cta->base); }

DEVICE float widen(float value) { return value; }
DEVICE float widen(BFloat16 value) { return emulation::float_from(uint32_t(value.bits) << 16); }
DEVICE float widen(Float16 value) { return emulation::widen_half(value.bits); }
DEVICE void round_to(float& to, float value) { to = value; }
DEVICE void round_to(BFloat16& to, float value) { to.bits = emulation::narrow_bfloat(value); }
DEVICE void round_to(Float16& to, float value) { to.bits = emulation::narrow_half(value); }
DEVICE unsigned bits_of(float value) { return emulation::bits_from(value); }
DEVICE float float_of(unsigned bits) { return emulation::float_from(bits); }

DEVICE unsigned low_halves(unsigned first, unsigned second) { return (first & 0xFFFF) | second << 16; }
DEVICE unsigned high_halves(unsigned first, unsigned second) { return first >> 16 | (second & 0xFFFF0000); }

template <class T> DEVICE void compute_here(T& value) {}

template <class T> DEVICE T read(const T* from) { emulation::check(from, sizeof(T), false); return *from; }
DEVICE Pack read16(const void* from) { emulation::check(from, 16, false); return *static_cast<const Pack*>(from); }
template <class T> DEVICE void write(T* to, T value) { emulation::check(to, sizeof(T), true); *to = value; }
DEVICE void write16(void* to, Pack pack) { emulation::check(to, 16, true); *static_cast<Pack*>(to) = pack; }
DEVICE void prefetch(const void* address) { emulation::check(address, 1, false); }

DEVICE float shuffle_xor(float value, int mask, int line = __builtin_LINE()) {
  return emulation::warp_together<float, float>(line * 32 + mask, value, [mask](auto given, auto results) {
    for (int lane = 0; lane < emulation::LANES; ++lane) *results[lane] = *given[lane ^ mask];
  });
}

DEVICE void __syncthreads(int line = __builtin_LINE()) {
  emulation::meet(emulation::current->cta->barrier, line, [](const auto&) { ++emulation::current->cta->barriers; });
}

DEVICE int cluster_rank() { return emulation::current->cta->rank; }
DEVICE int cluster_size() { return int(emulation::current->cta->cluster->ctas.size()); }
DEVICE void cluster_arrive(bool relaxed = false) {
  emulation::Fiber& fiber = *emulation::current;
  emulation::Cluster& cluster = *fiber.cta->cluster;
  if (fiber.arrivals == cluster.relaxed.size()) cluster.relaxed.push_back(relaxed);
  if (fiber.arrivals++ != fiber.awaited) emulation::fail("a second arrival at the cluster's barrier without a wait");
  if (++cluster.arrived < cluster.threads) return;
  cluster.arrived = 0;
  ++cluster.phase;
  emulation::ready.insert(emulation::ready.end(), cluster.waiting.begin(), cluster.waiting.end());
  cluster.waiting.clear();
}
DEVICE void cluster_arrive_relaxed() { cluster_arrive(true); }
DEVICE void cluster_wait() {
  emulation::Fiber& fiber = *emulation::current;
  emulation::Cluster& cluster = *fiber.cta->cluster;
  if (++fiber.awaited != fiber.arrivals) emulation::fail("a wait at the cluster's barrier without an arrival");
  if (cluster.phase >= fiber.awaited) return;
  cluster.waiting.push_back(&fiber);
  emulation::pause();
}
template <class T> UNWATCHED DEVICE T read_remote(const T* mine, int rank) {
  emulation::check_shared(mine, sizeof(T));
  const emulation::Cta& own = *emulation::current->cta;
  emulation::Cta& theirs = *own.cluster->ctas.at(rank);
  if (!theirs.alive) emulation::fail("a read of shared memory of a CTA that has left");
  if (&theirs != &own) theirs.read_until = std::max(theirs.read_until, emulation::current->arrivals + 1);
  const char* there = theirs.base + (reinterpret_cast<const char*>(mine) - own.base);
  emulation::note(there, sizeof(T), false);
  return *reinterpret_cast<const T*>(there);
}

DEVICE void copy16(void* to, const void* from) {
  emulation::check_shared(to, 16);
  emulation::check(from, 16, false);
  emulation::start_copy(static_cast<char*>(to));
  emulation::current->copies.back().push_back({static_cast<char*>(to), from});
}
DEVICE void copy16_or_zeros(void* to, const void* from, bool there) {
  if (there) return copy16(to, from);
  emulation::check_shared(to, 16);
  emulation::start_copy(static_cast<char*>(to));
  emulation::current->copies.back().push_back({static_cast<char*>(to), nullptr});
}
DEVICE void close_copies() { emulation::current->copies.emplace_back(); }
template <int Left> DEVICE void wait_for_copies() {  // a copy lands as late as it may
  auto& batches = emulation::current->copies;
  while (batches.size() > Left + 1) {
    for (auto [to, from] : batches.front()) emulation::land_copy(to, from);
    batches.erase(batches.begin());
  }
}

namespace emulation {

struct Fragment { unsigned word[4]; };

inline void load(unsigned (&to)[4], const void* row, bool across, int line) {
  check_shared(row, 16);
  note(static_cast<const char*>(row), 16, false, true);
  const Fragment all = warp_together<const void*, Fragment>(line, row, [across](auto given, auto results) {
    for (int lane = 0; lane < LANES; ++lane)
      for (int matrix = 0; matrix < 4; ++matrix) {
        const auto at = [&](int i, int j) { return unsigned(static_cast<const uint16_t*>(*given[matrix * 8 + i])[j]); };
        const int i = lane / 4, j = lane % 4 * 2;
        results[lane]->word[matrix] = across ? at(j, i) | at(j + 1, i) << 16 : at(i, j) | at(i, j + 1) << 16;
      }
  });
  std::memcpy(to, all.word, sizeof to);
}

struct Operands { float sum[4]; unsigned left[4], right[2]; };
struct Sums { float sum[4]; };

// The fragments of mma.m16n8k16 as the PTX ISA has them: lane 4 g + t holds
//   left  [g, 2t..] [g + 8, 2t..] [g, 2t + 8..] [g + 8, 2t + 8..]      right  [2t.., g] [2t + 8.., g]
//   sum   [g, 2t] [g, 2t + 1] [g + 8, 2t] [g + 8, 2t + 1]
template <class T> void multiply_warp(const Operands* const (&given)[LANES], Sums* const (&results)[LANES]) {
  const auto half = [](unsigned word, int i) { return widen(T{static_cast<unsigned short>(word >> (i * 16))}); };
  float left[16][16], right[16][8];
  for (int lane = 0; lane < LANES; ++lane)
    for (int part = 0; part < 4; ++part)
      for (int i = 0; i < 2; ++i) {
        const int group = lane / 4, along = lane % 4 * 2 + i;
        left[group + part % 2 * 8][along + part / 2 * 8] = half(given[lane]->left[part], i);
        if (part < 2) right[along + part * 8][group] = half(given[lane]->right[part], i);
      }
  for (int lane = 0; lane < LANES; ++lane)
    for (int part = 0; part < 4; ++part) {
      const int row = lane / 4 + part / 2 * 8, column = lane % 4 * 2 + part % 2;
      double sum = given[lane]->sum[part];
      for (int i = 0; i < 16; ++i) sum += double(left[row][i]) * right[i][column];
      results[lane]->sum[part] = float(sum);
    }
}

}  // namespace emulation

DEVICE void load_matrices(unsigned (&to)[4], const void* row, int line = __builtin_LINE()) {
  emulation::load(to, row, false, line);
}
DEVICE void load_matrices_across(unsigned (&to)[4], const void* row, int line = __builtin_LINE()) {
  emulation::load(to, row, true, line);
}
template <class T>
DEVICE void multiply(float (&sum)[4], const unsigned (&left)[4], unsigned right0, unsigned right1, T,
                     int line = __builtin_LINE()) {
  const emulation::Operands given = {
      {sum[0], sum[1], sum[2], sum[3]}, {left[0], left[1], left[2], left[3]}, {right0, right1}};
  const emulation::Sums sums = emulation::warp_together<emulation::Operands, emulation::Sums>(
      line, given, [](auto& given, auto& results) { emulation::multiply_warp<T>(given, results); });
  std::memcpy(sum, sums.sum, sizeof sum);
}

// ---- the grid

namespace emulation {

inline void enter() {
  body();
  Fiber& fiber = *current;
  if (fiber.arrivals != fiber.awaited) fail("a thread leaves without waiting at the cluster's barrier");
  if (!--fiber.cta->alive && fiber.awaited < fiber.cta->read_until) fail("a CTA leaves while others read its memory");
  leave();
}

inline void resume(Fiber* fiber) {
  current = fiber;
  if (_setjmp(scheduler)) return;
  if (fiber->started) _longjmp(fiber->context, 1);
  fiber->started = true;
  setcontext(&fiber->start);
}

// Fibers keep their stacks from run to run.
inline std::vector<std::unique_ptr<Fiber>> pool = {};

inline Fiber& fresh(size_t index) {
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

inline std::unique_ptr<Cta> new_cta(Cluster& cluster, Index index, int rank, char* base) {
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

inline void poison_memory(size_t bytes) {
  memory.resize(std::max(memory.size(), bytes / sizeof(Pack)));
  shadow.resize(std::max(shadow.size(), bytes / 2));
  std::memset(memory.data(), POISON, bytes);
  std::memset(shadow.data(), 0, bytes / 2 * sizeof(Shadow));
  watched = reinterpret_cast<char*>(memory.data());
  shadows = shadow.data();
}

inline void run_cluster(Index first, int size, unsigned order) {
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

// ---- what g++ -fsanitize=thread calls at each access to memory

#define WATCH(bytes)                                                                                    \
  extern "C" UNWATCHED void __tsan_read##bytes(void* at) { emulation::touch(at, bytes, false); }        \
  extern "C" UNWATCHED void __tsan_write##bytes(void* at) { emulation::touch(at, bytes, true); }        \
  extern "C" UNWATCHED void __tsan_unaligned_read##bytes(void* at) { emulation::touch(at, bytes, false); } \
  extern "C" UNWATCHED void __tsan_unaligned_write##bytes(void* at) { emulation::touch(at, bytes, true); }
WATCH(1)
WATCH(2)
WATCH(4)
WATCH(8)
WATCH(16)
extern "C" UNWATCHED void __tsan_read_range(void* at, size_t bytes) { emulation::touch(at, bytes, false); }
extern "C" UNWATCHED void __tsan_write_range(void* at, size_t bytes) { emulation::touch(at, bytes, true); }
extern "C" UNWATCHED void __tsan_vptr_update(void*, void*) {}
extern "C" UNWATCHED void __tsan_func_entry(void*) {}
extern "C" UNWATCHED void __tsan_func_exit(void*) {}
extern "C" UNWATCHED void __tsan_init() {}
