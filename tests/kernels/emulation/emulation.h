// The kernels on a CPU: the words of CUDA and of device.cuh, over threads that are fibers.
//
// The CTAs of a cluster run together in one system thread. A fiber runs until it waits for others, and
// shared memory starts as NaNs. What ends the run with a message: two accesses to shared memory that no
// barrier orders, in whichever order they happened to run; a fiber that waits for one that never comes;
// lanes that meet at different operations; and an address outside the buffers.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
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
  void* context[5];  // __builtin_setjmp's: a third of the time of the library's
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

extern Fiber* current;
extern Index grid, block;
extern std::vector<Fiber*> ready;
extern std::string error;
extern void (*body)();
extern size_t shared_bytes;  // of a CTA

[[noreturn]] void fail(const std::string& message);  // ends the run
void pause();                                        // until another fiber makes this one ready
void run_cluster(Index first, int size, unsigned order);  // `body` by each thread of its CTAs

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

// ---- memory

extern const Range* ranges;  // of global memory
extern int range_count;
extern char* watched;         // the first byte of the cluster's shared memory
extern size_t watched_bytes;  // 0 while no fiber runs

void check(const void* address, size_t bytes, bool writing);  // an access to global memory
void check_shared(const void* address, size_t bytes);
void note(const char* at, size_t bytes, bool writing, bool by_warp = false);  // an access to shared memory
void start_copy(const char* to);                       // of 16 bytes; it may land at any time from here
void land_copy(char* to, const void* from);            // it has been waited for; zeros from null
void poison_memory(size_t bytes);                      // and forget all accesses

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

DEVICE unsigned lanes_with(int value, int line = __builtin_LINE()) {
  return emulation::warp_together<int, unsigned>(line, value, [](auto given, auto results) {
    for (int lane = 0; lane < emulation::LANES; ++lane) {
      *results[lane] = 0;
      for (int other = 0; other < emulation::LANES; ++other)
        *results[lane] |= unsigned(*given[lane] == *given[other]) << other;
    }
  });
}
DEVICE int of_lane(int value, int from, int line = __builtin_LINE()) {
  return emulation::warp_together<int, int>(line * 32 + from, value, [from](auto given, auto results) {
    for (int lane = 0; lane < emulation::LANES; ++lane) *results[lane] = *given[from];
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
